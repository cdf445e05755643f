"""Drafts from the text itself on the embedded model: the same texts, and what they cost and save.

Run: python scripts/bench_drafts.py [texts] [rounds]    (default: 20, 15)

Prints JSON:

- "agreement": of so many texts, with each of three samplers and 0, 8 and 4 bits of cache, those that are the same with
  drafts and without, and the drafted tokens in them.
- "edit": a file is the prompt, and the answer is the same file with a name changed, token by token whatever the model
  says: tokens a step, and the times of both loops.
- "recall": the model has told a story, is asked for the same once more, and mostly copies it; greedily.
- "not drafted": every token is drawn alike from all, so that nothing repeats; "stories": the model's own, of a sampler.

Times are those with drafts divided by those without, of wall and of processor time: medians over rounds, in turns.
"""

import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)

import mlx.core as mx

from kvant.cache import sequences
from kvant.engine.load import POCKET
from kvant.engine.response import GenerationResponse
from kvant.engine.sampling import make_sampler
from kvant.machine import environment
from kvant.tools.report.texts import heldout_documents

SAMPLERS: dict[str, dict[str, float]] = {"greedy": {}, "temp 0.7": {"temp": 0.7}, "top-p": {"temp": 1.0, "top_p": 0.95}}
Make = Callable[[str], Iterator[GenerationResponse]]  # "prompt" or "none" -> the answer


def main() -> None:
    """Measure and print."""
    given = [int(text) for text in sys.argv[1:]]
    texts, rounds = (given + [20, 15][len(given) :])[:2]
    model, tokenizer = kvant.load(POCKET)
    stories = [each["messages"][0]["content"] for each in heldout_documents() if each["kind"] == "story"]

    def answer(prompt: Any, **options: Any) -> Make:
        return lambda draft: iter(kvant.stream_generate(model, tokenizer, prompt, draft=draft, **options))

    def story(number: int) -> list[int]:
        asked = [{"role": "user", "content": stories[number % len(stories)]}]
        ids: list[int] = tokenizer.apply_chat_template(asked, add_generation_prompt=True)
        return ids

    def told_twice(number: int) -> list[int]:
        question = stories[number % 4]
        if question not in told:
            told[question] = kvant.generate(model, tokenizer, story(number % 4), max_tokens=250)
        asked = {"role": "user", "content": question}
        messages = [asked, {"role": "assistant", "content": told[question]}, asked]
        ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return ids

    told: dict[str, str] = {}
    record: dict[str, Any] = {
        "machine": f"{environment().device}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "texts": texts,
        "rounds": rounds,
        "agreement": {},
    }
    for bits in (0, 8, 4):
        for name, options in SAMPLERS.items():
            same = drafted = 0
            for number in range(texts):
                sampler = make_sampler(**options, seed=number)
                both = answer(
                    story(number) + tokenizer.encode(stories[number % len(stories)]),
                    sampler=sampler, max_tokens=150, kv_bits=bits,
                )  # fmt: skip
                plain, other = (list(both(draft)) for draft in ("none", "prompt"))
                same += [each.token for each in plain] == [each.token for each in other]
                drafted += sum(each.from_draft for each in other)
            record["agreement"][f"{bits} bits, {name}"] = {"same": same, "drafted tokens": drafted}

    source = inspect.getsource(sequences)[:1800]
    before, after = (tokenizer.encode(text) for text in (source, source.replace("num_tokens", "token_count")))
    cases: dict[str, Callable[[int], Make]] = {
        "edit": lambda number: (
            lambda draft: answer(before, sampler=_dictated(after), max_tokens=len(after), kv_bits=8)(draft)
        ),
        "recall": lambda number: answer(told_twice(number), max_tokens=250, kv_bits=8),
        "not drafted": lambda number: answer(
            story(number), sampler=make_sampler(50.0, seed=number), max_tokens=200, kv_bits=8
        ),
        "stories": lambda number: answer(
            story(number), sampler=make_sampler(1.0, 0.95, seed=number), max_tokens=200, kv_bits=8
        ),
    }
    for name, case in cases.items():
        record[name] = _measured(case, rounds)
    print(json.dumps(record, indent=1))


def _dictated(tokens: Sequence[int]) -> Callable[[mx.array], mx.array]:
    """A sampler that picks these tokens, one after another."""
    following = iter([*tokens, *tokens[-1:] * 2])
    return lambda logprobs: mx.array([next(following)])


def _measured(case: Callable[[int], Make], rounds: int) -> dict[str, Any]:
    """Both loops in turns; the first round is not counted."""
    ratios: list[tuple[float, float]] = []
    steps = tokens = drafted = accepted = off = 0
    for number in range(rounds + 1):
        times: dict[str, tuple[float, float]] = {}
        for draft in ("none", "prompt") if number % 2 else ("prompt", "none"):
            make = case(number)
            wall, busy = time.perf_counter(), time.process_time()
            responses = list(make(draft))
            times[draft] = time.perf_counter() - wall, time.process_time() - busy
            counts = responses[-1].drafts
            if counts is not None and number:
                steps, tokens = steps + counts.steps, tokens + counts.steps + counts.accepted
                drafted, accepted = drafted + counts.drafted, accepted + counts.accepted
                off += counts.off is not None
        if number:
            ratios.append((times["prompt"][0] / times["none"][0], times["prompt"][1] / times["none"][1]))
    return {
        "tokens a step": round(tokens / steps, 2),
        "drafted": drafted,
        "accepted": accepted,
        "switched off": off,
        "wall": round(median(wall for wall, _ in ratios), 3),
        "processor": round(median(busy for _, busy in ratios), 3),
        "walls": sorted(round(wall, 2) for wall, _ in ratios),
    }


if __name__ == "__main__":
    main()

"""Drafts from the text itself on the embedded model: what they cost and save. Tests show that the texts are
the same.

Run: python scripts/bench_drafts.py [rounds]    (default: 15)

Prints JSON:

- "edit": a file is the prompt, and the answer is the same file with a name changed, token by token whatever
  the model says: tokens a step, and the times of both loops.
- "recall": the model has told a story, is asked for the same once more, and mostly copies it; greedily.
- "not drafted": every token is drawn alike from all, so that nothing repeats; "stories": the model's own, of
  a sampler.

Times are those with drafts divided by those without, of wall and of processor time: medians over rounds, in
turns.
"""

import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from statistics import median
from typing import Any

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)

import mlx.core as mx

from kvant.cache import pool_sequence
from kvant.engine.load import POCKET
from kvant.engine.stream import GenerationResponse
from kvant.machine import environment
from kvant.sample_utils import make_sampler
from kvant.tools.report.texts import heldout_documents
from kvant.tools.statistics import in_turns

Answer = Callable[[int, str], Iterator[GenerationResponse]]  # of a round, with drafts "prompt" or "none"


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    model, tokenizer = kvant.load(POCKET)
    stories = [each["messages"][0]["content"] for each in heldout_documents() if each["kind"] == "story"]
    told: dict[int, str] = {}

    def answer(prompt: Any, draft: str, **options: Any) -> Iterator[GenerationResponse]:
        return iter(kvant.stream_generate(model, tokenizer, prompt, draft=draft, **options))

    def ids(*said: str) -> list[int]:
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
        found: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return found

    def told_twice(number: int) -> list[int]:
        question = stories[number % 4]
        if number % 4 not in told:
            told[number % 4] = kvant.generate(model, tokenizer, ids(question), max_tokens=250)
        return ids(question, told[number % 4], question)

    source = inspect.getsource(pool_sequence)[:1800]
    before, after = (tokenizer.encode(text) for text in (source, source.replace("num_tokens", "token_count")))
    cases: dict[str, Answer] = {
        "edit": lambda number, draft: answer(before, draft, sampler=_dictated(after), max_tokens=len(after)),
        "recall": lambda number, draft: answer(told_twice(number), draft, max_tokens=250),
        **{
            name: lambda number, draft, given=given: answer(  # type: ignore[misc]
                ids(stories[number % len(stories)]),
                draft,
                sampler=make_sampler(*given, seed=number),
                max_tokens=200,
            )
            for name, given in (("not drafted", (50.0,)), ("stories", (1.0, 0.95)))
        },
    }
    record = {
        "machine": f"{environment().device}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "rounds": rounds,
        **{name: _measured(case, rounds) for name, case in cases.items()},
    }
    print(json.dumps(record, indent=1))


def _dictated(tokens: Sequence[int]) -> Callable[[mx.array], mx.array]:
    """A sampler that picks these tokens, one after another."""
    following = iter([*tokens, *tokens[-1:] * 2])
    return lambda logprobs: mx.array([next(following)])


def _measured(case: Answer, rounds: int) -> dict[str, Any]:
    """Both loops in turns."""

    def way(draft: str) -> Callable[[], tuple[float, float, Any]]:
        numbers = count()

        def run() -> tuple[float, float, Any]:
            number = next(numbers)
            wall, busy = time.perf_counter(), time.process_time()
            responses = list(case(number, draft))
            return time.perf_counter() - wall, time.process_time() - busy, responses[-1].drafts

        return run

    found = in_turns({"none": way("none"), "prompt": way("prompt")}, rounds)
    both = [*zip(found["prompt"], found["none"], strict=True)]
    walls, busy = ([own[place] / plain[place] for own, plain in both] for place in (0, 1))
    counts = [drafts for *_, drafts in found["prompt"] if drafts is not None]
    steps = sum(each.steps for each in counts)
    return {
        "tokens a step": round((steps + sum(each.accepted for each in counts)) / steps, 2),
        "drafted": sum(each.drafted for each in counts),
        "accepted": sum(each.accepted for each in counts),
        "switched off": sum(each.off is not None for each in counts),
        "wall": round(median(walls), 3),
        "processor": round(median(busy), 3),
        "walls": sorted(round(wall, 2) for wall in walls),
    }


if __name__ == "__main__":
    main()

"""Score an exported folder by kind on held-out documents, writing every answer greedily with transformers."""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import facts, small_talk, story_chat, story_questions
from document import Document
from facts import recall
from transformers import AutoModelForCausalLM, AutoTokenizer

Messages = list[dict[str, str]]


@dataclass
class Case:
    """A conversation up to a turn of the assistant, and what that turn should be (or name)."""

    kind: str
    messages: Messages
    expected: str


def _turns(document: Document, kind: str, first: int = 0) -> Iterator[Case]:
    """Make a case of each assistant turn from `first` on, with the right answers before it."""
    messages = document.messages()
    spoken = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    for index in spoken[first:]:
        yield Case(kind, messages[:index], messages[index]["content"])


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield held-out cases of every kind: `count` documents each."""
    rng = random.Random(f"evaluate-{seed}")
    for _ in range(count):
        document = story_chat(rng, True)
        first = next(index for index, turn in enumerate(document.turns) if turn.role == "assistant")
        yield Case("names", document.messages()[:first], document.hero or "")
        document = story_questions(rng, True)
        told = next(turn.weight for turn in document.turns if turn.role == "assistant") < 1
        yield from _turns(document, "questions", 1 if told else 0)
        yield from _turns(facts(rng, True), "facts")
        yield from _turns(small_talk(rng, True), "talk")
    for number in (2, 4, 8, 16, 24):
        for _ in range(count // 2):
            yield from _turns(recall(rng, number, 4, 0, True), f"recall-{number}")
    for padding in (150, 350, 650):
        for _ in range(max(4, count // 3)):
            yield from _turns(recall(rng, 8, 4, padding, True), f"recall-8 after {padding}+ words")


class Judge:
    """An exported model, asked greedily."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.tokenizer.padding_side = "left"
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def prompt(self, messages: Messages) -> list[int]:
        """Return the token ids that the model is to go on from."""
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @torch.no_grad()
    def write(
        self, prompts: list[list[int]], length: int, temperature: float = 0.0, top_p: float = 1.0
    ) -> list[str]:
        """Write what follows each prompt."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        sampling = (
            {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
            if temperature
            else {"do_sample": False}
        )
        out = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=length,
            pad_token_id=0,
            eos_token_id=[0, 2],
            **sampling,
        )
        return self.tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)


def score(judge: Judge, found: list[Case], rows: int = 16) -> dict[str, dict[str, float]]:
    """Return for each kind the share of right answers, how many were asked, and the longest prompt."""
    prompts = [judge.prompt(case.messages) for case in found]
    order = sorted(range(len(found)), key=lambda index: (found[index].kind == "names", len(prompts[index])))
    tally: dict[str, list[tuple[bool, int]]] = defaultdict(list)
    while order:
        kind_is_names = found[order[0]].kind == "names"
        part = [index for index in order[:rows] if (found[index].kind == "names") == kind_is_names]
        order = order[len(part) :]
        texts = judge.write([prompts[index] for index in part], 36 if kind_is_names else 28)
        for index, text in zip(part, texts, strict=True):
            expected = found[index].expected
            good = (
                re.search(rf"\b{expected}\b", text) is not None if kind_is_names else text.strip() == expected
            )
            tally[found[index].kind].append((good, len(prompts[index])))
    return {
        kind: {
            "exact": round(sum(good for good, _ in results) / len(results), 4),
            "asked": len(results),
            "tokens": round(sum(size for _, size in results) / len(results)),
        }
        for kind, results in sorted(tally.items())
    }


def main() -> None:
    """Print the scores by kind, and stories if asked for."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--tell", nargs="*", default=[], help="requests to answer in full before scoring")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    judge = Judge(args.folder)
    for request in args.tell:
        for temperature in {0.0, args.temperature}:
            prompt = judge.prompt([{"role": "user", "content": request}])
            print(f"[{request} at {temperature}]\n{judge.write([prompt], 320, temperature)[0]}\n")
    for kind, result in score(judge, list(cases(args.seed, args.count))).items():
        print(json.dumps({"kind": kind, **result}))


if __name__ == "__main__":
    main()

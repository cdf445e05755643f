"""Prompts drawn at random, the same for every engine; each round has its own, lest a server remembers the last.

A prompt may come with its answer: then that is generated, whatever the model holds for likely.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from kvant.errors import BenchError
from kvant.text.tokenizer import Tokenizer

MAX_DRAWS = 1000  # a token wanted
UNCHANGED = 100  # tokens of a replayed edit of which one is another
Replay = Literal["edit", "new"]
WORD = re.compile(r" [A-Za-z]+")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the text a server is sent, which has these ids; None where no server is measured.

    Attributes:
        answer: token ids to generate; None: the likeliest ones.
    """

    ids: list[int]
    text: str | None = None
    answer: list[int] | None = None


Prompts = Callable[[int, int], Prompt]  # of a number of tokens, in a round


def random_prompts(seed: int, vocab_size: int) -> Prompts:
    """Ids from the whole vocabulary."""

    def draw(context: int, round_number: int) -> Prompt:
        return Prompt(_random(seed, context, round_number).choices(range(vocab_size), k=context))

    return draw


def word_prompts(seed: int, tokenizer: Tokenizer, vocab_size: int) -> Prompts:
    """Tokens that are a word each: text of them is read back as the same tokens, which a server has to do."""

    def draw(context: int, round_number: int) -> Prompt:
        source = _random(seed, context, round_number)
        ids: list[int] = []
        for _ in range(MAX_DRAWS * context):
            token = source.randrange(vocab_size)
            if WORD.fullmatch(tokenizer.decode([token])):
                ids.append(token)
                if len(ids) == context:
                    break
        text = tokenizer.decode(ids)
        if len(ids) < context or tokenizer.encode(text, add_special_tokens=False) != ids:
            raise BenchError("the model's tokenizer has no tokens of a word each, to make a server's prompt of")
        return Prompt(ids, text)

    return draw


def with_answers(prompts: Prompts, replay: Replay, seed: int, vocab_size: int, max_tokens: int) -> Prompts:
    """Prompts with an answer: "edit", the prompt again, one of 100 tokens another; "new", random ids."""

    def draw(context: int, round_number: int) -> Prompt:
        prompt = prompts(context, round_number)
        source = _random(seed, -context, round_number)
        answer = source.choices(range(vocab_size), k=max_tokens)
        if replay == "edit":
            kept = (prompt.ids * (max_tokens // context + 1))[:max_tokens]
            answer = [new if source.randrange(UNCHANGED) == 0 else old for new, old in zip(answer, kept, strict=True)]
        return replace(prompt, answer=answer)

    return draw


def _random(seed: int, context: int, round_number: int) -> random.Random:
    return random.Random(f"{seed} {context} {round_number}")

"""Prompts drawn at random, the same for every engine; each has its own number, lest an engine remembers
the last.
"""

import random
import re
from collections.abc import Callable
from itertools import islice

from kvant.errors import BenchError
from kvant.text.tokenizer import Tokenizer

MAX_DRAWS = 1000  # a token wanted
WORD = re.compile(r" [A-Za-z]+")

Prompt = tuple[list[int], str | None]  # token ids, and text with these ids for a server
Prompts = Callable[[int, int], Prompt]  # of a number of tokens, and a number of its own


def random_prompts(seed: int, vocab_size: int) -> Prompts:
    def draw(context: int, number: int) -> Prompt:
        return random.Random(f"{seed} {context} {number}").choices(range(vocab_size), k=context), None

    return draw


def word_prompts(seed: int, tokenizer: Tokenizer, vocab_size: int) -> Prompts:
    """Tokens that are a word each: a server reads their text back as the same tokens."""

    def draw(context: int, number: int) -> Prompt:
        source = random.Random(f"{seed} {context} {number}")
        drawn = (source.randrange(vocab_size) for _ in range(MAX_DRAWS * context))
        ids = list(islice((token for token in drawn if WORD.fullmatch(tokenizer.decode([token]))), context))
        text = tokenizer.decode(ids)
        if len(ids) < context or tokenizer.encode(text, add_special_tokens=False) != ids:
            raise BenchError(
                "the model's tokenizer has no tokens of a word each, to make a server's prompt of"
            )
        return ids, text

    return draw

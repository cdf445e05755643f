"""Random prompts, the same for every engine. Each has a number, so that no engine can reuse the last one."""

import random
import re
from collections.abc import Callable
from itertools import islice

from kvant.errors import BenchError
from kvant.text.tokenizer import Tokenizer

MAX_DRAWS = 1000  # per requested token
WORD = re.compile(r" [A-Za-z]+")

Prompt = tuple[list[int], str | None]  # token ids, and for a server text that encodes to them
Prompts = Callable[[int, int], Prompt]  # makes a prompt from its length in tokens and its number


def random_prompts(seed: int, vocab_size: int) -> Prompts:
    def draw(context: int, number: int) -> Prompt:
        return random.Random(f"{seed} {context} {number}").choices(range(vocab_size), k=context), None

    return draw


def word_prompts(seed: int, tokenizer: Tokenizer, vocab_size: int) -> Prompts:
    """Return prompts of one-word tokens: a server encodes their text to the same tokens."""

    def draw(context: int, number: int) -> Prompt:
        source = random.Random(f"{seed} {context} {number}")
        drawn = (source.randrange(vocab_size) for _ in range(MAX_DRAWS * context))
        ids = list(islice((token for token in drawn if WORD.fullmatch(tokenizer.decode([token]))), context))
        text = tokenizer.decode(ids)
        if len(ids) < context or tokenizer.encode(text, add_special_tokens=False) != ids:
            raise BenchError(
                "the model's tokenizer has too few one-word tokens to make a prompt for a server"
            )
        return ids, text

    return draw

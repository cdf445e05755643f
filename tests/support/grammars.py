"""Answers of no model: tokens drawn among those that a grammar allows."""

import random
import re
from collections.abc import Sequence
from functools import cache

from kvant.text.grammar import Grammar
from kvant.text.tokenizer import Tokenizer


def allowed(mask: bytes) -> list[int]:
    return [token for token, may in enumerate(mask) if may]


def draw(
    grammar: Grammar, rng: random.Random, prefer: Sequence[int] = (), most: int = 2000
) -> list[int] | None:
    """The tokens of an answer without its end; None: it has not ended after so many.

    ``prefer``: taken every third time where they may come.
    """
    matcher = grammar.matcher()
    tokens: list[int] = []
    while len(tokens) < most:
        ids = allowed(matcher.mask())
        ends = [token for token in ids if token in grammar.eos_tokens]
        preferred = [token for token in ids if token in prefer and token not in ends]
        if ends and (len(ends) == len(ids) or rng.random() < 0.3):
            assert ends == sorted(grammar.eos_tokens)  # all of them, wherever one may come
            matcher.take(rng.choice(ends))
            return tokens
        some = (
            preferred if preferred and rng.random() < 0.3 else [token for token in ids if token not in ends]
        )
        token = rng.choice(some)
        matcher.take(token)
        tokens.append(token)
    return None


def closing(tokenizer: Tokenizer) -> list[int]:
    """Marks, and what ends a text, a list and an object: with these preferred any answer ends soon."""
    ends = [token for token, text in enumerate(tokenizer.token_bytes() or ()) if text in (b'"', b"]", b"}")]
    return [*tokenizer.mark_ids, *ends]


@cache
def _letters(tokenizer: Tokenizer) -> tuple[dict[bytes, int], dict[str, int]]:
    """The tokens of one byte, and the marks."""
    single = {token: place for place, token in enumerate(tokenizer.token_bytes() or ()) if len(token) == 1}
    names = tokenizer.convert_ids_to_tokens(tokenizer.mark_ids)
    return single, dict(zip(names, tokenizer.mark_ids, strict=True))


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text in tokens of one byte, and the marks in it."""
    single, marks = _letters(tokenizer)
    pieces = re.split(f"({'|'.join(map(re.escape, marks))})", text)
    found = [
        [marks[piece]] if piece in marks else [single[bytes([b])] for b in piece.encode()] for piece in pieces
    ]
    return [token for piece in found for token in piece]


def accepts(grammar: Grammar, tokens: Sequence[int]) -> bool:
    """Whether an answer of these tokens may end there."""
    matcher = grammar.matcher()
    for token in tokens:
        if not matcher.mask()[token]:
            return False
        matcher.take(token)
    return all(matcher.mask()[token] for token in grammar.eos_tokens)

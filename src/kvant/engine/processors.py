"""Changes of the logits before a token is picked: bias and penalties, with mlx-lm's values.

A penalty looks at the last ``context_size`` tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvant.engine.sampler import with_rows
from kvant.errors import ArgumentError
from kvant.text.grammar import Grammar

Change = Callable[[mx.array, mx.array], mx.array]  # tokens so far (T,), logits (B, vocab) -> logits
LogitsProcessor = Change | Grammar
Tokens = Sequence[int] | mx.array  # in an array they need not be known yet


@dataclass(frozen=True, slots=True)
class Bias:
    """Add a number to the logit of each token id given."""

    tokens: tuple[int, ...]
    values: tuple[float, ...]

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        return process_rows(logits, [tokens], [[self]])

    def entries(self, tokens: Tokens) -> tuple[Tokens, Sequence[float]]:
        """The token ids that are changed, and the number for each."""
        return self.tokens, self.values

    def check(self, vocab_size: int) -> None:
        """Refuse a token that the vocabulary does not have."""
        for token in self.tokens:
            if not -vocab_size <= token < vocab_size:  # MLX would write elsewhere
                raise ArgumentError("logit_bias", f"has token {token}; the model knows 0 to {vocab_size - 1}")

    @staticmethod
    def change(logits: mx.array, at: tuple[Any, mx.array], values: mx.array) -> mx.array:
        """The logits with the values added at the places of an index."""
        return logits.at[at].add(values)


@dataclass(frozen=True, slots=True)
class _Penalty:
    """A penalty on recent tokens; what it does is :meth:`change` of each kind. Those before ``first`` do not count."""

    penalty: float
    context_size: int
    first: int = 0

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        return process_rows(logits, [tokens], [[self]])

    def entries(self, tokens: Tokens) -> tuple[Tokens, float]:
        """The token ids that are changed, one that occurs twice twice, and the penalty for all."""
        return tokens[max(self.first, len(tokens) - self.context_size) :], self.penalty


class Repetition(_Penalty):
    """Divide a recent token's logit by the penalty; multiply a negative one (Keskar et al. 2019, arXiv:1909.05858)."""

    @staticmethod
    def change(logits: mx.array, at: tuple[Any, mx.array], penalty: float | mx.array) -> mx.array:
        chosen = logits[at]
        return _replaced(logits, at, mx.where(chosen < 0, chosen * penalty, chosen / penalty))


class Presence(_Penalty):
    """Subtract the penalty from a recent token's logit, once."""

    @staticmethod
    def change(logits: mx.array, at: tuple[Any, mx.array], penalty: float | mx.array) -> mx.array:
        return _replaced(logits, at, logits[at] - penalty)


class Frequency(_Penalty):
    """Subtract the penalty from a recent token's logit, once an occurrence."""

    @staticmethod
    def change(logits: mx.array, at: tuple[Any, mx.array], penalty: float | mx.array) -> mx.array:
        return logits.at[at].subtract(penalty)


def _replaced(logits: mx.array, at: tuple[Any, mx.array], values: mx.array) -> mx.array:
    """The logits with ``values`` at the places of an index; a place named twice has the same value twice."""
    changed = mx.array(logits)  # assignment rebinds the array object it is made to
    changed[at] = values
    return changed


OwnProcessor = Bias | Repetition | Presence | Frequency
KINDS: tuple[type[OwnProcessor], ...] = (Bias, Repetition, Presence, Frequency)  # in a request's order


def make_processors(
    logit_bias: Mapping[int, float] | None,
    repetition_penalty: float | None,
    repetition_context_size: int,
    presence_penalty: float | None,
    presence_context_size: int,
    frequency_penalty: float | None,
    frequency_context_size: int,
) -> list[LogitsProcessor]:
    """Those that change something, in the order in which they are applied; the values are checked already."""
    made: list[LogitsProcessor] = []
    if logit_bias:
        made.append(Bias(tuple(logit_bias), tuple(logit_bias.values())))
    if repetition_penalty and repetition_penalty != 1:
        made.append(Repetition(repetition_penalty, repetition_context_size))
    if presence_penalty:
        made.append(Presence(presence_penalty, presence_context_size))
    if frequency_penalty:
        made.append(Frequency(frequency_penalty, frequency_context_size))
    return made


def process_rows(logits: mx.array, tokens: Sequence[Tokens], processors: Sequence[Sequence[Change]]) -> mx.array:
    """Every row's own processors, in its own order: each row as its processors alone would change it.

    A kind of kvant's own changes all its rows at once. Others are called row by row.

    Args:
        logits: (B, vocab).
        tokens: of each row, all so far.
        processors: of each row.
    """
    left = [list(each) for each in processors]  # of each row, what is still to be applied
    while any(left):
        next_kinds = {type(each[0]) for each in left if each}
        kind = next((kind for kind in KINDS if kind in next_kinds), None)
        rows = [row for row, each in enumerate(left) if each and (kind is None or type(each[0]) is kind)]
        applied: dict[int, Any] = {row: left[row].pop(0) for row in rows}
        if kind is None:
            changed = [
                processor(as_ids(tokens[row]), logits[row : row + 1]).astype(logits.dtype)
                for row, processor in applied.items()
            ]
            logits = with_rows(logits, rows, mx.concatenate(changed))
        else:
            logits = _change_rows(kind, logits, {row: applied[row].entries(tokens[row]) for row in rows}, len(left))
    return logits


def as_ids(tokens: Tokens) -> mx.array:
    """Token ids in an array."""
    return tokens if isinstance(tokens, mx.array) else mx.array(list(tokens), mx.int32)


def _change_rows(
    kind: type[OwnProcessor], logits: mx.array, entries: Mapping[int, tuple[Any, Any]], num_rows: int
) -> mx.array:
    """What a kind of processor changes in some of so many rows: row -> (token ids, a number for each or for all)."""
    if num_rows == 1:
        places, value = entries[0]
        value = mx.array(value) if isinstance(value, tuple) else value
        return kind.change(logits, (slice(None), as_ids(places)), value) if len(places) else logits
    rows: list[int] = []
    places, values = list[int](), list[float]()
    for row, (own, value) in entries.items():
        rows += [row] * len(own)
        places += own
        values += value if isinstance(value, tuple) else [value] * len(own)
    if not rows:  # no token was seen yet
        return logits
    return kind.change(logits, (mx.array(rows), mx.array(places)), mx.array(values, logits.dtype))

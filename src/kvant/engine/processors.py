"""Changes of the logits before a token is picked: bias and penalties, with mlx-lm's values.

A penalty looks at the last ``context_size`` tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvant.text.grammar import Grammar

Change = Callable[[mx.array, mx.array], mx.array]  # tokens so far (T,), logits (B, vocab) -> logits
LogitsProcessor = Change | Grammar


@dataclass(frozen=True, slots=True)
class Bias:
    """Add a number to the logit of each token id given."""

    tokens: tuple[int, ...]
    values: tuple[float, ...]

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        return self.change(logits, (slice(None), mx.array(self.tokens)), mx.array(self.values))

    def entries(self, tokens: Sequence[int], vocab_size: int) -> tuple[Sequence[int], Sequence[float]]:
        """The token ids that are changed, and the number for each."""
        return self.tokens, self.values

    def check(self, vocab_size: int) -> None:
        """Raise a ValueError for a token that the vocabulary does not have."""
        for token in self.tokens:
            if not -vocab_size <= token < vocab_size:  # MLX would write elsewhere
                raise ValueError(f"logit_bias has token {token}; the model knows 0 to {vocab_size - 1}")

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
        return self.change(logits, (slice(None), tokens[self._start(tokens.size) :]), self.penalty)

    def entries(self, tokens: Sequence[int], vocab_size: int) -> tuple[Sequence[int], Sequence[float]]:
        """The token ids that are changed, one that occurs twice twice, and the penalty for each."""
        recent = tokens[self._start(len(tokens)) :]
        return recent, [self.penalty] * len(recent)

    def _start(self, length: int) -> int:
        """The place of the first of so many tokens that counts."""
        return max(self.first, length - self.context_size)

    @staticmethod
    def change(logits: mx.array, at: tuple[Any, mx.array], penalty: float | mx.array) -> mx.array:
        """The logits with the penalty at the places of an index."""
        raise NotImplementedError


class Repetition(_Penalty):
    """Divide a recent token's logit by the penalty; multiply a negative one (Keskar et al. 2019, arXiv:1909.05858)."""

    __slots__ = ()

    @staticmethod
    def change(logits: mx.array, at: tuple[Any, mx.array], penalty: float | mx.array) -> mx.array:
        chosen = logits[at]
        return _replaced(logits, at, mx.where(chosen < 0, chosen * penalty, chosen / penalty))


class Presence(_Penalty):
    """Subtract the penalty from a recent token's logit, once."""

    __slots__ = ()

    @staticmethod
    def change(logits: mx.array, at: tuple[Any, mx.array], penalty: float | mx.array) -> mx.array:
        return _replaced(logits, at, logits[at] - penalty)


class Frequency(_Penalty):
    """Subtract the penalty from a recent token's logit, once an occurrence."""

    __slots__ = ()

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


def process_rows(
    logits: mx.array, tokens: Sequence[Sequence[int] | mx.array], processors: Sequence[Sequence[Change]]
) -> mx.array:
    """Every row's own processors, in its own order: each row as its processors alone would change it.

    A kind of kvant's own changes all its rows at once. Others are called row by row.

    Args:
        logits: (B, vocab).
        tokens: of each row, all so far.
        processors: of each row.
    """
    if len(processors) == 1:  # its tokens may not be known yet
        own = tokens[0] if isinstance(tokens[0], mx.array) else mx.array(list(tokens[0]), mx.int32)
        for processor in processors[0]:
            logits = processor(own, logits).astype(logits.dtype)
        return logits
    left = [list(each) for each in processors]  # of each row, what is still to be applied
    while any(left):
        next_kinds = {type(each[0]) for each in left if each}
        kind = next((kind for kind in KINDS if kind in next_kinds), None)
        rows = [row for row, each in enumerate(left) if each and (kind is None or type(each[0]) is kind)]
        applied = {row: left[row].pop(0) for row in rows}
        if kind is None:
            changed = [logits[row : row + 1] for row in range(len(left))]
            for row, processor in applied.items():
                changed[row] = processor(mx.array(list(tokens[row]), mx.int32), changed[row]).astype(logits.dtype)
            logits = mx.concatenate(changed)
        else:
            logits = _change_rows(kind, logits, {row: (applied[row], tokens[row]) for row in rows})
    return logits


def _change_rows(kind: type[OwnProcessor], logits: mx.array, applied: Mapping[int, Any]) -> mx.array:
    """All rows that a kind of processor changes: row -> (processor, tokens)."""
    rows: list[int] = []
    places: list[int] = []
    values: list[float] = []
    for row, (processor, tokens) in applied.items():
        row_places, row_values = processor.entries(tokens, logits.shape[-1])
        rows += [row] * len(row_places)
        places += row_places
        values += row_values
    if not rows:  # no token was seen yet
        return logits
    return kind.change(logits, (mx.array(rows), mx.array(places)), mx.array(values, logits.dtype))

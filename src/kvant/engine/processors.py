"""Logits processors with mlx-lm's values: a bias, and penalties on recent tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from kvant.errors import ArgumentError
from kvant.text.grammar import Grammar

Change = Callable[[mx.array, mx.array], mx.array]  # tokens so far (T,), logits (B, vocab) -> logits
LogitsProcessor = Change | Grammar
CONTEXT_SIZE = 20  # mlx-lm's default
Tokens = Sequence[int] | mx.array  # an array need not be evaluated


@dataclass(frozen=True, slots=True)
class Bias:
    """Add a number to the logit of each of these token ids."""

    tokens: tuple[int, ...]
    values: tuple[float, ...]
    vocab_size: int | None = field(default=None, compare=False)  # None: check later

    def __post_init__(self) -> None:
        if self.vocab_size is not None:
            self.check(self.vocab_size)

    def __call__(self, tokens: Tokens, logits: mx.array) -> mx.array:
        return logits.at[:, mx.array(self.tokens)].add(mx.array(self.values))

    def check(self, vocab_size: int) -> None:
        """Raise an ArgumentError for a token that the vocabulary does not have."""
        for token in self.tokens:
            if not -vocab_size <= token < vocab_size:  # MLX would write elsewhere
                raise ArgumentError("logit_bias", f"has token {token}; the model knows 0 to {vocab_size - 1}")


@dataclass(frozen=True, slots=True)
class _Penalty:
    """A penalty on the last ``context_size`` tokens, excluding those before ``first``."""

    penalty: float
    context_size: int = CONTEXT_SIZE
    first: int = 0

    def __call__(self, tokens: Tokens, logits: mx.array) -> mx.array:
        recent = tokens[max(self.first, len(tokens) - self.context_size) :]
        return self.change(logits, as_ids(recent)) if len(recent) else logits

    def change(self, logits: mx.array, ids: mx.array) -> mx.array:
        """Return logits with those of recent tokens changed; repeated tokens are repeated in ``ids``."""
        raise NotImplementedError


class Repetition(_Penalty):
    """Divide a recent token's logit by the penalty, or multiply a negative one (CTRL, arXiv:1909.05858)."""

    def change(self, logits: mx.array, ids: mx.array) -> mx.array:
        chosen = logits[:, ids]
        return _replaced(logits, ids, mx.where(chosen < 0, chosen * self.penalty, chosen / self.penalty))


class Presence(_Penalty):
    """Subtract the penalty from a recent token's logit, once."""

    def change(self, logits: mx.array, ids: mx.array) -> mx.array:
        return _replaced(logits, ids, logits[:, ids] - self.penalty)


class Frequency(_Penalty):
    """Subtract the penalty from a recent token's logit for each occurrence."""

    def change(self, logits: mx.array, ids: mx.array) -> mx.array:
        return logits.at[:, ids].subtract(self.penalty)


def _replaced(logits: mx.array, ids: mx.array, values: mx.array) -> mx.array:
    """Return logits with ``values`` for these tokens; a repeated token has equal values."""
    changed = mx.array(logits)  # a copy, because assignment changes the array object
    changed[:, ids] = values
    return changed


def changing(bias: Bias, repetition: Repetition, *penalties: _Penalty) -> list[LogitsProcessor]:
    """Return those that have an effect."""
    active: list[LogitsProcessor] = [bias] if bias.tokens else []
    active += [repetition] if repetition.penalty != 1 else []
    return [*active, *(each for each in penalties if each.penalty)]


KINDS = (Bias, Repetition, Presence, Frequency)  # kvant's own, in a request's order


def as_ids(tokens: Tokens) -> mx.array:
    """Return token ids as an array."""
    return tokens if isinstance(tokens, mx.array) else mx.array(list(tokens), mx.int32)

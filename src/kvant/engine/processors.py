"""Changes of the logits before a token is picked: bias, and penalties on recent tokens, with mlx-lm's
values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from kvant.errors import ArgumentError
from kvant.text.grammar import Grammar

Change = Callable[[mx.array, mx.array], mx.array]  # tokens so far (T,), logits (B, vocab) -> logits
LogitsProcessor = Change | Grammar
CONTEXT_SIZE = 20  # mlx-lm's default
Tokens = Sequence[int] | mx.array  # in an array they need not be known yet


@dataclass(frozen=True, slots=True)
class Bias:
    """Add a number to the logit of each token id given."""

    tokens: tuple[int, ...]
    values: tuple[float, ...]
    vocab_size: int | None = field(default=None, compare=False)  # that it is for; None: any

    def __post_init__(self) -> None:
        if self.vocab_size is not None:
            self.check(self.vocab_size)

    def __call__(self, tokens: Tokens, logits: mx.array) -> mx.array:
        return logits.at[:, mx.array(self.tokens)].add(mx.array(self.values))

    def check(self, vocab_size: int) -> None:
        """Refuse a token that the vocabulary does not have."""
        for token in self.tokens:
            if not -vocab_size <= token < vocab_size:  # MLX would write elsewhere
                raise ArgumentError("logit_bias", f"has token {token}; the model knows 0 to {vocab_size - 1}")


@dataclass(frozen=True, slots=True)
class _Penalty:
    """A penalty on the last ``context_size`` tokens, but those before ``first``; :meth:`change` is each
    kind's own.
    """

    penalty: float
    context_size: int = CONTEXT_SIZE
    first: int = 0

    def __call__(self, tokens: Tokens, logits: mx.array) -> mx.array:
        recent = tokens[max(self.first, len(tokens) - self.context_size) :]
        return self.change(logits, as_ids(recent)) if len(recent) else logits

    def change(self, logits: mx.array, ids: mx.array) -> mx.array:
        """The logits with those of recent tokens changed; one that occurred twice is there twice."""
        raise NotImplementedError


class Repetition(_Penalty):
    """Divide a recent token's logit by the penalty; multiply a negative one (Keskar et al. 2019,
    arXiv:1909.05858).
    """

    def change(self, logits: mx.array, ids: mx.array) -> mx.array:
        chosen = logits[:, ids]
        return _replaced(logits, ids, mx.where(chosen < 0, chosen * self.penalty, chosen / self.penalty))


class Presence(_Penalty):
    """Subtract the penalty from a recent token's logit, once."""

    def change(self, logits: mx.array, ids: mx.array) -> mx.array:
        return _replaced(logits, ids, logits[:, ids] - self.penalty)


class Frequency(_Penalty):
    """Subtract the penalty from a recent token's logit, once an occurrence."""

    def change(self, logits: mx.array, ids: mx.array) -> mx.array:
        return logits.at[:, ids].subtract(self.penalty)


def _replaced(logits: mx.array, ids: mx.array, values: mx.array) -> mx.array:
    """The logits with ``values`` for these tokens; a token named twice has the same value twice."""
    changed = mx.array(logits)  # assignment rebinds the array object it is made to
    changed[:, ids] = values
    return changed


def changing(bias: Bias, repetition: Repetition, *penalties: _Penalty) -> list[LogitsProcessor]:
    """Return those that change a logit."""
    found: list[LogitsProcessor] = [bias] if bias.tokens else []
    found += [repetition] if repetition.penalty != 1 else []
    return [*found, *(each for each in penalties if each.penalty)]


KINDS = (Bias, Repetition, Presence, Frequency)  # kvant's own, in a request's order


def as_ids(tokens: Tokens) -> mx.array:
    """Token ids in an array."""
    return tokens if isinstance(tokens, mx.array) else mx.array(list(tokens), mx.int32)

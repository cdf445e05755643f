"""Filters: which tokens a sampler may draw.

A filter is a class here, with its options among :class:`FilterOptions` and its place in
:meth:`FilterOptions.filters`. The command and Python take an option from there; HTTP bodies declare theirs in
``server/body.py``. The tokens left are those mlx-lm leaves, at ties too. What is left of a row depends on
that row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from kvant.engine.option_ranges import COUNT, FRACTION, HALF, NUMBER, SHARE, TEMP, option_field
from kvant.errors import ArgumentError

XTC_THRESHOLD = 0.1  # mlx-lm's default


class Filter:
    """Leaves some tokens out. Filters with equal fields are equal."""

    has_coin: ClassVar[bool] = False  # whether it uses a random number of its own

    def __call__(self, logprobs: mx.array, coins: mx.array) -> mx.array:
        """Return log-probabilities (B, vocab) with -inf for the tokens that are left out.

        ``coins``: random numbers from 0 to 1, (B, 1), or one for all rows.
        """
        raise NotImplementedError

    def check(self, vocab_size: int) -> None:
        """Refuse a value that the vocabulary is too small for."""


@dataclass(frozen=True, slots=True)
class TopP(Filter):
    """Keep the likeliest tokens that together have a probability."""

    top_p: float

    def __call__(self, logprobs: mx.array, coins: mx.array) -> mx.array:
        return keep_top_p(logprobs, self.top_p)


@dataclass(frozen=True, slots=True)
class MinP(Filter):
    """Keep the tokens with at least a share of the likeliest one's probability."""

    min_p: float
    min_tokens_to_keep: int

    def __call__(self, logprobs: mx.array, coins: mx.array) -> mx.array:
        return keep_min_p(logprobs, self.min_p, self.min_tokens_to_keep)

    def check(self, vocab_size: int) -> None:
        check_at_most("min_tokens_to_keep", self.min_tokens_to_keep, vocab_size)


@dataclass(frozen=True, slots=True)
class XTC(Filter):
    """With a probability, leave out every likely token but the least likely of them."""

    has_coin: ClassVar[bool] = True

    probability: float
    threshold: float
    special_tokens: tuple[int, ...]  # are never left out

    def __call__(self, logprobs: mx.array, coins: mx.array) -> mx.array:
        return leave_out_top_choices(logprobs, self.probability, self.threshold, self.special_tokens, coins)

    def check(self, vocab_size: int) -> None:
        check_special(self.special_tokens, vocab_size)


@dataclass(frozen=True, slots=True)
class TopK(Filter):
    """Keep a number of the likeliest tokens."""

    top_k: int

    def __call__(self, logprobs: mx.array, coins: mx.array) -> mx.array:
        return keep_top_k(logprobs, self.top_k)

    def check(self, vocab_size: int) -> None:
        check_at_most("top_k", self.top_k, vocab_size - 1)


@dataclass(frozen=True, slots=True)
class FilterOptions:
    """The temperature and the options of filters; None: not given."""

    temp: float | None = option_field(
        TEMP, "How random the answer is; 0 always takes the likeliest token; default: the model's, else 0."
    )
    top_p: float | None = option_field(
        SHARE,
        "Sample from the likeliest tokens that together have this probability; default: the model's, else 1.",
        "temp",
    )
    min_p: float | None = option_field(
        FRACTION,
        "Drop tokens less likely than this share of the likeliest one; default: the model's, else 0.",
        "temp",
    )
    min_tokens_to_keep: int = option_field(
        COUNT, "Keep at least this many of the likeliest tokens, despite --min-p.", "min_p", default=1
    )
    top_k: int | None = option_field(
        NUMBER,
        "Sample from this many of the likeliest tokens; 0 or -1: all; default: the model's, else 0.",
        "temp",
    )
    xtc_probability: float = option_field(
        FRACTION,
        "How often to drop all likely tokens except the least likely of them; 0: never.",
        "temp",
        default=0.0,
    )
    xtc_threshold: float | None = option_field(
        HALF,
        f"For --xtc-probability, count a token as likely from this on; default: {XTC_THRESHOLD}.",
        "xtc_probability",
    )

    def filters(self, special_tokens: Sequence[int] = ()) -> tuple[Filter, ...]:
        """Return the filters that leave something out, in mlx-lm's order; XTC spares the special tokens."""
        found: list[Filter] = []
        if self.top_p is not None and self.top_p < 1:
            found.append(TopP(self.top_p))
        if self.min_p:
            found.append(MinP(self.min_p, self.min_tokens_to_keep))
        if self.xtc_probability:
            threshold = XTC_THRESHOLD if self.xtc_threshold is None else self.xtc_threshold
            found.append(XTC(self.xtc_probability, threshold, tuple(special_tokens)))
        if self.top_k:
            found.append(TopK(self.top_k))
        return tuple(found)


def keep_top_p(logprobs: mx.array, top_p: float) -> mx.array:
    """The likeliest tokens that together have the probability ``top_p`` (Holtzman et al. 2019,
    arXiv:1904.09751).

    A token that is as likely as the last one kept is kept too.
    """
    able = logprobs
    if mx.default_device().type != mx.gpu:
        # Tokens whose probability is lost when it is added to the likeliest one's change no sum: none is
        # kept, and a CPU sorts many equal numbers fast. Of 151,936 logits most are such. A GPU adds parts
        # that are summed before.
        likeliest = logprobs.max(axis=-1, keepdims=True).astype(mx.float32)
        # less than half of float32's last place, with a margin for rounding
        lost = likeliest + math.log(2**-25) - 0.1
        able = mx.where(logprobs < lost, -math.inf, logprobs)
    descending = mx.sort(able, axis=-1)[..., ::-1]
    probs = mx.exp(descending.astype(mx.float32))
    likelier = mx.cumsum(probs, axis=-1, inclusive=False)  # probability of all tokens before each one
    total = likelier[..., -1:] + probs[..., -1:]
    kept = (likelier < top_p * total).sum(axis=-1, keepdims=True)
    # None is kept where top_p is too small for float32: the likeliest one is kept then.
    least = mx.take_along_axis(descending, mx.maximum(kept, 1) - 1, axis=-1)
    return mx.where(logprobs < least, -math.inf, logprobs)


def keep_min_p(logprobs: mx.array, min_p: float, min_tokens_to_keep: int) -> mx.array:
    """Tokens with at least ``min_p`` times the likeliest one's probability (Nguyen et al. 2024,
    arXiv:2407.01082).
    """
    unlikely = logprobs < logprobs.max(axis=-1, keepdims=True) + math.log(min_p)
    if min_tokens_to_keep > 1:
        order = mx.argpartition(logprobs, kth=-min_tokens_to_keep, axis=-1)
        unlikely = mx.put_along_axis(unlikely, order[..., -min_tokens_to_keep:], mx.array(False), axis=-1)
    return mx.where(unlikely, -math.inf, logprobs)


def leave_out_top_choices(
    logprobs: mx.array, probability: float, threshold: float, special_tokens: Sequence[int], coin: mx.array
) -> mx.array:
    """XTC: with a probability, every token above the threshold but the least likely of them is left out.

    By p-e-w, https://github.com/oobabooga/text-generation-webui/pull/6335. Special tokens are never left out.
    XTC applies where the coin, from 0 to 1, one for all rows or (B, 1), is at most the probability.
    """
    probs = mx.softmax(logprobs, axis=-1)
    least = mx.where(probs > threshold, probs, math.inf).min(axis=-1, keepdims=True)
    left_out = probs > least
    if special_tokens:
        left_out[..., mx.array(list(special_tokens))] = False
    return mx.where((coin <= probability) & left_out, -math.inf, logprobs)


def keep_top_k(logprobs: mx.array, top_k: int) -> mx.array:
    """The ``top_k`` likeliest tokens, of equally likely ones any (Fan et al. 2018, arXiv:1805.04833)."""
    order = mx.argpartition(-logprobs, kth=top_k - 1, axis=-1)
    return mx.put_along_axis(logprobs, order[..., top_k:], mx.array(-math.inf, logprobs.dtype), axis=-1)


def check_special(special_tokens: Sequence[int], vocab_size: int) -> None:
    """Refuse a token that the vocabulary does not have."""
    for token in special_tokens:
        if not 0 <= token < vocab_size:
            raise ArgumentError(
                "xtc_special_tokens", f"has token {token}; the model knows 0 to {vocab_size - 1}"
            )


def check_at_most(name: str, count: int, most: int) -> None:
    """Refuse a count that the vocabulary is too small for."""
    if count > most:
        raise ArgumentError(name, f"is {count}; expected at most {most} with this vocabulary")

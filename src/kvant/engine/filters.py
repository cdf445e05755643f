"""Filters restrict the tokens that a sampler may draw.

To add a filter, write a class here, its options in :class:`FilterOptions`, and its place in
:meth:`FilterOptions.filters`. The command and Python read options from there; HTTP bodies declare theirs in
``server/body.py``. The remaining tokens are mlx-lm's, at ties too, and depend only on their own row.
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
    """Excludes some tokens. Filters with equal fields are equal."""

    has_coin: ClassVar[bool] = False  # whether it uses a random number of its own

    def __call__(self, logprobs: mx.array, coins: mx.array) -> mx.array:
        """Return log-probabilities (B, vocab) with -inf for excluded tokens.

        ``coins``: random numbers from 0 to 1, (B, 1) or one for all rows.
        """
        raise NotImplementedError

    def check(self, vocab_size: int) -> None:
        """Raise an ArgumentError for a value that the vocabulary is too small for."""


@dataclass(frozen=True, slots=True)
class TopP(Filter):
    """Keep the likeliest tokens that together reach a probability."""

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
    """With a probability, exclude every likely token except the least likely of them."""

    has_coin: ClassVar[bool] = True

    probability: float
    threshold: float
    special_tokens: tuple[int, ...]  # never excluded

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
        f"For --xtc-probability, count a token as likely from this probability on; default: {XTC_THRESHOLD}.",
        "xtc_probability",
    )

    def filters(self, special_tokens: Sequence[int] = ()) -> tuple[Filter, ...]:
        """Return the filters that have an effect, in mlx-lm's order; XTC spares the special tokens."""
        chosen: list[Filter] = []
        if self.top_p is not None and self.top_p < 1:
            chosen.append(TopP(self.top_p))
        if self.min_p:
            chosen.append(MinP(self.min_p, self.min_tokens_to_keep))
        if self.xtc_probability:
            threshold = XTC_THRESHOLD if self.xtc_threshold is None else self.xtc_threshold
            chosen.append(XTC(self.xtc_probability, threshold, tuple(special_tokens)))
        if self.top_k:
            chosen.append(TopK(self.top_k))
        return tuple(chosen)


def keep_top_p(logprobs: mx.array, top_p: float) -> mx.array:
    """Keep the likeliest tokens that together reach ``top_p``, and ties with the last of them.

    Source: Holtzman et al. 2019, arXiv:1904.09751.
    """
    able = logprobs
    if mx.default_device().type != mx.gpu:
        # Tokens too unlikely to change a float32 sum are never kept. Most of 151,936 tokens are, and a CPU
        # sorts many equal numbers fast. A GPU sums in another order, where they may count.
        likeliest = logprobs.max(axis=-1, keepdims=True).astype(mx.float32)
        # below half of float32's last place, with a margin for rounding
        lost = likeliest + math.log(2**-25) - 0.1
        able = mx.where(logprobs < lost, -math.inf, logprobs)
    descending = mx.sort(able, axis=-1)[..., ::-1]
    probs = mx.exp(descending.astype(mx.float32))
    likelier = mx.cumsum(probs, axis=-1, inclusive=False)  # probability of all tokens before each one
    total = likelier[..., -1:] + probs[..., -1:]
    count = (likelier < top_p * total).sum(axis=-1, keepdims=True)
    # If top_p is too small for float32, keep the likeliest token.
    least = mx.take_along_axis(descending, mx.maximum(count, 1) - 1, axis=-1)
    return mx.where(logprobs < least, -math.inf, logprobs)


def keep_min_p(logprobs: mx.array, min_p: float, min_tokens_to_keep: int) -> mx.array:
    """Keep tokens with at least ``min_p`` times the top probability (Nguyen et al., arXiv:2407.01082)."""
    unlikely = logprobs < logprobs.max(axis=-1, keepdims=True) + math.log(min_p)
    if min_tokens_to_keep > 1:
        order = mx.argpartition(logprobs, kth=-min_tokens_to_keep, axis=-1)
        unlikely = mx.put_along_axis(unlikely, order[..., -min_tokens_to_keep:], mx.array(False), axis=-1)
    return mx.where(unlikely, -math.inf, logprobs)


def leave_out_top_choices(
    logprobs: mx.array, probability: float, threshold: float, special_tokens: Sequence[int], coin: mx.array
) -> mx.array:
    """Apply XTC: with a probability, exclude all tokens above the threshold except the least likely one.

    By p-e-w, https://github.com/oobabooga/text-generation-webui/pull/6335. Special tokens are never excluded.
    XTC applies if the coin, from 0 to 1, (B, 1) or one for all rows, is at most the probability.
    """
    probs = mx.softmax(logprobs, axis=-1)
    least = mx.where(probs > threshold, probs, math.inf).min(axis=-1, keepdims=True)
    left_out = probs > least
    if special_tokens:
        left_out[..., mx.array(list(special_tokens))] = False
    return mx.where((coin <= probability) & left_out, -math.inf, logprobs)


def keep_top_k(logprobs: mx.array, top_k: int) -> mx.array:
    """Keep the ``top_k`` likeliest tokens, breaking ties arbitrarily (Fan et al. 2018, arXiv:1805.04833)."""
    order = mx.argpartition(-logprobs, kth=top_k - 1, axis=-1)
    return mx.put_along_axis(logprobs, order[..., top_k:], mx.array(-math.inf, logprobs.dtype), axis=-1)


def check_special(special_tokens: Sequence[int], vocab_size: int) -> None:
    """Raise an ArgumentError for a token that the vocabulary does not have."""
    for token in special_tokens:
        if not 0 <= token < vocab_size:
            raise ArgumentError(
                "xtc_special_tokens", f"has token {token}; the model knows 0 to {vocab_size - 1}"
            )


def check_at_most(name: str, count: int, most: int) -> None:
    """Raise an ArgumentError for a count that the vocabulary is too small for."""
    if count > most:
        raise ArgumentError(name, f"is {count}; expected at most {most} with this vocabulary")

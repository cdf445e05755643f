"""Samplers: what is left of the probabilities, and the token that the key of a request and a position draws.

The tokens left are those mlx-lm leaves, at ties too. Nothing is compiled: on a CPU that would start a C++
compiler. What is left of a row depends on it alone.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import mlx.core as mx

from kvant.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class SeededSampler:
    """Draws tokens from filtered probabilities. The draw at a position depends on (seed, position) alone.

    MLX's random state is neither read nor changed, unless ``follows_mlx`` and there is no seed. The other
    fields are those of :class:`kvant.engine.sampling.SamplingOptions`.
    """

    temp: float
    top_p: float
    min_p: float
    min_tokens_to_keep: int
    top_k: int
    xtc_probability: float
    xtc_threshold: float
    xtc_special_tokens: tuple[int, ...]
    seed: int | None  # None: every run draws one
    # where a run without a seed takes one: MLX's random state, or the operating system
    follows_mlx: bool = False
    vocab_size: int | None = field(default=None, kw_only=True, compare=False)  # that it is for; None: any
    # rows of calls
    _draws: Iterator[int] = field(default_factory=count, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.vocab_size is not None:
            self.check(self.vocab_size)

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Log-probabilities (B, vocab) -> tokens (B,), in loops that tell no position, such as mlx-lm's.

        The n-th row of such calls is drawn as at position n; without a seed, as :func:`for_a_run` says.
        """
        self.check(logprobs.shape[-1])
        samplers = [self] * logprobs.shape[0]
        if self.seed is None and self.follows_mlx:
            coin = mx.random.uniform() if self.xtc_probability else mx.array(0.0)
            return mx.random.categorical(filtered(logprobs, samplers, coin))
        keys = draw_keys([for_a_run(self)] * len(samplers), [next(self._draws) for _ in samplers])
        return draw_seeded(logprobs, samplers, keys)

    @property
    def filters(self) -> tuple[Any, ...]:
        """The options that say which tokens are left."""
        xtc = self.xtc_probability, self.xtc_threshold, self.xtc_special_tokens
        return self.top_p, self.min_p, self.min_tokens_to_keep, self.top_k, xtc

    def left(self, logprobs: mx.array, coins: mx.array) -> mx.array:
        """The log-probabilities (B, vocab), with -inf for tokens that are left out."""
        if 0 < self.top_p < 1:
            logprobs = keep_top_p(logprobs, self.top_p)
        if self.min_p:
            logprobs = keep_min_p(logprobs, self.min_p, self.min_tokens_to_keep)
        if self.xtc_probability:
            probability, threshold, special = (
                self.xtc_probability,
                self.xtc_threshold,
                self.xtc_special_tokens,
            )
            logprobs = leave_out_top_choices(logprobs, probability, threshold, special, coins)
        return keep_top_k(logprobs, self.top_k) if self.top_k else logprobs

    def check(self, vocab_size: int) -> None:
        """Refuse an option that a vocabulary is too small for."""
        check_at_most("top_k", self.top_k, vocab_size - 1)
        check_at_most("min_tokens_to_keep", self.min_tokens_to_keep if self.min_p else 0, vocab_size)
        check_special(self.xtc_special_tokens if self.xtc_probability else (), vocab_size)


# Log-probabilities (B, vocab) -> tokens (B,).
Sampler = SeededSampler | Callable[[mx.array], mx.array]


def greedy(logprobs: mx.array) -> mx.array:
    """The most probable token: (B, vocab) -> (B,)."""
    return mx.argmax(logprobs, axis=-1)


def is_ours(sampler: Sampler) -> bool:
    """Whether it is kvant's own, and no function of the caller's."""
    return isinstance(sampler, SeededSampler) or sampler is greedy


def for_a_run(sampler: Sampler) -> Sampler:
    """The sampler of one run: without a seed it takes one now, of MLX's random state or of the operating
    system.
    """
    if not isinstance(sampler, SeededSampler) or sampler.seed is not None:
        return sampler
    if sampler.follows_mlx:
        high, low = mx.random.randint(0, 2**32, (2,), mx.int64).tolist()  # type: ignore[misc]
        return replace(sampler, seed=high << 32 | low)  # type: ignore[operator]
    return replace(sampler, seed=int.from_bytes(os.urandom(8)))


def for_answer(sampler: Sampler, number: int) -> Sampler:
    """The sampler of answer ``number``: the seed that many further, so that no two share their draws."""
    if isinstance(sampler, SeededSampler) and sampler.seed is not None:
        return replace(sampler, seed=(sampler.seed + number) % 2**64)
    return sampler


def draw_keys(samplers: Sequence[Sampler], positions: Sequence[int]) -> mx.array:
    """The keys (B, 2), uint32, of a draw of each sampler after so many tokens."""
    words = []
    for sampler, position in zip(samplers, positions, strict=True):
        assert isinstance(sampler, SeededSampler) and sampler.seed is not None  # noqa: PT018
        words.append(splitmix64(splitmix64(sampler.seed) + position))
    return mx.array([[word >> 32, word & 0xFFFFFFFF] for word in words], mx.uint32)


def splitmix64(state: int) -> int:
    """A step of SplitMix64 from ``state``, a bijection of 64-bit words (Steele, Lea, Flood 2014; Vigna's
    constants).
    """
    mask = 2**64 - 1
    word = (state + 0x9E3779B97F4A7C15) & mask
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & mask
    word = (word ^ word >> 27) * 0x94D049BB133111EB & mask
    return word ^ word >> 31


def draw_seeded(logprobs: mx.array, samplers: Sequence[SeededSampler], keys: mx.array) -> mx.array:
    """Log-probabilities (B, vocab), a sampler for each row and keys (B, 2) -> tokens (B,)."""
    # 24 bits of each word, as many as every float32 below 1 has: the first number picks, the second is XTC's
    # coin
    numbers = (keys >> 8).astype(mx.float32) * 2**-24
    return pick(filtered(logprobs, samplers, numbers[:, 1:]), numbers[:, :1])


def filtered(logprobs: mx.array, samplers: Sequence[SeededSampler], coins: mx.array) -> mx.array:
    """The logits (B, vocab) after each row's filters and temperature, of log-probabilities (B, vocab).

    Samplers with the same filters take their rows at once. XTC's coins, from 0 to 1, are (B, 1), or one for
    all.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    for row, sampler in enumerate(samplers):
        alike.setdefault(sampler.filters, []).append(row)
    parts = [
        samplers[rows[0]].left(rows_of(logprobs, rows), rows_of(coins, rows) if coins.ndim else coins)
        for rows in alike.values()
    ]
    logprobs = in_order([*alike.values()], parts)
    temps = {sampler.temp for sampler in samplers}
    if len(temps) == 1:
        return logprobs * (1 / temps.pop())
    return logprobs * mx.array([1 / sampler.temp for sampler in samplers], logprobs.dtype)[:, None]


def pick(logits: mx.array, numbers: mx.array) -> mx.array:
    """The tokens (B,) that numbers (B, 1) from 0 on, below 1, pick by the probabilities of logits (B, vocab).

    It is the first token up to which probabilities sum to more than the number; never one of probability 0.
    MLX's ``categorical`` does so for one row alone: of several it adds a Gumbel variable to every logit.
    """
    probs = mx.softmax(logits.astype(mx.float32), axis=-1)
    reached = mx.where(probs > 0, mx.cumsum(probs, axis=-1), 0)
    return mx.argmax(reached > numbers * reached.max(axis=-1, keepdims=True), axis=-1)


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


def rows_of(array: mx.array, rows: Sequence[int]) -> mx.array:
    """Some rows of an array (B, ...), in ascending order."""
    if len(rows) == rows[-1] - rows[0] + 1:
        return array if len(rows) == len(array) else array[rows[0] : rows[-1] + 1]
    return array[mx.array(list(rows))]


def in_order(rows: Sequence[Sequence[int]], parts: Sequence[mx.array]) -> mx.array:
    """The array whose rows are those of the parts, of which each has some."""
    if len(parts) == 1:
        return parts[0]
    places = [row for some in rows for row in some]
    return mx.concatenate(list(parts))[mx.array(sorted(range(len(places)), key=places.__getitem__))]

"""Samplers: filters, a temperature, and the token that the key of a request and a position draws.

Nothing is compiled: on a CPU that would start a C++ compiler.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import mlx.core as mx

from kvant.engine.filters import Filter


@dataclass(frozen=True, slots=True)
class SeededSampler:
    """Draws tokens from filtered probabilities. The draw at a position depends on (seed, position) alone.

    MLX's random state is neither read nor changed, unless ``follows_mlx`` and there is no seed.
    """

    temp: float
    filters: tuple[Filter, ...]  # applied in this order
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
            has_coin = any(each.has_coin for each in self.filters)
            coin = mx.random.uniform() if has_coin else mx.array(0.0)
            return mx.random.categorical(filtered(logprobs, samplers, coin))
        keys = draw_keys([for_a_run(self)] * len(samplers), [next(self._draws) for _ in samplers])
        return draw_seeded(logprobs, samplers, keys)

    def left(self, logprobs: mx.array, coins: mx.array) -> mx.array:
        """Return the log-probabilities (B, vocab), with -inf for tokens that are left out."""
        for each in self.filters:
            logprobs = each(logprobs, coins)
        return logprobs

    def check(self, vocab_size: int) -> None:
        """Refuse an option that a vocabulary is too small for."""
        for each in self.filters:
            each.check(vocab_size)


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

"""Samplers: filters, a temperature, and a draw keyed by seed and position.

Nothing uses ``mx.compile``, which would start a C++ compiler on a CPU.
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
    """Draws tokens from filtered probabilities. The draw at a position depends only on (seed, position).

    MLX's random state is neither read nor changed, unless ``follows_mlx`` is set without a seed.
    """

    temp: float
    filters: tuple[Filter, ...]  # applied in this order
    seed: int | None  # None: every run draws one
    # take a missing seed from MLX's random state instead of the operating system
    follows_mlx: bool = False
    vocab_size: int | None = field(default=None, kw_only=True, compare=False)  # None: check later
    # numbers the rows of calls
    _draws: Iterator[int] = field(default_factory=count, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.vocab_size is not None:
            self.check(self.vocab_size)

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Draw tokens (B,) from log-probabilities (B, vocab), for loops without positions such as mlx-lm's.

        The n-th row of such calls is drawn as at position n; without a seed, see :func:`for_a_run`.
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
        """Return log-probabilities (B, vocab) with -inf for excluded tokens."""
        for each in self.filters:
            logprobs = each(logprobs, coins)
        return logprobs

    def check(self, vocab_size: int) -> None:
        """Raise an ArgumentError for an option that the vocabulary is too small for."""
        for each in self.filters:
            each.check(vocab_size)


# Log-probabilities (B, vocab) -> tokens (B,).
Sampler = SeededSampler | Callable[[mx.array], mx.array]


def greedy(logprobs: mx.array) -> mx.array:
    """Return the most probable tokens: (B, vocab) -> (B,)."""
    return mx.argmax(logprobs, axis=-1)


def is_ours(sampler: Sampler) -> bool:
    """Return whether it is kvant's own, not a caller's function."""
    return isinstance(sampler, SeededSampler) or sampler is greedy


def for_a_run(sampler: Sampler) -> Sampler:
    """Return the sampler for one run, with a seed from MLX's random state or the system if it has none."""
    if not isinstance(sampler, SeededSampler) or sampler.seed is not None:
        return sampler
    if sampler.follows_mlx:
        high, low = mx.random.randint(0, 2**32, (2,), mx.int64).tolist()  # type: ignore[misc]
        return replace(sampler, seed=high << 32 | low)  # type: ignore[operator]
    return replace(sampler, seed=int.from_bytes(os.urandom(8)))


def for_answer(sampler: Sampler, number: int) -> Sampler:
    """Return the sampler for answer ``number``, with a seed increased by it so that answers differ."""
    if isinstance(sampler, SeededSampler) and sampler.seed is not None:
        return replace(sampler, seed=(sampler.seed + number) % 2**64)
    return sampler


def draw_keys(samplers: Sequence[Sampler], positions: Sequence[int]) -> mx.array:
    """Return keys (B, 2) uint32 for a draw of each sampler at its position."""
    words = []
    for sampler, position in zip(samplers, positions, strict=True):
        assert isinstance(sampler, SeededSampler) and sampler.seed is not None  # noqa: PT018
        words.append(splitmix64(splitmix64(sampler.seed) + position))
    return mx.array([[word >> 32, word & 0xFFFFFFFF] for word in words], mx.uint32)


def splitmix64(state: int) -> int:
    """Step SplitMix64, a bijection of 64-bit words (Steele, Lea, Flood 2014; Vigna's constants)."""
    mask = 2**64 - 1
    word = (state + 0x9E3779B97F4A7C15) & mask
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & mask
    word = (word ^ word >> 27) * 0x94D049BB133111EB & mask
    return word ^ word >> 31


def draw_seeded(logprobs: mx.array, samplers: Sequence[SeededSampler], keys: mx.array) -> mx.array:
    """Draw tokens (B,) from log-probabilities (B, vocab), with a sampler per row and keys (B, 2)."""
    # Use 24 bits of each word, which float32 represents exactly: the first number draws, the second is XTC's
    # coin.
    numbers = (keys >> 8).astype(mx.float32) * 2**-24
    return pick(filtered(logprobs, samplers, numbers[:, 1:]), numbers[:, :1])


def filtered(logprobs: mx.array, samplers: Sequence[SeededSampler], coins: mx.array) -> mx.array:
    """Apply each row's filters and temperature to log-probabilities (B, vocab); return logits (B, vocab).

    Rows with the same filters are filtered together. ``coins``, from 0 to 1, are (B, 1), or one for all.
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
    """Return the tokens (B,) that numbers (B, 1) in [0, 1) select by the probabilities of logits (B, vocab).

    It is the first token up to which probabilities sum to more than the number, never one of probability 0.
    MLX's ``categorical`` does so only for a single row; for several it adds Gumbel noise to every logit.
    """
    probs = mx.softmax(logits.astype(mx.float32), axis=-1)
    reached = mx.where(probs > 0, mx.cumsum(probs, axis=-1), 0)
    return mx.argmax(reached > numbers * reached.max(axis=-1, keepdims=True), axis=-1)


def rows_of(array: mx.array, rows: Sequence[int]) -> mx.array:
    """Return some rows of an array (B, ...), in ascending order."""
    if len(rows) == rows[-1] - rows[0] + 1:
        return array if len(rows) == len(array) else array[rows[0] : rows[-1] + 1]
    return array[mx.array(list(rows))]


def in_order(rows: Sequence[Sequence[int]], parts: Sequence[mx.array]) -> mx.array:
    """Return the array whose rows the parts have, by the row numbers of each part."""
    if len(parts) == 1:
        return parts[0]
    places = [row for some in rows for row in some]
    return mx.concatenate(list(parts))[mx.array(sorted(range(len(places)), key=places.__getitem__))]

"""A step of sampling: logits to the next token, by the key of its request and position."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import mlx.core as mx

from kvant.engine.filters import keep_min_p, keep_top_k, keep_top_p, leave_out_top_choices
from kvant.engine.processors import LogitsProcessor


@dataclass(frozen=True, slots=True)
class SeededSampler:
    """Draws tokens from filtered probabilities. The draw at a position depends on (seed, position) alone.

    MLX's random state is neither read nor changed, unless ``follows_mlx`` and there is no seed.
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
    follows_mlx: bool = False  # where a run without a seed takes one: MLX's random state, or the operating system
    _draws: Iterator[int] = field(default_factory=count, init=False, repr=False, compare=False)  # calls without a key

    def __call__(self, logprobs: mx.array, key: mx.array | None = None) -> mx.array:
        """Log-probabilities (B, vocab) and a key (2,) of :func:`draw_key` -> tokens (B,).

        mlx-lm's loops give no key. The n-th such call then draws as at position n; without a seed, as :func:`for_a_run`
        says, from MLX's random state itself or with a new seed.
        """
        if key is None and (self.seed is not None or not self.follows_mlx):
            key = draw_key(for_a_run(self), next(self._draws))
        if 0 < self.top_p < 1:
            logprobs = keep_top_p(logprobs, self.top_p)
        if self.min_p:
            logprobs = keep_min_p(logprobs, self.min_p, self.min_tokens_to_keep)
        if self.xtc_probability:
            coin, key = (None, None) if key is None else mx.random.split(key)
            logprobs = leave_out_top_choices(
                logprobs, self.xtc_probability, self.xtc_threshold, self.xtc_special_tokens, coin
            )
        if self.top_k:
            logprobs = keep_top_k(logprobs, self.top_k)
        return mx.random.categorical(logprobs * (1 / self.temp), key=key)


# Log-probabilities (B, vocab) -> tokens (B,); kvant's own takes a key too.
Sampler = SeededSampler | Callable[[mx.array], mx.array]


def greedy(logprobs: mx.array) -> mx.array:
    """The most probable token: (B, vocab) -> (B,)."""
    return mx.argmax(logprobs, axis=-1)


def for_a_run(sampler: Sampler) -> Sampler:
    """The sampler of one run: without a seed it takes one now, of MLX's random state or of the operating system."""
    if not isinstance(sampler, SeededSampler) or sampler.seed is not None:
        return sampler
    if sampler.follows_mlx:
        high, low = mx.random.randint(0, 2**32, (2,), mx.int64).tolist()  # type: ignore[misc]
        return replace(sampler, seed=high << 32 | low)  # type: ignore[operator]
    return replace(sampler, seed=int.from_bytes(os.urandom(8)))


def for_answer(sampler: Sampler, number: int) -> Sampler:
    """The sampler of a conversation's answer: the seed that many further, so that no two answers share their draws.

    Answer 0 draws what a single run with the seed draws.
    """
    if isinstance(sampler, SeededSampler) and sampler.seed is not None:
        return replace(sampler, seed=(sampler.seed + number) % 2**64)
    return sampler


def draw_key(sampler: Sampler, position: int) -> mx.array | None:
    """The key (2,) of the draw after ``position`` tokens, for :func:`sample`; None: the sampler takes none.

    The sampler is one of :func:`for_a_run`.
    """
    if not isinstance(sampler, SeededSampler):
        return None
    if sampler.seed is None:
        raise AssertionError("a sampler without a seed belongs to no run yet")
    word = splitmix64(splitmix64(sampler.seed) + position)
    return mx.array([word >> 32, word & 0xFFFFFFFF], mx.uint32)


def splitmix64(state: int) -> int:
    """A step of SplitMix64 from ``state``, a bijection of 64-bit words (Steele, Lea, Flood 2014; Vigna's constants)."""
    mask = 2**64 - 1
    word = (state + 0x9E3779B97F4A7C15) & mask
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & mask
    word = (word ^ word >> 27) * 0x94D049BB133111EB & mask
    return word ^ word >> 31


def sample(
    logits: mx.array,
    tokens: mx.array | None,
    sampler: Sampler,
    processors: Sequence[LogitsProcessor],
    key: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """One step of sampling.

    Args:
        logits: (1, vocab), of the last position.
        tokens: (T,) the prompt and everything generated, where there are processors.
        sampler: picks from log-probabilities.
        processors: applied to the logits in order.
        key: (2,) of :func:`draw_key`.

    Returns:
        The token (1,) and its log-probabilities (vocab,).
    """
    logits = logits.astype(mx.float32)
    for processor in processors:
        logits = processor(tokens if tokens is not None else mx.array([], mx.int32), logits)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    if isinstance(sampler, SeededSampler):
        if key is None:
            raise AssertionError("a seeded sampler needs a key")
        return sampler(logprobs, key), logprobs.squeeze(0)
    return sampler(logprobs), logprobs.squeeze(0)

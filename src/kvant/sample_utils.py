"""mlx-lm's ``sample_utils``: the same names, arguments and distributions, without compiling C++.

Samplers of :func:`make_sampler` work in kvant's loops and in mlx-lm's.
"""

from collections.abc import Sequence

import mlx.core as mx

from kvant.engine import filters, processors
from kvant.engine.filters import XTC_THRESHOLD, FilterOptions
from kvant.engine.processors import CONTEXT_SIZE, LogitsProcessor
from kvant.engine.sampler import Sampler, SeededSampler
from kvant.engine.sampler import greedy as greedy_sampler
from kvant.engine.sampling import check_ranges, make_logits_processors, without_off
from kvant.errors import ArgumentError

__all__ = [
    "LogitsProcessor",
    "Sampler",
    "apply_min_p",
    "apply_top_k",
    "apply_top_p",
    "apply_xtc",
    "categorical_sampling",
    "greedy_sampler",
    "make_frequency_penalty",
    "make_logits_processors",
    "make_presence_penalty",
    "make_repetition_penalty",
    "make_sampler",
]


def make_sampler(
    temp: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    top_k: int = 0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = XTC_THRESHOLD,
    xtc_special_tokens: Sequence[int] | None = None,
    *,
    seed: int | None = None,
) -> Sampler:
    """Make a sampler with mlx-lm's arguments and distribution: top-p, min-p, XTC, top-k, in this order.

    With temp 0 the other arguments have no effect, as in mlx-lm.

    Args:
        top_p: 0 disables it too.
        top_k: 0 and -1 disable it.
        xtc_special_tokens: token ids that XTC never removes, such as the end of text.
        seed: of the sampler's own random numbers. In kvant's loops a draw depends only on seed and position.
            mlx-lm's loops pass no position; there it depends on the seed and the number of calls, so make one
            sampler per run. None: use MLX's random state, so that ``mx.random.seed`` makes a run repeatable,
            as in mlx-lm. Each thread has its own state, and all start alike.

    Raises:
        ArgumentError: a value outside its range.
    """
    check_ranges(
        temp=temp,
        top_p=top_p or None,
        min_p=min_p,
        min_tokens_to_keep=min_tokens_to_keep,
        top_k=top_k,
        xtc_probability=xtc_probability,
        xtc_threshold=xtc_threshold,
        seed=seed,
    )
    if temp == 0:
        return greedy_sampler
    options = FilterOptions(
        temp=temp,
        top_p=top_p or None,
        min_p=min_p,
        min_tokens_to_keep=min_tokens_to_keep,
        top_k=without_off("top_k", top_k),
        xtc_probability=xtc_probability,
        xtc_threshold=xtc_threshold,
    )
    return SeededSampler(temp, options.filters(xtc_special_tokens or ()), seed, follows_mlx=True)


def apply_top_p(logprobs: mx.array, top_p: float) -> mx.array:
    """Keep the likeliest tokens that together have ``top_p``; set other log-probabilities to -inf."""
    check_ranges(top_p=top_p)
    return filters.keep_top_p(logprobs, top_p)


def apply_min_p(logprobs: mx.array, min_p: float, min_tokens_to_keep: int = 1) -> mx.array:
    """Set log-probabilities (..., vocab) below ``min_p`` times the likeliest token's probability to -inf."""
    _check("min_p", min_p, 0 < min_p <= 1, "above 0, at most 1")
    check_ranges(min_tokens_to_keep=min_tokens_to_keep)
    filters.check_at_most("min_tokens_to_keep", min_tokens_to_keep, logprobs.shape[-1])
    return filters.keep_min_p(logprobs, min_p, min_tokens_to_keep)


def apply_top_k(logprobs: mx.array, top_k: int) -> mx.array:
    """Keep the ``top_k`` likeliest tokens of log-probabilities (..., vocab); set others to -inf."""
    most = logprobs.shape[-1] - 1
    _check("top_k", top_k, type(top_k) is int and 0 < top_k <= most, f"1 to {most} with this vocabulary")
    return filters.keep_top_k(logprobs, top_k)


def apply_xtc(
    logits: mx.array, xtc_probability: float, xtc_threshold: float, xtc_special_tokens: Sequence[int]
) -> mx.array:
    """With ``xtc_probability``, drop all tokens above the threshold except the least likely of them.

    The decision uses MLX's random state.
    """
    check_ranges(xtc_probability=xtc_probability, xtc_threshold=xtc_threshold)
    filters.check_special(xtc_special_tokens, logits.shape[-1])
    coin = mx.random.uniform()
    return filters.leave_out_top_choices(logits, xtc_probability, xtc_threshold, xtc_special_tokens, coin)


def categorical_sampling(logits: mx.array, temp: float) -> mx.array:
    """Draw tokens (...,) from logits (..., vocab) divided by the temperature, with MLX's random state."""
    return mx.random.categorical(logits * (1 / temp))


def make_repetition_penalty(penalty: float, context_size: int = CONTEXT_SIZE) -> LogitsProcessor:
    """See :class:`kvant.engine.processors.Repetition`."""
    _check("penalty", penalty, penalty > 0, "above 0")
    check_ranges(repetition_penalty=penalty, repetition_context_size=context_size)
    return processors.Repetition(penalty, context_size)


def make_presence_penalty(penalty: float, context_size: int = CONTEXT_SIZE) -> LogitsProcessor:
    """See :class:`kvant.engine.processors.Presence`."""
    check_ranges(presence_penalty=penalty, presence_context_size=context_size)
    return processors.Presence(penalty, context_size)


def make_frequency_penalty(penalty: float, context_size: int = CONTEXT_SIZE) -> LogitsProcessor:
    """See :class:`kvant.engine.processors.Frequency`."""
    check_ranges(frequency_penalty=penalty, frequency_context_size=context_size)
    return processors.Frequency(penalty, context_size)


def _check(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise ArgumentError(name, f"is {value!r}; expected {expected}")

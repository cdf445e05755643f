"""Logits to the next token: samplers with mlx-lm's options and distributions, and a seed of their own."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import mlx.core as mx

from kvant.engine.filters import keep_min_p, keep_top_k, keep_top_p, leave_out_top_choices
from kvant.engine.processors import CONTEXT_SIZE, LogitsProcessor, make_logits_processors
from kvant.engine.sampling_ranges import check

__all__ = [
    "LogitsProcessor",
    "Sampler",
    "SamplingOptions",
    "SeededSampler",
    "draw_key",
    "for_a_run",
    "greedy",
    "make_logits_processors",
    "make_sampler",
    "sample",
    "splitmix64",
]

XTC_THRESHOLD = 0.1  # mlx-lm's
_OF_A_TEMPERATURE = {"top_p": 1.0, "min_p": 0.0, "top_k": 0, "xtc_probability": 0.0, "seed": None}


@dataclass(frozen=True, slots=True)
class SeededSampler:
    """Draws tokens from filtered probabilities. The draw at a position depends on (seed, position) alone.

    MLX's random state is neither read nor changed. Made by :func:`make_sampler`.
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

    def __call__(self, logprobs: mx.array, key: mx.array) -> mx.array:
        """Log-probabilities (B, vocab) and a key (2,) of :func:`draw_key` -> tokens (B,)."""
        if 0 < self.top_p < 1:
            logprobs = keep_top_p(logprobs, self.top_p)
        if self.min_p:
            logprobs = keep_min_p(logprobs, self.min_p, self.min_tokens_to_keep)
        if self.xtc_probability:
            coin, key = mx.random.split(key)
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
    """A sampler with mlx-lm's arguments and distribution: top-p, min-p, XTC and top-k, in this order.

    Args:
        temp: temperature; 0 picks the likeliest token, whatever the other arguments are, as in mlx-lm.
        top_p: the likeliest tokens that together have this probability; 0 or 1: off.
        min_p: tokens with at least this share of the likeliest one's probability; 0: off.
        min_tokens_to_keep: ``min_p`` keeps at least this many.
        top_k: this many of the likeliest tokens; 0: off.
        xtc_probability: how often XTC leaves out all likely tokens but the least likely of them; 0: off.
        xtc_threshold: the probability from which on a token is likely.
        xtc_special_tokens: token ids that XTC never leaves out, such as the end of text.
        seed: every run with it draws the same; None: every run takes a seed of its own.

    Raises:
        ValueError: a value outside its range.
    """
    check(
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
        return greedy
    special = tuple(xtc_special_tokens or ())
    return SeededSampler(temp, top_p, min_p, min_tokens_to_keep, top_k, xtc_probability, xtc_threshold, special, seed)


def for_a_run(sampler: Sampler) -> Sampler:
    """The sampler of one run: without a seed it takes one of the operating system now."""
    if isinstance(sampler, SeededSampler) and sampler.seed is None:
        return replace(sampler, seed=int.from_bytes(os.urandom(8)))
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


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """What a user can ask of sampling; the defaults pick the most probable token.

    An option that could have no effect is refused.

    Raises:
        ValueError: a value outside its range.
    """

    temp: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    xtc_probability: float = 0.0
    xtc_threshold: float | None = None  # None: 0.1
    repetition_penalty: float = 1.0
    repetition_context_size: int | None = None  # None: 20, of each context size
    presence_penalty: float = 0.0
    presence_context_size: int | None = None
    frequency_penalty: float = 0.0
    frequency_context_size: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        given = {option.name: getattr(self, option.name) for option in fields(self)}
        for token, bias in given.pop("logit_bias").items():
            if not math.isfinite(bias):
                raise ValueError(f"logit_bias has {bias} for token {token}; expected finite numbers")
        check(**given)
        for name, needed, off in (
            ("xtc_threshold", "xtc_probability", 0),
            ("repetition_context_size", "repetition_penalty", 1),
            ("presence_context_size", "presence_penalty", 0),
            ("frequency_context_size", "frequency_penalty", 0),
        ):
            if given[name] is not None and given[needed] == off:
                article = "an" if needed.startswith("x") else "a"
                raise ValueError(f"{name} is {given[name]}; expected {article} {needed} with it")
        if self.temp == 0:
            for name, default in _OF_A_TEMPERATURE.items():
                if given[name] != default:
                    raise ValueError(
                        f"{name} is {given[name]}, but temp 0 always picks the likeliest token; set temp too"
                    )

    def build(self, vocab_size: int, special_tokens: Sequence[int] = ()) -> tuple[Sampler, list[LogitsProcessor]]:
        """The sampler and processors for these options.

        Args:
            vocab_size: the model's.
            special_tokens: token ids that XTC never leaves out; those the model does not have need no care.

        Raises:
            ValueError: a top_k or a biased token the vocabulary does not have.
        """
        if self.top_k >= vocab_size:
            raise ValueError(f"top_k is {self.top_k}; expected less than the vocabulary of {vocab_size}")
        for token in self.logit_bias:
            if not 0 <= token < vocab_size:
                raise ValueError(f"logit_bias has token {token}; the model knows 0 to {vocab_size - 1}")
        sampler = make_sampler(
            self.temp,
            self.top_p,
            self.min_p,
            top_k=self.top_k,
            xtc_probability=self.xtc_probability,
            xtc_threshold=XTC_THRESHOLD if self.xtc_threshold is None else self.xtc_threshold,
            xtc_special_tokens=[token for token in special_tokens if 0 <= token < vocab_size],
            seed=self.seed,
        )
        processors = make_logits_processors(
            self.logit_bias,
            self.repetition_penalty,
            self.repetition_context_size or CONTEXT_SIZE,
            self.presence_penalty,
            self.presence_context_size or CONTEXT_SIZE,
            self.frequency_penalty,
            self.frequency_context_size or CONTEXT_SIZE,
        )
        return sampler, processors

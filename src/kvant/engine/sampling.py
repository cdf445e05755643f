"""Logits to the next token: samplers with mlx-lm's options and distributions, and a seed of their own."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import mlx.core as mx

from kvant.engine import processors
from kvant.engine.filters import keep_min_p, keep_top_k, keep_top_p, leave_out_top_choices
from kvant.engine.processors import LogitsProcessor
from kvant.errors import ArgumentError

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

XTC_THRESHOLD, CONTEXT_SIZE = 0.1, 20  # mlx-lm's defaults


Range = tuple[str, Callable[[Any], bool]]  # in words, and as a test

FRACTION: Range = ("from 0 to 1", lambda value: 0 <= value <= 1)
COUNT: Range = ("at least 1", lambda value: value >= 1)
FINITE: Range = ("a finite number", math.isfinite)
RECENT = f"How many recent tokens that penalty looks at; default: {CONTEXT_SIZE}."


def _option(default: Any, values: Range, text: str, needs: str = "") -> Any:
    """A field of SamplingOptions: its default, range and help; ``needs``: an option without which it has no effect."""
    return field(default=default, metadata={"expected": values[0], "holds": values[1], "help": text, "needs": needs})


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """The options of sampling. Command, API and server take names, defaults, ranges and texts from here.

    The defaults pick the most probable token. An option that would have no effect is refused.

    Raises:
        ArgumentError: a value outside its range, or one without the option it needs.
    """

    temp: float = _option(
        0.0,
        ("0, or from 0.001 on", lambda value: value == 0 or 1e-3 <= value < math.inf),
        "Sampling temperature; 0 always picks the likeliest token.",
    )
    top_p: float = _option(
        1.0,
        ("above 0, at most 1", lambda value: 0 < value <= 1),
        "Sample from the likeliest tokens that together have this probability.",
        "temp",
    )
    min_p: float = _option(0.0, FRACTION, "Drop tokens less likely than this share of the likeliest one.", "temp")
    min_tokens_to_keep: int = _option(
        1, COUNT, "Keep at least this many of the likeliest tokens, whatever min-p says.", "min_p"
    )
    top_k: int = _option(
        0,
        ("0 (off) or more", lambda value: value >= 0),
        "Sample from this many of the likeliest tokens; 0: all.",
        "temp",
    )
    xtc_probability: float = _option(
        0.0, FRACTION, "How often to drop all likely tokens but the least likely of them; 0: never.", "temp"
    )
    xtc_threshold: float | None = _option(
        None,
        ("from 0 to 0.5", lambda value: 0 <= value <= 0.5),
        f"Probability from which on XTC calls a token likely; default: {XTC_THRESHOLD}.",
        "xtc_probability",
    )
    repetition_penalty: float = _option(
        1.0, ("above 0", lambda value: 0 < value < math.inf), "Divide the logits of recent tokens by this; 1: off."
    )
    repetition_context_size: int | None = _option(None, COUNT, RECENT, "repetition_penalty")
    presence_penalty: float = _option(0.0, FINITE, "Subtract this from the logits of recent tokens; 0: off.")
    presence_context_size: int | None = _option(None, COUNT, RECENT, "presence_penalty")
    frequency_penalty: float = _option(
        0.0, FINITE, "Subtract this from a recent token's logit once an occurrence; 0: off."
    )
    frequency_context_size: int | None = _option(None, COUNT, RECENT, "frequency_penalty")
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> number added to its logit
    seed: int | None = _option(
        None,
        (f"from 0 to {2**64 - 1}", lambda value: 0 <= value < 2**64),
        "Seed of the random numbers; without one every run differs.",
        "temp",
    )

    def __post_init__(self) -> None:
        for token, bias in self.logit_bias.items():
            if not math.isfinite(bias):
                raise ArgumentError("logit_bias", f"has {bias} for token {token}; expected finite numbers")
        given = {name: getattr(self, name) for name in OPTIONS}
        _check(**given)
        for name, option in OPTIONS.items():
            needs = option.metadata["needs"]
            if needs and given[name] != option.default and given[needs] == OPTIONS[needs].default:
                raise ArgumentError(name, f"is {given[name]}, which has no effect without", needs)

    def build(self, vocab_size: int, special_tokens: Sequence[int] = ()) -> tuple["Sampler", list[LogitsProcessor]]:
        """The sampler and processors for these options.

        Args:
            vocab_size: the model's.
            special_tokens: token ids that XTC never leaves out; those the model does not have need no care.

        Raises:
            ArgumentError: a count or a biased token that the vocabulary does not have.
        """
        for name, most in (("top_k", vocab_size - 1), ("min_tokens_to_keep", vocab_size)):
            if getattr(self, name) > most:
                raise ArgumentError(name, f"is {getattr(self, name)}; expected at most {most} with this vocabulary")
        for token in self.logit_bias:
            if not 0 <= token < vocab_size:
                raise ArgumentError("logit_bias", f"has token {token}; the model knows 0 to {vocab_size - 1}")
        sampler = make_sampler(
            self.temp,
            self.top_p,
            self.min_p,
            self.min_tokens_to_keep,
            self.top_k,
            self.xtc_probability,
            XTC_THRESHOLD if self.xtc_threshold is None else self.xtc_threshold,
            [token for token in special_tokens if 0 <= token < vocab_size],
            seed=self.seed,
        )
        return sampler, make_logits_processors(
            self.logit_bias,
            self.repetition_penalty,
            self.repetition_context_size or CONTEXT_SIZE,
            self.presence_penalty,
            self.presence_context_size or CONTEXT_SIZE,
            self.frequency_penalty,
            self.frequency_context_size or CONTEXT_SIZE,
        )


OPTIONS = {option.name: option for option in fields(SamplingOptions) if option.metadata}  # those with a range


def _check(**given: object) -> None:
    """Refuse an option outside its range; None is not given.

    Raises:
        ArgumentError: there is one.
    """
    for name, value in given.items():
        option = OPTIONS[name]
        kinds = (int, float) if option.type in (float, float | None) else (int,)
        right = isinstance(value, kinds) and not isinstance(value, bool)
        if value is not None and not (right and option.metadata["holds"](value)):
            raise ArgumentError(name, f"is {value!r}; expected {option.metadata['expected']}")


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

    The arguments are fields of :class:`SamplingOptions`, but for these. With temp 0 the others count for nothing, as
    in mlx-lm.

    Args:
        top_p: 0 switches it off too.
        xtc_special_tokens: token ids that XTC never leaves out, such as the end of text.

    Raises:
        ArgumentError: a value outside its range.
    """
    _check(
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


def make_logits_processors(
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float | None = None,
    repetition_context_size: int = CONTEXT_SIZE,
    presence_penalty: float | None = None,
    presence_context_size: int = CONTEXT_SIZE,
    frequency_penalty: float | None = None,
    frequency_context_size: int = CONTEXT_SIZE,
) -> list[LogitsProcessor]:
    """mlx-lm's functions of (tokens so far, logits) that return new logits. They are applied in this order.

    The arguments are fields of :class:`SamplingOptions`. None and 0 leave one out.

    Raises:
        ArgumentError: a value outside its range.
    """
    _check(
        repetition_penalty=repetition_penalty or None,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_context_size=repetition_context_size,
        presence_context_size=presence_context_size,
        frequency_context_size=frequency_context_size,
    )
    made = []
    if logit_bias:
        made.append(processors.bias(logit_bias))
    if repetition_penalty and repetition_penalty != 1:
        made.append(processors.repetition(repetition_penalty, repetition_context_size))
    if presence_penalty:
        made.append(processors.presence(presence_penalty, presence_context_size))
    if frequency_penalty:
        made.append(processors.frequency(frequency_penalty, frequency_context_size))
    return made


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

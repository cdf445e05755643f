"""The sampling options of a request: mlx-lm's, with its distributions, and a seed."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kvant.engine.filters import FilterOptions
from kvant.engine.option_ranges import COUNT, DIVISOR, FINITE, MAX_LOGIT, MIN_TEMP, SEED, option_field
from kvant.engine.processors import (
    CONTEXT_SIZE,
    Bias,
    Frequency,
    LogitsProcessor,
    Presence,
    Repetition,
    changing,
)
from kvant.engine.sampler import Sampler, SeededSampler, greedy
from kvant.errors import ArgumentError, ModelError
from kvant.fields import shown
from kvant.files import read_optional
from kvant.text.tokenizer import Tokenizer

FILE = "generation_config.json"
RECENT = f"How many recent tokens the penalty looks at; default: {CONTEXT_SIZE}."


@dataclass(frozen=True, slots=True)
class SamplingOptions(FilterOptions):
    """The sampling options. Command, API and server take names, defaults, ranges and help texts from here.

    None means that an option was not set; :meth:`filled` replaces it. Values are checked once, here: those
    out of range are refused, and so are options that would have no effect.
    """

    repetition_penalty: float | None = option_field(
        DIVISOR, "Make recent tokens less likely by this factor; 1 or 0: off; default: the model's, else 1."
    )
    repetition_context_size: int | None = option_field(COUNT, RECENT, "repetition_penalty")
    presence_penalty: float = option_field(
        FINITE, "Subtract this from the logits of recent tokens; 0: off.", default=0.0
    )
    presence_context_size: int | None = option_field(COUNT, RECENT, "presence_penalty")
    frequency_penalty: float = option_field(
        FINITE, "Subtract this from a recent token's logit each time it occurs; 0: off.", default=0.0
    )
    frequency_context_size: int | None = option_field(COUNT, RECENT, "frequency_penalty")
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> number added to its logit
    seed: int | None = option_field(
        SEED, "Seed of the random numbers; without one every run differs.", "temp"
    )

    def __post_init__(self) -> None:
        check_bias(self.logit_bias)
        if self.logit_bias and min(self.logit_bias) < 0:
            raise ArgumentError("logit_bias", f"has token {min(self.logit_bias)}; expected ids from 0 on")
        check_ranges(**{name: getattr(self, name) for name in OPTIONS})
        for name in OFF:
            object.__setattr__(self, name, without_off(name, getattr(self, name)))
        self.check_effects()

    def check_effects(self) -> None:
        """Raise an ArgumentError for an option without effect; unset options may still be filled."""
        for name, described in OPTIONS.items():
            needs = described.metadata["needs"]
            if not needs or not self.changes(name) or getattr(self, needs) is None or self.changes(needs):
                continue
            value = getattr(self, name)
            if needs == "temp":
                raise ArgumentError(name, f"is {value}, which has no effect at temperature 0")
            raise ArgumentError(name, f"is {value}, which has no effect without", needs)

    def changes(self, name: str) -> bool:
        """Return whether an option is set to something other than its neutral value."""
        value = getattr(self, name)
        return value is not None and value != NEUTRAL.get(name, OPTIONS[name].default)

    def filled(self, of_the_model: Mapping[str, Any] | None = None) -> "Sampling":
        """Return these options, with unset ones replaced by the model's or the neutral value.

        If the temperature is unset and an option needs one, such as a top-p or a seed, it is the model's, or
        1 if the model has none or 0. At temperature 0 the model's options (:func:`read_model_sampling`) that
        need a temperature are ignored.
        """
        model = of_the_model or {}
        temp = model.get("temp", 0.0) if self.temp is None else self.temp
        if self.temp is None and not temp and any(map(self.changes, NEEDS_TEMP)):
            temp = 1.0
        values: dict[str, Any] = {option.name: getattr(self, option.name) for option in fields(self)}
        values["temp"] = temp
        for name, neutral in NEUTRAL.items():
            if name != "temp" and getattr(self, name) is None:
                values[name] = model.get(name, neutral) if temp or name not in NEEDS_TEMP else neutral
        return Sampling(**values)


@dataclass(frozen=True, slots=True)
class Sampling(SamplingOptions):
    """Complete options, which :meth:`SamplingOptions.filled` makes from checked values."""

    temp: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        self.check_effects()

    def build(
        self, vocab_size: int, special_tokens: Sequence[int] = ()
    ) -> tuple[Sampler, list[LogitsProcessor]]:
        """Return the sampler and the processors; XTC spares the special tokens.

        Raises:
            ArgumentError: the vocabulary is too small for an option.
        """
        sampler: Sampler = greedy
        if self.temp:
            special = [token for token in special_tokens if 0 <= token < vocab_size]
            sampler = SeededSampler(self.temp, self.filters(special), self.seed, vocab_size=vocab_size)
        made = changing(
            Bias(tuple(self.logit_bias), tuple(self.logit_bias.values()), vocab_size),
            Repetition(self.repetition_penalty, self.repetition_context_size or CONTEXT_SIZE),
            Presence(self.presence_penalty, self.presence_context_size or CONTEXT_SIZE),
            Frequency(self.frequency_penalty, self.frequency_context_size or CONTEXT_SIZE),
        )
        return sampler, made

    def build_for(self, tokenizer: Tokenizer, vocab_size: int) -> tuple[Sampler, list[LogitsProcessor]]:
        """Call :meth:`build`; as in mlx-lm, XTC never excludes the ends of a line and of the text."""
        special: list[int] = []
        if self.xtc_probability:
            special = [*tokenizer.encode("\n", add_special_tokens=False), *tokenizer.eos_token_ids]
        return self.build(vocab_size, special)


OPTIONS = {option.name: option for option in fields(SamplingOptions) if option.metadata}  # those with a range
NEEDS_TEMP = tuple(name for name, option in OPTIONS.items() if option.metadata["needs"] == "temp")
# The options that a model may set, with the value that has no effect.
NEUTRAL = {"temp": 0.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "repetition_penalty": 1.0}
OFF = {"top_k": -1, "repetition_penalty": 0}  # values that mean "off" in vLLM and in mlx-lm


def without_off(name: str, value: Any) -> Any:
    """Return an option's value, or its neutral value if another program writes "off" like this."""
    return NEUTRAL[name] if name in OFF and value == OFF[name] else value


def check_bias(logit_bias: Mapping[int, float]) -> None:
    """Raise an ArgumentError for a bias that could overflow float32."""
    for token, bias in logit_bias.items():
        if not FINITE[1](bias):
            message = f"has {bias} for token {token}; expected finite numbers to {MAX_LOGIT:g}"
            raise ArgumentError("logit_bias", message)


def check_ranges(**values: object) -> None:
    """Raise an ArgumentError for an option outside its range; None is ignored."""
    for name, value in values.items():
        option = OPTIONS[name]
        if value is not None and not in_range(name, value):
            raise ArgumentError(name, f"is {value!r}; expected {option.metadata['expected']}")


def make_logits_processors(
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float | None = None,
    repetition_context_size: int = CONTEXT_SIZE,
    presence_penalty: float | None = None,
    presence_context_size: int = CONTEXT_SIZE,
    frequency_penalty: float | None = None,
    frequency_context_size: int = CONTEXT_SIZE,
) -> list[LogitsProcessor]:
    """Return mlx-lm's functions of (tokens so far, logits), in order; None and 0 turn one off.

    Raises:
        ArgumentError: a value is outside its range.
    """
    check_ranges(
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_context_size=repetition_context_size,
        presence_context_size=presence_context_size,
        frequency_context_size=frequency_context_size,
    )
    biases = logit_bias or {}
    check_bias(biases)
    return changing(
        Bias(tuple(biases), tuple(biases.values())),
        Repetition(repetition_penalty or 1.0, repetition_context_size),
        Presence(presence_penalty or 0.0, presence_context_size),
        Frequency(frequency_penalty or 0.0, frequency_context_size),
    )


def in_range(name: str, value: object) -> bool:
    """Return whether a value is in the option's range."""
    option = OPTIONS[name]
    kinds = (int, float) if option.type in (float, float | None) else (int,)
    return isinstance(value, kinds) and not isinstance(value, bool) and bool(option.metadata["holds"](value))


def read_model_sampling(
    folder: Path, overridden: Collection[str] = (), vocab_size: int | None = None
) -> dict[str, float]:
    """Return a model's own options by their names in SamplingOptions; empty if its folder has none.

    ``do_sample: false`` means a temperature of 0, and so does one too small to divide by. ``do_sample: true``
    without a temperature means 1, as in transformers. A file with neither does not sample.

    Args:
        overridden: names that the user sets; the file's values are ignored.
        vocab_size: if known, a top-k of this many tokens has no effect and becomes 0.
    """
    path = folder / FILE
    raw = read_optional(path)
    do_sample = raw.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise ModelError(f"{path}: do_sample is {shown(do_sample)}; expected true or false")
    options: dict[str, float] = {}
    for name in NEUTRAL:
        key = "temperature" if name == "temp" else name
        value = raw.get(key)
        if value is None or name in overridden:
            continue
        if name == "temp" and isinstance(value, float) and 0 < value < MIN_TEMP:
            value = 0.0
        if not in_range(name, value):
            expected = OPTIONS[name].metadata["expected"]
            raise ModelError(
                f"{path}: {key} is {shown(value)}; expected {expected}; an option of yours overrides it"
            )
        options[name] = without_off(name, value)
    if vocab_size is not None and options.get("top_k", 0) >= vocab_size:
        options["top_k"] = 0
    if do_sample is False:
        options = {name: value for name, value in options.items() if name not in NEEDS_TEMP}
        return options | {"temp": 0.0}
    if do_sample and "temp" not in overridden:
        options.setdefault("temp", 1.0)
    return options

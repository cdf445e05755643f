"""Sampling as a command does it: the flags, the model's own options under them, and a line that says what
is used.
"""

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from kvant.engine.sampling import FILE, NEUTRAL, Sampling, SamplingOptions, read_model_sampling

NAMES = {"temp": "temperature", "top_p": "top-p", "min_p": "min-p", "top_k": "top-k"}  # for a person


def model_sampling(folder: Path, given: SamplingOptions, vocab_size: int | None = None) -> dict[str, float]:
    """The model's own options of sampling, but for those that are given; see :func:`read_model_sampling`."""
    return read_model_sampling(
        folder, [name for name in NEUTRAL if getattr(given, name) is not None], vocab_size
    )


def drawn_seed() -> int:
    """A seed of the operating system, short enough to be typed again."""
    return int.from_bytes(os.urandom(4))


def in_force(
    given: SamplingOptions, of_the_model: Mapping[str, float], origins: Mapping[str, Any]
) -> Sampling:
    """The options with the model's under them; a size of the config file's without a penalty counts for
    nothing.
    """
    penalty = of_the_model.get("repetition_penalty", 1.0)
    if given.repetition_penalty is None and penalty == 1.0 and "repetition_context_size" in origins:
        given = replace(given, repetition_context_size=None)
    return given.filled(of_the_model)


def describe_sampling(
    given: SamplingOptions,
    used: Sampling,
    of_the_model: Mapping[str, float],
    origins: Mapping[str, tuple[Any, str]],
) -> str:
    """The options in force in a line: those that change something, and the temperature, each with its
    source.
    """
    shown: list[tuple[str, str]] = []
    for option in fields(used):
        name, value = option.name, getattr(used, option.name)
        if name == "logit_bias":
            if value:
                shown.append((f"logit bias of {len(value)} tokens", "given"))
        elif name == "temp" or used.changes(name):
            number = str(value) if isinstance(value, int) else f"{value + 0.0:.15g}"  # -0.0 is 0
            words = f"{NAMES.get(name, name.replace('_', ' '))} {number}"
            if getattr(given, name) == value:
                set_to, place = origins.get(name, (None, ""))
                source = place if set_to == value else "given"
            elif name == "seed":
                source, words = "drawn", f"seed {value}"
            else:
                source = FILE if name in of_the_model and of_the_model[name] == value else "default"
            shown.append((words, source))
    alike = groupby(shown, key=lambda each: each[1])
    parts = [f"{', '.join(words for words, _ in each)} ({source})" for source, each in alike]
    return f"sampling: {', '.join(parts)}"

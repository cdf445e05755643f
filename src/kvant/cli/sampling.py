"""Sampling in commands: the flags, the model's options as defaults, and a line that shows what is used."""

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from kvant.engine.sampling import FILE, NEUTRAL, Sampling, SamplingOptions, read_model_sampling

NAMES = {"temp": "temperature", "top_p": "top-p", "min_p": "min-p", "top_k": "top-k"}  # shown to users


def model_sampling(folder: Path, flags: SamplingOptions, vocab_size: int | None = None) -> dict[str, float]:
    """Return the model's sampling options that no flag sets; see :func:`read_model_sampling`."""
    return read_model_sampling(
        folder, [name for name in NEUTRAL if getattr(flags, name) is not None], vocab_size
    )


def drawn_seed() -> int:
    """Draw a seed that is short enough to type again."""
    return int.from_bytes(os.urandom(4))


def in_force(
    flags: SamplingOptions, of_the_model: Mapping[str, float], origins: Mapping[str, Any]
) -> Sampling:
    """Fill in the model's options; ignore a config file's penalty size if there is no penalty."""
    penalty = of_the_model.get("repetition_penalty", 1.0)
    if flags.repetition_penalty is None and penalty == 1.0 and "repetition_context_size" in origins:
        flags = replace(flags, repetition_context_size=None)
    return flags.filled(of_the_model)


def describe_sampling(
    flags: SamplingOptions,
    used: Sampling,
    of_the_model: Mapping[str, float],
    origins: Mapping[str, tuple[Any, str]],
) -> str:
    """Describe in one line the temperature and all options that have an effect, with their sources."""
    shown: list[tuple[str, str]] = []
    for option in fields(used):
        name = option.name
        value = getattr(used, name)
        if name == "logit_bias":
            if value:
                shown.append((f"logit bias of {len(value)} tokens", "given"))
        elif name == "temp" or used.changes(name):
            number = str(value) if isinstance(value, int) else f"{value + 0.0:.15g}"  # shows -0.0 as 0
            words = f"{NAMES.get(name, name.replace('_', ' '))} {number}"
            if getattr(flags, name) == value:
                set_to, place = origins.get(name, (None, ""))
                source = place if set_to == value else "given"
            elif name == "seed":
                source = "drawn"
                words = f"seed {value}"
            else:
                source = FILE if name in of_the_model and of_the_model[name] == value else "default"
            shown.append((words, source))
    alike = groupby(shown, key=lambda each: each[1])
    parts = [f"{', '.join(words for words, _ in each)} ({source})" for source, each in alike]
    return f"sampling: {', '.join(parts)}"

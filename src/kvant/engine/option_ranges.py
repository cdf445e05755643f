"""Ranges of sampling options, in words and as predicates, and a dataclass field that carries one."""

from collections.abc import Callable
from dataclasses import field
from typing import Any

MIN_TEMP = 1e-3  # logits divided by less leave float32
# A penalty is subtracted for each occurrence of a token; a whole context of them stays within float32.
MAX_LOGIT = 1e20

Range = tuple[str, Callable[[Any], bool]]  # in words, and as a predicate

TEMP: Range = (
    f"0, or from 0.001 on, at most {MAX_LOGIT:g}",
    lambda value: value == 0 or MIN_TEMP <= value <= MAX_LOGIT,
)
SHARE: Range = ("above 0, at most 1", lambda value: 0 < value <= 1)
FRACTION: Range = ("from 0 to 1", lambda value: 0 <= value <= 1)
COUNT: Range = ("at least 1", lambda value: value >= 1)
FINITE: Range = (
    f"a finite number from {-MAX_LOGIT:g} to {MAX_LOGIT:g}",
    lambda value: -MAX_LOGIT <= value <= MAX_LOGIT,
)
NUMBER: Range = ("0 or -1 (off), or more", lambda value: value >= -1)
DIVISOR: Range = ("0 (off), or from 0.001 to 1000", lambda value: value == 0 or 0.001 <= value <= 1000)
HALF: Range = ("from 0 to 0.5", lambda value: 0 <= value <= 0.5)
SEED: Range = (f"from 0 to {2**64 - 1}", lambda value: 0 <= value < 2**64)


def option_field(values: Range, text: str, needs: str = "", *, default: Any = None) -> Any:
    """Return a dataclass field with a range, help and a default.

    ``needs``: another option without which this one has no effect.
    """
    return field(
        default=default, metadata={"expected": values[0], "holds": values[1], "help": text, "needs": needs}
    )

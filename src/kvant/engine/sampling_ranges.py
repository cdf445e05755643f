"""The range of every sampling option, checked where an option is given."""

import math
from collections.abc import Callable
from types import UnionType


def check(**options: object) -> None:
    """Refuse an option outside its range; None is not given.

    Raises:
        ValueError: the option's name, its value and its range.
    """
    for name, value in options.items():
        kind, expected, holds = RANGES[name]
        if value is not None and not (isinstance(value, kind) and not isinstance(value, bool) and holds(value)):
            raise ValueError(f"{name} is {value!r}; expected {expected}")


def _from(low: float, high: float) -> Callable[[float], bool]:
    return lambda value: low <= value <= high


NUMBER = int | float
_FRACTION = (NUMBER, "from 0 to 1", _from(0, 1))
_COUNT = (int, "at least 1", _from(1, math.inf))
_FINITE = (NUMBER, "a finite number", math.isfinite)

RANGES: dict[str, tuple[type | UnionType, str, Callable[..., bool]]] = {
    "temp": (NUMBER, "0, or from 0.001 on", lambda value: value == 0 or 1e-3 <= value < math.inf),
    "top_p": (NUMBER, "above 0, at most 1", lambda value: 0 < value <= 1),
    "min_p": _FRACTION,
    "min_tokens_to_keep": _COUNT,
    "top_k": (int, "0 (off) or more", _from(0, math.inf)),
    "xtc_probability": _FRACTION,
    "xtc_threshold": (NUMBER, "from 0 to 0.5", _from(0, 0.5)),
    "seed": (int, f"from 0 to {2**64 - 1}", _from(0, 2**64 - 1)),
    "repetition_penalty": (NUMBER, "above 0", lambda value: 0 < value < math.inf),
    "presence_penalty": _FINITE,
    "frequency_penalty": _FINITE,
    "repetition_context_size": _COUNT,
    "presence_context_size": _COUNT,
    "frequency_context_size": _COUNT,
}

"""How much a test does: little in the gate, the full amount in ``scripts/check --long``."""

import os
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, TypeVar

T = TypeVar("T")


def count(normally: T, long: T) -> T:
    return long if os.environ.get("KVANT_LONG") else normally


def half(*options: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Every second combination of three or more options, in which any two values meet; in the long run
    all.
    """
    every = [tuple(zip(*each, strict=True)) for each in product(*(enumerate(values) for values in options))]
    return [values for places, values in every if count(sum(places) % 2 == 0, True)]


def at_widths(cases: Iterable[T]) -> list[tuple[T, int]]:
    """Each case with the bits of a cache: 0, and 8 and 4 in turns; in the long run all three with each."""
    return [(case, bits) for i, case in enumerate(cases) for bits in count((0, (8, 4)[i % 2]), (0, 8, 4))]

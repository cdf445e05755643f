"""How much a test does: little in the gate, the full amount in ``scripts/check --long``."""

import os
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def count(normally: T, long: T) -> T:
    return long if os.environ.get("KVANT_LONG") else normally


def at_widths(cases: Iterable[T]) -> list[tuple[T, int]]:
    """Each case with the bits of a cache: 0, and 8 and 4 in turns; in the long run all three with each."""
    return [(case, bits) for i, case in enumerate(cases) for bits in count((0, (8, 4)[i % 2]), (0, 8, 4))]

"""How much a test does: little in the gate, the full amount in ``scripts/check --long``."""

import os
from typing import TypeVar

T = TypeVar("T")


def count(normally: T, long: T) -> T:
    """One or the other."""
    return long if os.environ.get("KVANT_LONG") else normally

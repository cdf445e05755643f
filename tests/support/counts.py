"""How much a test does: little in the gate; what the project's promises name in ``scripts/check --long``."""

import os


def count(normally: int, long: int) -> int:
    """One or the other."""
    return long if os.environ.get("KVANT_LONG") else normally

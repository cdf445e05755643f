"""Sizes in bytes: this machine's memory, and formatting."""

import os
from collections.abc import Mapping


def physical_memory() -> int:
    """Return the bytes of memory in this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def format_bytes(count: int) -> str:
    """Format bytes in decimal units, like Activity Monitor."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"


def list_bytes(counts: Mapping[str, int]) -> str:
    """Return the names with their bytes, separated by commas, without those that have none."""
    return ", ".join(f"{name} {format_bytes(count)}" for name, count in counts.items() if count)

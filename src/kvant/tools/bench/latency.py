"""The time each item of an iteration takes."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def timed(items: Iterable[T], clock: Callable[[], float] = time.perf_counter) -> Iterator[tuple[T, float]]:
    """Each item with the milliseconds it took, the first one's from when it was asked for. ``clock`` is in seconds."""
    last = clock()
    for item in items:
        now = clock()
        yield item, (now - last) * 1e3
        last = now

"""Latencies: of the items of an iteration, and of runs that take turns."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import TypeVar

T = TypeVar("T")


def timed(items: Iterable[T], clock: Callable[[], float] = time.perf_counter) -> Iterator[tuple[T, float]]:
    """Each item with the milliseconds it took, the first one's from when it was asked for. ``clock`` is in seconds."""
    last = clock()
    for item in items:
        now = clock()
        yield item, (now - last) * 1e3
        last = now


def medians_in_turns(runs: Sequence[Callable[[], Iterable[object]]], rounds: int) -> list[float]:
    """Median milliseconds of each run's items. Runs take turns, forwards and backwards: a drift favors none.

    Args:
        runs: each starts a run, whose items are timed.
        rounds: after one that is not counted: it compiles and fills the processor's caches.
    """
    times: list[list[float]] = [[] for _ in runs]
    order = list(range(len(runs)))
    for number in range(1 + rounds):
        for index in order:
            latencies = [ms for _, ms in timed(runs[index]())]
            times[index] += latencies if number else []
        order.reverse()
    return [median(own) for own in times]

"""Figures that a few slow tokens do not move."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with its range."""

    median: float
    minimum: float
    maximum: float
    count: int  # of the values


def percentile(values: Iterable[float], percent: float) -> float:
    """The value below which ``percent`` of the values lie, interpolated linearly between neighbors."""
    ordered = sorted(values)
    if not ordered or not 0 <= percent <= 100:
        raise ValueError(f"percentile {percent} of {len(ordered)} values; expected 0 to 100, of at least one")
    place = (len(ordered) - 1) * percent / 100
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    if below == above:  # both infinite, too
        return below
    return below + (above - below) * (place - math.floor(place))


def median_ms(work: Callable[[], object], repeats: int) -> float:
    """Milliseconds of a call, the median of ``repeats`` after the first, which fills caches and wakes threads."""
    times = []
    for _ in range(1 + repeats):
        started = time.perf_counter()
        work()
        times.append((time.perf_counter() - started) * 1e3)
    return median(times[1:])


def paired_ratio(values: Mapping[int, float], baseline: Mapping[int, float]) -> Spread | None:
    """Ratios of what was measured in the same round; None if no round has both."""
    ratios = [value / baseline[number] for number, value in values.items() if number in baseline]
    return Spread(median(ratios), min(ratios), max(ratios), len(ratios)) if ratios else None


def in_turns(ways: Mapping[str, Callable[[], T]], rounds: int, warm_ups: int = 1) -> dict[str, list[T]]:
    """Each way's results, one a round; the order alternates, and the rounds that warm up are left out."""
    found: dict[str, list[T]] = {name: [] for name in ways}
    for number in range(-warm_ups, rounds):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            result = ways[name]()
            if number >= 0:
                found[name].append(result)
    return found

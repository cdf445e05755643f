"""Figures that a few slow tokens do not move."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import TypeVar

T = TypeVar("T")
WIDE = 1.25  # the largest value divided by the smallest; on an idle machine paired rounds differ by less


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    minimum: float
    maximum: float
    count: int  # of the values

    @property
    def is_wide(self) -> bool:
        """Whether the values differ so much that something else must have used the machine."""
        return self.maximum > WIDE * self.minimum


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
    """Milliseconds of a call, the median of ``repeats`` after the first, which fills caches and wakes
    threads.
    """
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


def drift(values: Sequence[float]) -> tuple[float, float] | None:
    """Whether values move on over the rounds, as those of a machine that becomes hot; None of fewer than 4.

    Returns:
        the median of the second half divided by the first's, and how likely an order with so many pairs that
        rise, or that fall, is by chance: Mann's test (Econometrica 13, 1945), two-sided, exact.
    """
    n = len(values)
    if n < 4:
        return None
    orders = [1]  # of n values, by how many pairs fall
    for size in range(2, n + 1):
        orders = [sum(orders[max(0, k - size + 1) : k + 1]) for k in range(size * (size - 1) // 2 + 1)]
    falling = sum(before > after for before, after in combinations(values, 2))
    rare = min(falling, len(orders) - 1 - falling)
    p = min(1.0, 2 * sum(orders[: rare + 1]) / math.factorial(n))
    return median(values[-(n // 2) :]) / median(values[: n // 2]), p


def in_turns(ways: Mapping[str, Callable[[], T]], rounds: int, warm_ups: int = 1) -> dict[str, list[T]]:
    """Each way's results, one a round; the order alternates, and the rounds that warm up are left out."""
    found: dict[str, list[T]] = {name: [] for name in ways}
    for number in range(-warm_ups, rounds):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            result = ways[name]()
            if number >= 0:
                found[name].append(result)
    return found

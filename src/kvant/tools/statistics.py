"""Statistics that a few slow tokens do not move."""

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
    count: int  # number of values

    @property
    def is_wide(self) -> bool:
        """Whether the values differ so much that another program must have used the machine."""
        return self.maximum > WIDE * self.minimum


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the value below which ``percent`` of the values lie, interpolated linearly between neighbors."""
    ordered = sorted(values)
    if not ordered or not 0 <= percent <= 100:
        raise ValueError(f"percentile {percent} of {len(ordered)} values; expected 0 to 100, of at least one")
    position = (len(ordered) - 1) * percent / 100
    below = ordered[math.floor(position)]
    above = ordered[math.ceil(position)]
    if below == above:  # both may be infinite
        return below
    return below + (above - below) * (position - math.floor(position))


def median_ms(call: Callable[[], object], repeats: int) -> float:
    """Return a call's median time in ms over ``repeats``, after one that fills caches and wakes threads."""
    times = []
    for _ in range(1 + repeats):
        started = time.perf_counter()
        call()
        times.append((time.perf_counter() - started) * 1e3)
    return median(times[1:])


def paired_ratio(values: Mapping[int, float], baseline: Mapping[int, float]) -> Spread | None:
    """Divide values by the baseline's of the same round; return None if no round has both."""
    ratios = [value / baseline[number] for number, value in values.items() if number in baseline]
    return Spread(median(ratios), min(ratios), max(ratios), len(ratios)) if ratios else None


def drift(values: Sequence[float]) -> tuple[float, float] | None:
    """Test whether values rise or fall over the rounds, as on a machine that heats up.

    Returns:
        The median of the second half divided by the first half's, and the probability that so many rising or
        falling pairs are chance: Mann's test (Econometrica 13, 1945), two-sided, exact. None for fewer than 4
        values.
    """
    n = len(values)
    if n < 4:
        return None
    orders = [1]  # the number of orders of n values, by how many pairs fall
    for size in range(2, n + 1):
        orders = [sum(orders[max(0, k - size + 1) : k + 1]) for k in range(size * (size - 1) // 2 + 1)]
    falling = sum(before > after for before, after in combinations(values, 2))
    rare = min(falling, len(orders) - 1 - falling)
    p = min(1.0, 2 * sum(orders[: rare + 1]) / math.factorial(n))
    return median(values[-(n // 2) :]) / median(values[: n // 2]), p


def in_turns(ways: Mapping[str, Callable[[], T]], rounds: int, warm_ups: int = 1) -> dict[str, list[T]]:
    """Call every function once a round, in alternating order; return the results without the warm-ups'."""
    results: dict[str, list[T]] = {name: [] for name in ways}
    for number in range(-warm_ups, rounds):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            result = ways[name]()
            if number >= 0:
                results[name].append(result)
    return results

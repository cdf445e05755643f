"""Figures that a few slow tokens do not move."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random
from statistics import median

PAIRS = 100_000  # a slope is taken from at most so many pairs of points

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with its range.

    Attributes:
        median, minimum, maximum: of the values.
        count: how many there are.
    """

    median: float
    minimum: float
    maximum: float
    count: int


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


def theil_sen(groups: Sequence[Sequence[Point]]) -> float | None:
    """Slope of y against x by Theil and Sen: the median of the slopes between pairs of points.

    If there are several groups, only pairs across groups count: points of one group are so close together that
    what happens within it would outvote the distance between groups. Of more than ``PAIRS`` pairs as many are drawn,
    always the same ones.

    Args:
        groups: points (x, y), such as those of each context.

    Returns:
        The slope; None if no two points differ in x.
    """
    points = [(number, x, y) for number, group in enumerate(groups) for x, y in group]
    across = sum(bool(group) for group in groups) > 1
    pairs: Iterable[tuple[tuple[int, float, float], tuple[int, float, float]]]
    if math.comb(len(points), 2) <= PAIRS:
        pairs = combinations(points, 2)
    else:
        random = Random(0)
        pairs = zip(random.choices(points, k=PAIRS), random.choices(points, k=PAIRS), strict=True)
    slopes = [(y1 - y0) / (x1 - x0) for (g, x0, y0), (h, x1, y1) in pairs if x0 != x1 and not (across and g == h)]
    return median(slopes) if slopes else None


def paired_ratio(values: Mapping[int, float], baseline: Mapping[int, float]) -> Spread | None:
    """Ratios of what was measured in the same round; None if no round has both."""
    ratios = [value / baseline[number] for number, value in values.items() if number in baseline]
    return Spread(median(ratios), min(ratios), max(ratios), len(ratios)) if ratios else None

"""Percentiles, slopes and ratios against hand-computed values and numpy's."""

import math
import time
from random import Random

import numpy as np
import pytest

from kvant.tools.statistics import PAIRS, Spread, paired_ratio, percentile, theil_sen


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101, 1000])
def test_percentiles_are_numpys(count: int) -> None:
    values = np.random.default_rng(count).lognormal(size=count)
    for percent in (0, 5, 25, 50, 75, 95, 99, 99.9, 100):
        assert percentile(values.tolist(), percent) == pytest.approx(np.percentile(values, percent), rel=1e-12)


def test_percentiles_among_infinite_values_are_no_nan() -> None:
    values = [1.0, math.inf, math.inf]
    assert [percentile(values, percent) for percent in (0, 40, 50, 75, 100)] == [1.0, *[math.inf] * 4]


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_percentiles_of_nothing(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="expected 0 to 100, of at least one"):
        percentile(values, percent)


def test_a_slope_is_the_median_over_pairs() -> None:
    """Of (0, 0), (1, 1), (2, 10): slopes 1, 9 and 5."""
    assert theil_sen([[(0, 0), (1, 1), (2, 10)]]) == 5
    # Across groups: from (0, 0) and (1, -9) to (10, 20): 2 and 29 / 9; within the first -9, which does not count.
    assert theil_sen([[(0, 0), (1, -9)], [(10, 20)]]) == pytest.approx((2 + 29 / 9) / 2)
    assert theil_sen([[(3, 1), (3, 2)]]) is None
    assert theil_sen([[(3, 1)], []]) is None
    assert theil_sen([]) is None


@pytest.mark.parametrize("count", [300, 20_000])
def test_a_slope_survives_slow_tokens(count: int) -> None:
    """About one in ten is slow by 5 ms, all of them late: a least-squares fit is off by more than twice."""
    random = Random(count)
    slope = 0.8 / count
    points = [(float(x), 3 + slope * x + random.gauss(0, 0.001)) for x in range(count)]
    points = [(x, y + 5 * (x > count / 2 and random.random() < 0.2)) for x, y in points]
    fitted = theil_sen([points])
    assert fitted == theil_sen([points])
    assert fitted == pytest.approx(slope, rel=0.03)
    assert np.polyfit(*np.array(points).T, 1)[0] > 2 * slope


def test_a_long_slope_is_quick_and_reads_all_runs() -> None:
    """Five runs of different speed at the same positions: pairs at a fixed distance would compare other runs only."""
    points = [(float(x), run + 0.001 * x) for run in range(5) for x in range(4000)]
    assert len(points) ** 2 / 2 > 100 * PAIRS
    started = time.process_time()
    assert theil_sen([points]) == pytest.approx(0.001, rel=0.05)
    assert theil_sen([sorted(points)]) == pytest.approx(0.001, rel=0.05)
    assert time.process_time() - started < 2  # 0.1 s where this was written


def test_ratios_are_paired() -> None:
    """By round: the machine that slows down with every round changes no ratio."""
    assert paired_ratio({0: 1.0, 1: 2.0, 2: 4.5}, {0: 2.0, 1: 4.0, 2: 8.0}) == Spread(0.5, 0.5, 0.5625, 3)
    assert paired_ratio({1: 3.0, 5: 1.0}, {0: 1.0, 1: 2.0}) == Spread(1.5, 1.5, 1.5, 1)
    assert paired_ratio({0: 1.0}, {1: 1.0}) is None
    assert paired_ratio({}, {}) is None

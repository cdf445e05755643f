"""Percentiles and ratios against hand-computed values and numpy's."""

import math

import numpy as np
import pytest

from kvant.tools.statistics import Spread, paired_ratio, percentile


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


def test_ratios_are_paired() -> None:
    """By round: the machine that slows down with every round changes no ratio."""
    assert paired_ratio({0: 1.0, 1: 2.0, 2: 4.5}, {0: 2.0, 1: 4.0, 2: 8.0}) == Spread(0.5, 0.5, 0.5625, 3)
    assert paired_ratio({1: 3.0, 5: 1.0}, {0: 1.0, 1: 2.0}) == Spread(1.5, 1.5, 1.5, 1)
    assert paired_ratio({0: 1.0}, {1: 1.0}) is None
    assert paired_ratio({}, {}) is None

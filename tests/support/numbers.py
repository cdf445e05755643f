"""How far numbers are from what they should be."""

import mlx.core as mx


def relative_error(given: mx.array, expected: mx.array) -> float:
    """The largest difference, relative to the largest expected magnitude."""
    assert given.shape == expected.shape
    assert mx.isfinite(given).all().item()
    return (mx.abs(given - expected).max() / mx.abs(expected).max()).item()

"""How far numbers are from what they should be, and the memory that they take."""

from collections.abc import Callable

import mlx.core as mx


def normal(seed: int, *shape: int) -> mx.array:
    """Numbers of the normal distribution, float32."""
    return mx.random.normal(shape, key=mx.random.key(seed))


def relative_error(given: mx.array, expected: mx.array) -> float:
    """The largest difference, relative to the largest expected magnitude."""
    assert given.shape == expected.shape
    assert mx.isfinite(given).all().item()
    return (mx.abs(given - expected).max() / mx.abs(expected).max()).item()


def peak_bytes(work: Callable[[], object]) -> int:
    """Bytes above the resting state while it works."""
    mx.synchronize()
    mx.clear_cache()
    resting = mx.get_active_memory()
    mx.reset_peak_memory()
    work()
    mx.synchronize()
    return mx.get_peak_memory() - resting

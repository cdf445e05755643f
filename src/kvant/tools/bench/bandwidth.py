"""Measure the device's copy bandwidth, to compare with the rate at which decode steps read memory."""

import mlx.core as mx

from kvant.tools.bench.runner import Worker
from kvant.tools.statistics import median_ms

COPY_BYTES = 256 * 1024 * 1024  # the size of each of two arrays, far above any last-level cache
REPEATS = 7


def copy_bandwidth_gb_s(size: int = COPY_BYTES) -> float:
    """Return how many 1e9 bytes MLX reads and writes per second when it copies ``size`` bytes.

    A slice is written in place: a new array would be timed with its allocation (a seventh of the speed on a
    CPU). On a CPU MLX copies with one thread, as it decodes.
    """
    row = 64 * 1024
    rows = size // row
    source = mx.random.uniform(shape=(rows, row // 4))
    target = mx.zeros((rows, row // 4))
    mx.eval(source, target)

    def copy() -> None:
        target[1:] = source[1:]  # all but one row: assigning a whole array would not copy it
        mx.eval(target)
        mx.synchronize()

    return 2 * (rows - 1) * row / median_ms(copy, REPEATS) / 1e6


def measure_bandwidth() -> float:
    """Call :func:`copy_bandwidth_gb_s` in a separate process, so that its memory is freed."""
    with Worker("copy bandwidth", {}) as worker:
        return float(worker.ask(command="bandwidth")["gb_s"])

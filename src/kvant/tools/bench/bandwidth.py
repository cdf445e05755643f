"""The device's copy bandwidth, which the bytes a decode step reads a second are compared with."""

import mlx.core as mx

from kvant.tools.bench.runner import Worker
from kvant.tools.statistics import median_ms

COPY_BYTES = 256 * 1024 * 1024  # far above any last-level cache; of two arrays this size
REPEATS = 7


def copy_bandwidth_gb_s(size: int = COPY_BYTES) -> float:
    """1e9 bytes read and written a second by MLX, copying ``size`` bytes.

    A slice is written in place. Memory that is new would be timed with its allocation (a seventh of the speed
    on a CPU). On a CPU MLX copies with one thread, as it decodes.
    """
    row = 64 * 1024
    rows = size // row
    source, target = mx.random.uniform(shape=(rows, row // 4)), mx.zeros((rows, row // 4))
    mx.eval(source, target)

    def copy() -> None:
        target[1:] = source[1:]  # all but one row: a whole array would not be copied but renamed
        mx.eval(target)
        mx.synchronize()

    return 2 * (rows - 1) * row / median_ms(copy, REPEATS) / 1e6


def measure_bandwidth() -> float:
    """:func:`copy_bandwidth_gb_s` in a process of its own, which takes its memory with it."""
    with Worker("copy bandwidth", {}) as worker:
        return float(worker.ask(command="bandwidth")["gb_s"])

"""Measure how fast a CPU reads memory in the matrix product that dominates a token's time."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from kvant.models.matrix import DenseMatrix
from kvant.tools.bench.bandwidth import copy_bandwidth_gb_s
from kvant.tools.statistics import median_ms

# 128 MiB, above any last-level cache
INPUTS = 1024
OUTPUTS = 2048
MATRICES = 16
COPY_BYTES = 128 * 1024 * 1024
REPEATS = 5


@dataclass(frozen=True, slots=True)
class MemorySpeed:
    """Speeds in 1e9 bytes per second."""

    copy_gb_s: float  # bytes read and written by a copy
    row_gb_s: float  # bytes read when float32 matrices are multiplied by one row, as in a decoder
    mlx_row_gb_s: float  # the same with MLX's product


def measure_memory_speed() -> MemorySpeed:
    """Measure on MLX's default device, which must be a CPU."""
    matrices = [DenseMatrix(mx.random.uniform(shape=(INPUTS, OUTPUTS))) for _ in range(MATRICES)]
    row = mx.random.uniform(shape=(1, INPUTS))
    mx.eval(row, [matrix.arrays for matrix in matrices])
    nbytes = sum(matrix.weight.nbytes for matrix in matrices)

    def milliseconds(product: Callable[[DenseMatrix], mx.array]) -> float:
        def read_all() -> None:
            for matrix in matrices:
                mx.eval(product(matrix))

        return median_ms(read_all, REPEATS)

    by_kvant = milliseconds(lambda matrix: matrix.project(row))
    by_mlx = milliseconds(lambda matrix: row @ matrix.weight)
    return MemorySpeed(copy_bandwidth_gb_s(COPY_BYTES), nbytes / by_kvant / 1e6, nbytes / by_mlx / 1e6)

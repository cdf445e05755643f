"""How fast a CPU's memory is read by the product that most of a token's time goes into."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from kvant.models.matrix import DenseMatrix
from kvant.tools.bench.bandwidth import copy_bandwidth_gb_s
from kvant.tools.statistics import median_ms

INPUTS, OUTPUTS, MATRICES = 1024, 2048, 16  # 128 MiB, above any last-level cache
COPY_BYTES = 128 * 1024 * 1024
REPEATS = 5


@dataclass(frozen=True, slots=True)
class MemorySpeed:
    """In 1e9 bytes a second."""

    copy_gb_s: float  # read and written by a copy
    row_gb_s: float  # read of float32 matrices that are multiplied by one row, as a decoder does
    mlx_row_gb_s: float  # the same by MLX's product


def measure_memory_speed() -> MemorySpeed:
    """Of this process and MLX's default device, which is a CPU."""
    matrices = [DenseMatrix(mx.random.uniform(shape=(INPUTS, OUTPUTS))) for _ in range(MATRICES)]
    row = mx.random.uniform(shape=(1, INPUTS))
    mx.eval(row, [matrix.arrays for matrix in matrices])
    nbytes = sum(matrix.weight.nbytes for matrix in matrices)

    def milliseconds(product: Callable[[DenseMatrix], mx.array]) -> float:
        def read_all() -> None:
            for matrix in matrices:
                mx.eval(product(matrix))

        return median_ms(read_all, REPEATS)

    own = milliseconds(lambda matrix: matrix.project(row))
    by_mlx = milliseconds(lambda matrix: row @ matrix.weight)
    return MemorySpeed(copy_bandwidth_gb_s(COPY_BYTES), nbytes / own / 1e6, nbytes / by_mlx / 1e6)

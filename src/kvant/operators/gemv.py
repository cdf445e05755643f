"""A few rows of x times a matrix on a CPU, by BLAS's product of a matrix and a vector.

MLX multiplies one row by ``sgemm``, which copies the matrix into panels first. On 2 cores without AVX-512 that reads
5.7 GB/s, where ``sgemv`` reads 15 to 24 GB/s from one thread (scripts/results). MLX calls no ``sgemv``, so it is called
here, between two evaluations: x is computed first, and the product is there when the call returns.

Each row is multiplied by itself, so that it rounds alike whatever rows are beside it. Several rows share a block of
columns while that is in the core's cache. A block of a multiple of 16 columns rounds as the whole matrix does.
"""

import ctypes

import mlx.core as mx

from kvant import blas

# MLX multiplies a matrix of this size as fast, because each evaluation takes 30 to 50 us (measured on 2 cores).
BREAK_EVEN_ELEMENTS = 320 * 1024
BLOCK_ELEMENTS = 128 * 1024  # 512 KiB, of which several rows are multiplied before the next block
BLOCK_COLUMNS = 16
ROW_MAJOR, TRANSPOSED = 101, 112  # of CBLAS


def serves(x: mx.array, weight: mx.array) -> bool:
    """Whether :func:`gemv_rows` takes rows of x (..., in) and a weight (in, out), and is worth it."""
    is_float = x.dtype == weight.dtype == mx.float32
    return is_float and weight.ndim == 2 and weight.size > BREAK_EVEN_ELEMENTS and blas.sgemv() is not None


def gemv_rows(x: mx.array, weight: mx.array) -> mx.array:
    """The product of rows (..., in) with a matrix (in, out), both float32: (..., out), evaluated.

    The weight lies in memory row by row. Where :func:`serves` is False the result is undefined.
    """
    num_inputs, num_outputs = weight.shape
    rows = mx.contiguous(x.reshape(-1, num_inputs))
    output = mx.zeros((len(rows), num_outputs))
    mx.eval(rows, weight, output)
    multiply = blas.sgemv()
    assert multiply is not None
    block = num_outputs
    if len(rows) > 1:
        block = max(1, BLOCK_ELEMENTS // (num_inputs * BLOCK_COLUMNS)) * BLOCK_COLUMNS
    x_at, weight_at, output_at = _address(rows), _address(weight), _address(output)
    for first in range(0, num_outputs, block):
        columns = min(block, num_outputs - first)
        for row in range(len(rows)):
            multiply(
                ROW_MAJOR,
                TRANSPOSED,
                num_inputs,
                columns,
                1.0,
                weight_at + 4 * first,
                num_outputs,
                x_at + 4 * row * num_inputs,
                1,
                0.0,
                output_at + 4 * (row * num_outputs + first),
                1,
            )
    return output.reshape(*x.shape[:-1], num_outputs)


def _address(array: mx.array) -> int:
    """Where the elements of an evaluated array are; the caller holds the array meanwhile."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]

"""A few rows of x times a matrix on a CPU, by BLAS's product of a matrix and a vector.

MLX multiplies one row by ``sgemm``, which copies the matrix into panels first. On 2 cores that reads
3 to 12 GB/s, where ``sgemv`` reads 15 to 26 from one thread. MLX calls no ``sgemv``, so it is called
here, between two evaluations: x is computed first, and the product is there when the call returns.

Each row is multiplied by itself, so that it rounds alike whatever rows are beside it: a large matrix is
multiplied in blocks of its inputs and parts of its outputs, which are the same for any number of rows.
"""

import ctypes
from typing import cast

import mlx.core as mx

from kvant import blas
from kvant.operators.streams import cpu_cores, run_in_threads

# MLX multiplies a matrix of this size as fast, because each evaluation takes 30 to 50 us (measured on 2
# cores).
BREAK_EVEN_ELEMENTS = 320 * 1024
BLOCK_ELEMENTS = 512 * 1024  # 2 MiB, with which all rows are multiplied while it is in the processor's cache
BLOCK_INPUTS = 64  # a block has so many inputs, or a multiple; with 32 and 48 OpenBLAS read half as fast
# A larger matrix is worth a thread for each core: 1.2 to 1.35 times as fast on 2 cores.
PARALLEL_ELEMENTS = 4 * 1024 * 1024
PART_OUTPUTS = 64  # a thread has so many outputs, or a multiple


def serves(x: mx.array, weight: mx.array) -> bool:
    """Whether :func:`gemv_rows` takes rows of x (..., in) and a weight (in, out), and is worth it."""
    is_large = weight.size > BREAK_EVEN_ELEMENTS and weight.ndim == 2
    return is_large and x.dtype == weight.dtype == mx.float32 and blas.sgemv() is not None


def gemv_rows(x: mx.array, weight: mx.array) -> mx.array:
    """The product of rows (..., in) with a matrix (in, out), both float32: (..., out), evaluated.

    A weight that does not lie in memory row by row is copied. :func:`serves` has said yes. It has a gradient,
    and is MLX's own product inside of ``mx.compile`` and ``mx.vmap``.
    """
    return cast(mx.array, _product(x, weight))


@mx.custom_function
def _product(x: mx.array, weight: mx.array) -> mx.array:
    num_inputs, num_outputs = weight.shape
    rows = mx.contiguous(x.reshape(-1, num_inputs))
    output = mx.zeros((len(rows), num_outputs))
    try:
        mx.eval(rows, weight, output)
    except ValueError:  # nothing can be evaluated while MLX traces a function
        return x @ weight
    if not memoryview(weight).c_contiguous:  # type: ignore[arg-type]
        weight = mx.contiguous(weight)
        mx.eval(weight)
    multiply = blas.sgemv()
    assert multiply is not None
    block = max(1, BLOCK_ELEMENTS // (num_outputs * BLOCK_INPUTS)) * BLOCK_INPUTS
    x_at, weight_at, output_at = _address(rows), _address(weight), _address(output)
    count, size = len(rows), mx.float32.size

    def multiply_part(bounds: tuple[int, int]) -> None:
        """Compute the outputs from the first of the bounds up to the second."""
        first, last = bounds
        for start in range(0, num_inputs, block):
            for row in range(count):
                multiply(
                    blas.ROW_MAJOR,
                    blas.TRANSPOSED,
                    min(block, num_inputs - start),
                    last - first,
                    1.0,
                    weight_at + size * (start * num_outputs + first),
                    num_outputs,
                    x_at + size * (row * num_inputs + start),
                    1,
                    1.0,  # the product is added to the output
                    output_at + size * (row * num_outputs + first),
                    1,
                )

    cores = 1 if weight.size < PARALLEL_ELEMENTS else cpu_cores()
    starts = [num_outputs * i // cores // PART_OUTPUTS * PART_OUTPUTS for i in range(cores)]
    ends = [*starts[1:], num_outputs]
    run_in_threads(multiply_part, zip(starts, ends, strict=True), cores)
    return output.reshape(*x.shape[:-1], num_outputs)


@_product.vjp
def _gradient(
    primals: tuple[mx.array, mx.array], cotangent: mx.array, _: mx.array
) -> tuple[mx.array, mx.array]:
    x, weight = primals
    rows, cotangents = x.reshape(-1, x.shape[-1]), cotangent.reshape(-1, cotangent.shape[-1])
    return cotangent @ weight.T, rows.T @ cotangents


def _address(array: mx.array) -> int:
    """Where the elements of an evaluated array are; the caller holds the array meanwhile."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]

"""Multiply a few rows of x by a matrix on a CPU with BLAS's matrix-vector product.

MLX multiplies one row with ``sgemm``, which first copies the matrix into panels. On 2 cores that reads 3 to
12 GB/s, while ``sgemv`` reads 15 to 26 GB/s from one thread. MLX never calls ``sgemv``, so this module does,
between two evaluations: x is evaluated first, and the product is complete when the call returns.

Each row is multiplied separately, so that its rounding does not depend on other rows. A large matrix is
multiplied in blocks of inputs and ranges of outputs, which are the same for any number of rows.
"""

import ctypes
from typing import cast

import mlx.core as mx

from kvant import blas
from kvant.operators.streams import cpu_cores, run_in_threads

# Up to this size MLX is as fast, because each evaluation takes 30 to 50 us (measured on 2 cores).
BREAK_EVEN_ELEMENTS = 320 * 1024
BLOCK_ELEMENTS = 512 * 1024  # 2 MiB: stays in the processor's cache while all rows are multiplied
BLOCK_INPUTS = 64  # a block has a multiple of this; with 32 and 48 OpenBLAS read half as fast
# From this size on, a thread per core pays: 1.2 to 1.35 times as fast on 2 cores.
PARALLEL_ELEMENTS = 4 * 1024 * 1024
THREAD_OUTPUTS = 64  # a thread computes a multiple of this


def serves(x: mx.array, weight: mx.array) -> bool:
    """Return whether :func:`gemv_rows` supports x (..., in) and a weight (in, out), and pays."""
    is_large = weight.size > BREAK_EVEN_ELEMENTS and weight.ndim == 2
    return is_large and x.dtype == weight.dtype == mx.float32 and blas.sgemv() is not None


def gemv_rows(x: mx.array, weight: mx.array) -> mx.array:
    """Multiply rows (..., in) by a matrix (in, out), both float32, and return an evaluated (..., out).

    :func:`serves` must be true. A weight that is not row-contiguous is copied. The product has a gradient. It
    is MLX's own inside ``mx.compile`` and ``mx.vmap``.
    """
    return cast(mx.array, _product(x, weight))


@mx.custom_function
def _product(x: mx.array, weight: mx.array) -> mx.array:
    num_inputs, num_outputs = weight.shape
    rows = mx.contiguous(x.reshape(-1, num_inputs))
    output = mx.zeros((len(rows), num_outputs))
    try:
        mx.eval(rows, weight, output)
    except ValueError:  # MLX is tracing a function and cannot evaluate
        return x @ weight
    if not memoryview(weight).c_contiguous:  # type: ignore[arg-type]
        weight = mx.contiguous(weight)
        mx.eval(weight)
    multiply = blas.sgemv()
    assert multiply is not None
    block = max(1, BLOCK_ELEMENTS // (num_outputs * BLOCK_INPUTS)) * BLOCK_INPUTS
    x_at = _address(rows)
    weight_at = _address(weight)
    output_at = _address(output)
    count = len(rows)
    size = mx.float32.size

    def multiply_outputs(bounds: tuple[int, int]) -> None:
        """Compute the outputs in a range."""
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
                    1.0,  # add to the output
                    output_at + size * (row * num_outputs + first),
                    1,
                )

    cores = 1 if weight.size < PARALLEL_ELEMENTS else cpu_cores()
    starts = [num_outputs * i // cores // THREAD_OUTPUTS * THREAD_OUTPUTS for i in range(cores)]
    ends = [*starts[1:], num_outputs]
    run_in_threads(multiply_outputs, zip(starts, ends, strict=True), cores)
    return output.reshape(*x.shape[:-1], num_outputs)


@_product.vjp
def _gradient(
    primals: tuple[mx.array, mx.array], cotangent: mx.array, _: mx.array
) -> tuple[mx.array, mx.array]:
    x, weight = primals
    rows = x.reshape(-1, x.shape[-1])
    cotangents = cotangent.reshape(-1, cotangent.shape[-1])
    return cotangent @ weight.T, rows.T @ cotangents


def _address(array: mx.array) -> int:
    """Return the address of an evaluated array's elements. The caller must keep a reference."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]

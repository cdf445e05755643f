"""Products on a CPU with affine weights of 2, 4 or 8 bits, of a few rows of x and of many."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import mlx.core as mx

from kvant.models.quantization import Quantization

# at a time, for a few rows: more leave the core's cache, fewer are more operations
UNPACKED_ELEMENTS = 512 * 1024
# OpenBLAS multiplies without copying its operands first if there are at most so many multiplications (x86
# with AVX-512): 8 rows of x in half the time. An output is then one sum over all columns, for any number of
# rows.
SMALL_PRODUCT = 1000 * 1000
VECTOR = 16  # float32 numbers; what is left of a block of weights beside them is summed in another order


def block_size(rows: int, num_columns: int, bits: int) -> int:
    """How many rows of a matrix a product takes at a time with so many rows of x, each of ``num_columns``."""
    columns = num_columns * bits // 8  # of the numbers at one place of every byte
    return max(VECTOR, SMALL_PRODUCT // (max(rows, 2) * columns) // VECTOR * VECTOR)


def few_rows_product(
    x: mx.array,
    arrays: Sequence[mx.array],
    quantization: Quantization,
    streams: Sequence[mx.Stream | mx.ThreadLocalStream],
) -> mx.array:
    """The product of 1 to :data:`kvant.operators.streams.FEW_ROWS` rows of x with a matrix, the streams
    taking turns.

    (..., in) float32 -> (..., out). Arrays are those of :func:`unpacked_product`.
    """
    num_rows, num_columns, rows = len(arrays[0]), x.shape[-1], x.size // x.shape[-1]
    rounds = -(-num_rows * num_columns // (UNPACKED_ELEMENTS * len(streams)))
    count = rounds * len(streams)  # of parts
    size = -(-num_rows // count)
    num_blocks = -(-size // block_size(rows, num_columns, quantization.bits))
    block = -(-size // num_blocks)
    block = -(-block // VECTOR) * VECTOR if count == 1 else max(1, block // VECTOR) * VECTOR
    whole = num_rows - num_rows % block
    bounds = [*range(0, whole, num_blocks * block), *([whole] if whole < num_rows else []), num_rows]
    product = _blocks_product(x, quantization, block)
    parts = multiply_on_cores(x, arrays, bounds, product, streams)
    output = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)
    return mx.contiguous(output.T[:rows]).reshape(*x.shape[:-1], num_rows)  # (out, N) -> (..., out)


def multiply_on_cores(
    x: mx.array,
    arrays: Sequence[mx.array],
    bounds: Sequence[int],
    product: Callable[[Sequence[mx.array]], mx.array],
    streams: Sequence[mx.Stream | mx.ThreadLocalStream],
) -> list[mx.array]:
    """The products with a matrix's rows between bounds. A stream begins a part when it has ended the one
    before.

    And not before x is there: otherwise MLX makes the weights of many parts before it uses one.
    """
    parts: list[mx.array] = []
    for first, last in pairwise(bounds):
        before = parts[-len(streams)] if len(parts) >= len(streams) else x
        with mx.stream(streams[len(parts) % len(streams)]):
            parts.append(product(mx.depends([array[first:last] for array in arrays], [before])))
    return parts


def _blocks_product(
    x: mx.array, quantization: Quantization, block: int
) -> Callable[[Sequence[mx.array]], mx.array]:
    """As :func:`unpacked_product`, for a few rows of x: fewer operations, and products with ``block`` rows at
    a time.

    MLX takes 3 to 4 us an operation, so the numbers at all places are unpacked together. One row of x is
    multiplied
    twice: the products of matrices and vectors add in another order.

    Returns:
        A function of the arrays of fewer than ``block`` rows, or of a multiple. It gives (out, N), the
        outputs of N = max(2, rows of x).
    """
    bits, group_size = quantization.bits, quantization.group_size
    places = 8 // bits
    rows = x.reshape(-1, x.shape[-1])  # (..., in) -> (N, in)
    if len(rows) == 1:
        rows = mx.broadcast_to(rows, (2, x.shape[-1]))
    by_place = rows.reshape(len(rows), -1, places).T  # (N, in / places, places) -> (places, in / places, N)
    shares = mx.array([2.0 ** (-bits * place) for place in range(places)])
    columns = mx.contiguous(by_place * shares[:, None, None])[:, None]
    sums = mx.contiguous(rows.reshape(len(rows), -1, group_size).sum(axis=-1).T)  # (in / G, N)
    masks = mx.array([(2**bits - 1 << bits * place) * 0x01010101 for place in range(places)], mx.uint32)

    def product(packed: Sequence[mx.array]) -> mx.array:
        weight, scales, biases = packed
        cut = weight & masks[:, None, None] if bits < 8 else weight[None]  # (places, out, in * bits / 32)
        # (places, out, in / G, G / places)
        numbers = mx.view(cut, mx.uint8).reshape(places, *scales.shape, -1)
        scaled = (numbers.astype(mx.float32) * scales[..., None]).reshape(
            places, -1, min(block, len(weight)), columns.shape[-2]
        )
        # MLX makes one large product of many with the same matrix, but not of many with copies of it.
        copies = mx.broadcast_to(columns, (*scaled.shape[:2], *columns.shape[-2:]))
        output = (scaled @ copies).reshape(places, len(weight), -1)  # (places, out / block, block, N)
        return (output.sum(axis=0) if places > 1 else output[0]) + biases @ sums

    return product


def unpacked_product(x: mx.array, quantization: Quantization) -> Callable[[Sequence[mx.array]], mx.array]:
    """A function of the arrays of some of a matrix's rows: the product of x with them.

    A byte holds 1, 2 or 4 numbers. A mask cuts out the numbers at one place of every byte, unshifted: the
    columns of x that meet them are divided as they should be. Biases meet the sums of x over groups. MLX's
    dequantize takes one number after the other, 2.3 ns each. This takes 0.8 (measured); to put the places
    side by side for one product doubles it.

    Of x (..., in) float32; the function takes (out, in * bits / 32) uint32 weights, (out, in / group_size)
    float32 scales and biases, and gives (..., out).
    """
    bits, group_size = quantization.bits, quantization.group_size
    places = range(8 // bits)
    columns = [x[..., place :: len(places)] * 2.0 ** (-bits * place) for place in places]
    sums = x.reshape(*x.shape[:-1], -1, group_size).sum(axis=-1)  # (..., in) -> (..., in / G)

    def product(packed: Sequence[mx.array]) -> mx.array:
        weight, scales, biases = packed
        output = sums @ biases.T
        for place in places:
            mask = mx.array((2**bits - 1 << bits * place) * 0x01010101, mx.uint32)
            cut = weight & mask if bits < 8 else weight
            numbers = mx.view(cut, mx.uint8).reshape(*scales.shape, -1)  # (out, in / G, G / places)
            scaled = (numbers.astype(mx.float32) * scales[..., None]).flatten(1)  # (out, in / places)
            output = output + columns[place] @ scaled.T
        return output

    return product

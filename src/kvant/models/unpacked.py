"""Products on a CPU with affine weights of 2, 4 or 8 bits, for a few rows of x and for many."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import mlx.core as mx

from kvant.models.quantization import Quantization

# at a time, for a few rows: more do not fit in the core's cache, fewer need more operations
UNPACKED_ELEMENTS = 512 * 1024
# Up to this many multiplications, OpenBLAS does not copy its operands first (x86 with AVX-512): 8 rows of x
# take half the time. Each output is then a single sum over all columns, for any number of rows.
SMALL_PRODUCT = 1000 * 1000
VECTOR = 16  # float32 numbers; the rest of a block of weights is summed in a different order


def block_size(rows: int, num_columns: int, bits: int) -> int:
    """Return how many rows of a matrix to multiply at a time by ``rows`` rows of x with ``num_columns``."""
    columns = num_columns * bits // 8  # numbers at one position of every byte
    return max(VECTOR, SMALL_PRODUCT // (max(rows, 2) * columns) // VECTOR * VECTOR)


def few_rows_product(
    x: mx.array,
    arrays: Sequence[mx.array],
    quantization: Quantization,
    streams: Sequence[mx.Stream | mx.ThreadLocalStream],
) -> mx.array:
    """Multiply 1 to :data:`kvant.operators.streams.FEW_ROWS` rows of x by a matrix, with rotating streams.

    (..., in) float32 -> (..., out). The arrays are as for :func:`unpacked_product`.
    """
    num_rows = len(arrays[0])
    num_columns = x.shape[-1]
    rows = x.size // x.shape[-1]
    rounds = -(-num_rows * num_columns // (UNPACKED_ELEMENTS * len(streams)))
    count = rounds * len(streams)  # of products
    size = -(-num_rows // count)
    num_blocks = -(-size // block_size(rows, num_columns, quantization.bits))
    block = -(-size // num_blocks)
    block = -(-block // VECTOR) * VECTOR if count == 1 else max(1, block // VECTOR) * VECTOR
    whole = num_rows - num_rows % block
    bounds = [*range(0, whole, num_blocks * block), *([whole] if whole < num_rows else []), num_rows]
    product = _blocks_product(x, quantization, block)
    products = multiply_on_cores(x, arrays, bounds, product, streams)
    output = products[0] if len(products) == 1 else mx.concatenate(products, axis=0)
    return mx.contiguous(output.T[:rows]).reshape(*x.shape[:-1], num_rows)  # (out, N) -> (..., out)


def multiply_on_cores(
    x: mx.array,
    arrays: Sequence[mx.array],
    bounds: Sequence[int],
    product: Callable[[Sequence[mx.array]], mx.array],
    streams: Sequence[mx.Stream | mx.ThreadLocalStream],
) -> list[mx.array]:
    """Return the products with a matrix's rows between bounds, on the streams in rotation.

    A stream begins a product when x and its previous product are computed: otherwise MLX unpacks the
    weights of many products before it uses any.
    """
    products: list[mx.array] = []
    for first, last in pairwise(bounds):
        before = products[-len(streams)] if len(products) >= len(streams) else x
        with mx.stream(streams[len(products) % len(streams)]):
            products.append(product(mx.depends([array[first:last] for array in arrays], [before])))
    return products


def _blocks_product(
    x: mx.array, quantization: Quantization, block: int
) -> Callable[[Sequence[mx.array]], mx.array]:
    """Return :func:`unpacked_product` for a few rows of x: fewer operations, ``block`` rows at a time.

    An operation takes MLX 3 to 4 us, so the numbers at all positions of a byte are unpacked together. A
    single row of x is multiplied twice: a matrix-vector product would sum in a different order.

    Returns:
        a function of the arrays of fewer than ``block`` rows, or of a multiple. It returns (out, N), the
        outputs for N = max(2, rows of x).
    """
    bits = quantization.bits
    group_size = quantization.group_size
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
        # MLX would merge products with the same matrix into a large one, but not products with copies of it.
        copies = mx.broadcast_to(columns, (*scaled.shape[:2], *columns.shape[-2:]))
        output = (scaled @ copies).reshape(places, len(weight), -1)  # (places, out / block, block, N)
        return (output.sum(axis=0) if places > 1 else output[0]) + biases @ sums

    return product


def unpacked_product(x: mx.array, quantization: Quantization) -> Callable[[Sequence[mx.array]], mx.array]:
    """Return a function that multiplies x (..., in) float32 by some of a matrix's rows.

    A byte has 1, 2 or 4 numbers. A mask selects the numbers at one position of every byte without shifting
    them; the columns of x are scaled down instead. Biases are multiplied by the sums of x over groups. MLX's
    dequantize takes 2.3 ns for each number, this 0.8 (measured), and 1.6 if positions are interleaved first.

    The function takes (out, in * bits / 32) uint32 weights and (out, in / group_size) float32 scales and
    biases, and returns (..., out).
    """
    bits = quantization.bits
    group_size = quantization.group_size
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

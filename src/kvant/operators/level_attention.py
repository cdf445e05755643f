"""Attention of one new token over quantized rows, read as levels: the composed path of decode on a CPU."""

import math

import mlx.core as mx

from kvant.operators.bias_split import BiasSplit, score_bias
from kvant.operators.quantization import multiply_levels

# PMX's signed level is MLX's affine code less 2^(bit-1): flipping the sign bit of every level makes one of the other.
SIGN_BITS = {8: 0x80808080, 4: 0x88888888}
AFFINE_GROUPS = (32, 64, 128)


def reads_levels(new_tokens: int, dtype: mx.Dtype, quant_bit: int, quant_group: int) -> bool:
    """Whether levels are read directly: where that was measured to be faster, and MLX knows the group."""
    on_cpu = mx.default_device().type == mx.cpu
    return (
        on_cpu and new_tokens == 1 and dtype == mx.float32 and quant_bit in SIGN_BITS and quant_group in AFFINE_GROUPS
    )


def attend_levels(
    query: mx.array, levels: mx.array, scale: mx.array, *, quant_bit: int, bias_split: BiasSplit | None = None
) -> mx.array:
    """Attention of the newest token to every row; unchecked. Products are in float32.

    Values are read by ``mx.quantized_matmul``, which never writes dequantized rows. So are keys at 4 bits; at 8 bits
    multiplying their levels out first is faster (docs/composed-path.md).

    Args:
        query: (B, H, 1, D) float32.
        levels: (B, 2, K, T, D') the layer's rows as they are stored.
        scale: (B, 2, K, T, D/G).
        quant_bit: 8 or 4; the group is one that MLX's affine quantization has.
        bias_split: what the rows lack of their biases.

    Returns:
        (B, H, 1, D) float32.
    """
    B, H, _, D = query.shape
    K, T = levels.shape[2:4]
    scale = scale.astype(mx.float32)
    scaled = (query / math.sqrt(D)).reshape(B, K, H // K, D)  # the query heads of a kv head side by side
    if quant_bit == 8:
        keys = multiply_levels(levels[:, 0], scale[:, 0], quant_bit, mx.float32)
        scores = scaled @ keys.swapaxes(-1, -2)  # (B, K, H/K, T)
    else:
        scores = _affine_product(scaled, levels[:, 0], scale[:, 0], quant_bit, transpose=True)
    if bias_split is not None and bias_split.pairs:
        scores = scores + score_bias(query, bias_split, T).reshape(B, K, H // K, T)
    weights = mx.softmax(scores, axis=-1)
    output = _affine_product(weights, levels[:, 1], scale[:, 1], quant_bit, transpose=False)  # (B, K, H/K, D)
    if bias_split is not None:
        output = output + bias_split.value_bias[:, None]  # (K, 1, D)
    return output.reshape(B, H, 1, D)


def _affine_product(x: mx.array, levels: mx.array, scale: mx.array, quant_bit: int, *, transpose: bool) -> mx.array:
    """``x`` times the rows that levels (B, K, T, D') and scales (B, K, T, D/G) stand for, or times their transpose."""
    codes = mx.view(levels, mx.uint32) ^ mx.array(SIGN_BITS[quant_bit], mx.uint32)
    head_dim = levels.shape[-1] * 8 // quant_bit
    return mx.quantized_matmul(
        x,
        codes,
        scale,
        scale * -(2.0 ** (quant_bit - 1)),
        transpose=transpose,
        group_size=head_dim // scale.shape[-1],
        bits=quant_bit,
    )

"""Symmetric, linear, group-wise quantization, as PMX's appendix on KV-cache quantization defines it."""

import mlx.core as mx

from kvant.operators.packing import PACKINGS

QUANT_BITS = (0, *PACKINGS)
FLOAT_DTYPES = (mx.float32, mx.float16, mx.bfloat16)
SCALE_DTYPES = (mx.float32, mx.float16)
MIN_SCALE = 1e-5
MAX_GROUP = 1024  # the largest group that a message suggests
FITTED_BITS = 4  # the engine's caches fit the scales at these bits; at 8 there is nothing to gain
TINY = 1e-30  # avoids 0/0 in a group of zeros


def quantize(
    x: mx.array, *, quant_bit: int = 8, quant_group: int = 8, scale_dtype: mx.Dtype | None = None
) -> tuple[mx.array, mx.array]:
    """Quantize groups of consecutive elements of the last dimension.

    All arithmetic is in ``x``'s dtype: ``scale = max(max|x| / (2^(bit-1) - 1), 1e-5)`` and
    ``quantized = round_half_to_even(x / scale)``, clamped to the symmetric range.

    Args:
        x: (..., D) float32, float16 or bfloat16.
        quant_bit: 8 (int8 from -127 to 127) or 4 (-7 to 7, two in a byte).
        quant_group: elements that share one scale. It divides D.
        scale_dtype: dtype of the scales, float32 or float16; default ``x``'s dtype.

    Returns:
        quantized: (..., D) int8, or (..., D/2) uint8 with element 2i in the low nibble and 2i+1 in the high
            one.
        scale: (..., D/quant_group) in ``scale_dtype``.

    Raises:
        ValueError: an unsupported bit, group, dtype or an odd D at 4 bits.

    Source: PMX appendix, KV-cache quantization.
    """
    check_quantization(quant_bit, quant_group, x.shape[-1] if x.ndim else 0, allowed=tuple(PACKINGS))
    if x.dtype not in FLOAT_DTYPES:
        raise ValueError(f"x has dtype {x.dtype}; quantize takes float32, float16 or bfloat16")
    grouped = mx.unflatten(x, -1, (-1, quant_group))  # (..., D) -> (..., D/G, G)
    top = 2 ** (quant_bit - 1) - 1
    # Constants in x's dtype, so that nothing is promoted.
    scale = mx.maximum(
        mx.abs(grouped).max(axis=-1, keepdims=True) / mx.array(top, x.dtype), mx.array(MIN_SCALE, x.dtype)
    )
    quantized = mx.round(grouped / scale)
    if x.dtype != mx.float32:  # in float32 the largest quotient is within an ulp of top and rounds to it
        quantized = mx.clip(quantized, -top, top)
    return PACKINGS[quant_bit].pack(quantized), scale.squeeze(-1).astype(scale_dtype or x.dtype)


def quantize_fitted(x: mx.array, quant_group: int, scale_dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Quantize to 4 bits with all 16 values and least-squares scales; an extension of PMX.

    PMX does not use -8. Here the value of the largest magnitude becomes -8, so a scale may be negative. The
    stored scale ``sum(x q) / sum(q^2)`` then minimizes the squared error. Readers need no change. All
    arithmetic is in float32.

    Args:
        x: (..., D) floats; ``quant_group`` divides D.

    Returns:
        the same as :func:`quantize` at 4 bits.
    """
    grouped = mx.unflatten(x.astype(mx.float32), -1, (-1, quant_group))  # (..., D) -> (..., D/G, G)
    high = grouped.max(axis=-1, keepdims=True)
    low = grouped.min(axis=-1, keepdims=True)
    first = mx.where(high > -low, high, low) * -0.125 + TINY
    quotient = grouped / first
    quantized = mx.minimum(mx.round(quotient), 7.0)
    products, squares = ((quantized * y).sum(axis=-1, keepdims=True) for y in (quotient, quantized))
    scale = first * (products / mx.maximum(squares, 1.0))
    return PACKINGS[FITTED_BITS].pack(quantized), scale.squeeze(-1).astype(scale_dtype)


def dequantize(
    quantized: mx.array,
    scale: mx.array,
    *,
    quant_bit: int = 8,
    quant_group: int = 8,
    dtype: mx.Dtype = mx.float32,
) -> mx.array:
    """Multiply quantized values by their scale, in the scale's dtype, then cast to ``dtype``.

    Args:
        quantized: (..., D) int8, or (..., D/2) uint8 packed nibbles at 4 bits.
        scale: (..., D/quant_group) float32 or float16.
        quant_bit: 8 or 4.
        quant_group: elements that share one scale.
        dtype: dtype of the result.

    Returns:
        (..., D) in ``dtype``. A product past the scale dtype's range is infinite, that is from 65,520 on with
        float16 scales.

    Raises:
        ValueError: the scale's shape does not fit, or a bit, group or dtype is unsupported.

    Source: PMX appendix, KV-cache quantization.
    """
    row = quantized.shape[-1] if quantized.ndim else 0
    head_dim = row * 8 // quant_bit if quant_bit in PACKINGS else row
    check_quantization(quant_bit, quant_group, head_dim, allowed=tuple(PACKINGS))
    if quantized.dtype != quantized_dtype(quant_bit):
        raise ValueError(
            f"quantized has dtype {quantized.dtype}; quant_bit {quant_bit} needs {quantized_dtype(quant_bit)}"
        )
    expected = (*quantized.shape[:-1], head_dim // quant_group)
    if scale.shape != expected:
        raise ValueError(f"scale has shape {scale.shape}; quantized {quantized.shape} needs {expected}")
    return multiply_scale(quantized, scale, quant_bit, product_dtype=scale.dtype).astype(dtype)


def multiply_scale(quantized: mx.array, scale: mx.array, quant_bit: int, product_dtype: mx.Dtype) -> mx.array:
    """Multiply quantized values by their scale, rounded to ``product_dtype``. Unchecked.

    PMX's operators pass the scale's dtype. The engine's caches pass float32 on a CPU: with float16 scales
    that skips one rounding, and float16 arithmetic takes ten times as long there. On a GPU they also pass the
    scale's dtype in half precision. (A product in bfloat16 would round the scale: attention's error at 8 bits
    was 1.12 to 1.19 times as large.)
    """
    quantized = PACKINGS[quant_bit].unpack(quantized)
    # The product of a quantized value and a float16 scale is exact in float32 (8 + 11 bits), so rounding it
    # to float16 gives the same as a product in float16.
    dtype = mx.float32 if mx.default_device().type == mx.cpu else product_dtype
    grouped = mx.unflatten(quantized, -1, (scale.shape[-1], -1)).astype(dtype)  # (..., D) -> (..., D/G, G)
    product = grouped * scale.astype(dtype)[..., None]
    return product.flatten(-2).astype(product_dtype)


def check_quantization(
    quant_bit: int,
    quant_group: int,
    head_dim: int,
    allowed: tuple[int, ...] = QUANT_BITS,
    names: tuple[str, str] = ("quant_bit", "quant_group"),
) -> None:
    """Raise a ValueError unless the bit is allowed and, above 0 bits, the group divides ``head_dim``."""
    bit, group = names
    if type(quant_bit) is not int or quant_bit not in allowed:
        raise ValueError(f"{bit} is {quant_bit!r}; expected one of {', '.join(map(str, allowed))}")
    if quant_bit == 0:
        return
    if isinstance(quant_group, bool) or not isinstance(quant_group, int) or quant_group < 1:
        raise ValueError(f"{group} is {quant_group!r}; expected a positive int")
    if head_dim < 1 or head_dim % quant_group:
        fitting = ", ".join(
            str(size) for size in range(1, min(head_dim, MAX_GROUP) + 1) if head_dim % size == 0
        )
        expected = f"; expected one of {fitting}" if fitting else ""
        raise ValueError(f"{group} {quant_group} does not divide the head dimension {head_dim}{expected}")
    unit = PACKINGS[quant_bit].unit
    if head_dim % unit:
        problem = "odd" if unit == 2 else f"no multiple of {unit}"
        raise ValueError(
            f"head dimension {head_dim} is {problem}; {quant_bit} bits pack {unit} values together"
        )


def quantized_dtype(quant_bit: int, value_bit: int = 0) -> mx.Dtype:
    """Return the dtype of stored values: int8, or uint8 for packed nibbles and for rows of both kinds."""
    dtypes = {PACKINGS[bits].dtype for bits in (quant_bit, value_bit) if bits}
    return dtypes.pop() if len(dtypes) == 1 else mx.uint8

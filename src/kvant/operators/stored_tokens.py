"""How tokens are stored: keys and values as a cache's arrays have them, and back."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvant.operators.kernels.attend import quantize_tokens, value_dim_of
from kvant.operators.kernels.launch import Backend
from kvant.operators.quantization import FITTED_BITS, multiply_scale, quantize, quantize_fitted


def stored_tokens(
    key: mx.array,
    value: mx.array,
    arrays: Sequence[mx.array],
    *,
    quant_bit: int,
    quant_group: int,
    value_bit: int = 0,
    backend: Backend | None = None,
    unbatched: bool = False,
    fit: bool = False,
) -> list[mx.array]:
    """Keys and values (B, K, S, D) as a cache and its scale, if there is one, store them: (B, 2, K, S, last)
    each.

    Keys and values of different widths or bits lie side by side: (B, 1, K, S, last).

    Args:
        value_bit: of values; 0: as of keys.
        arrays: the cache, and its scale if there is one. The results have their dtypes.
        unbatched: B is 1, and the results have no axis for it.
        backend: where one launch quantizes both; None: MLX operations do.
        fit: 4 bits are those of :func:`kvant.operators.quantization.quantize_fitted`.
    """
    B, K, S, D = key.shape
    if quant_bit and backend is not None:
        options: dict[str, Any] = {"quant_bit": quant_bit, "quant_group": quant_group, "value_bit": value_bit}
        words, scales = quantize_tokens(
            key, value, **options, scale_dtype=arrays[1].dtype, backend=backend, fit=fit
        )
        axes = (0, 1) if unbatched else 0
        return [mx.view(words.squeeze(axes), arrays[0].dtype), scales.squeeze(axes)]  # [0] would be a gather

    def quantized(x: mx.array, bits: int) -> tuple[mx.array, mx.array]:
        if fit and bits == FITTED_BITS:
            return quantize_fitted(x, quant_group, arrays[1].dtype)
        return quantize(x, quant_bit=bits, quant_group=quant_group, scale_dtype=arrays[1].dtype)

    if value_bit not in (0, quant_bit):
        sides = zip(quantized(key, quant_bit), quantized(value, value_bit), arrays, strict=True)
        joined = [mx.concatenate([mx.view(x, own.dtype) for x in parts], axis=-1) for *parts, own in sides]
        return joined if unbatched else [x[:, None] for x in joined]
    if value.shape[3] == D:
        both = mx.concatenate([key, value], axis=1).reshape(*([] if unbatched else [B]), 2, K, S, D)
    else:
        both = mx.concatenate([key, value], axis=-1)
        both = both if unbatched else both[:, None]
    if quant_bit:
        return list(quantized(both, quant_bit))
    return [both.astype(arrays[0].dtype)]


def fitted_tokens(
    key: mx.array, value: mx.array, arrays: Sequence[mx.array], **options: Any
) -> list[mx.array]:
    """:func:`stored_tokens` as the engine's caches have them: PMX's at 8 bits, and at 4 bits nearer than
    PMX's.
    """
    fit = FITTED_BITS in (options["quant_bit"], options.get("value_bit"))
    return stored_tokens(key, value, arrays, **options, fit=fit)


def float_tokens(
    stored: Sequence[mx.array], *, key_dim: int | None = None, **form: Any
) -> tuple[mx.array, mx.array]:
    """The reverse of :func:`stored_tokens`, with B or without it: keys and values (B, K, S, D) in ``dtype``.

    ``form``: of :func:`float_rows`.
    """
    return keys_and_values(float_rows(stored, key_dim=key_dim, **form), key_dim)


def float_rows(
    stored: Sequence[mx.array],
    *,
    quant_bit: int,
    value_bit: int = 0,
    dtype: mx.Dtype,
    product_dtype: mx.Dtype | None = None,
    key_dim: int | None = None,
) -> list[mx.array]:
    """Return stored tokens as floats, in the arrangement in which they are stored: one array (..., 2, K, S,
    D), or (..., 1, K, S, D + Dv). Keys and values of different bits are two arrays (..., 1, K, S, D).

    ``product_dtype`` is the dtype of a quantized value times its scale. PMX's is the scale's. None: float32,
    but the scale's on a GPU for half precision, so that no array of float32 is made. ``key_dim`` is the width
    of keys that lie side by side with values.
    """
    if product_dtype is None:
        wide = dtype == mx.float32 or mx.default_device().type == mx.cpu
        product_dtype = mx.float32 if wide or not quant_bit else stored[1].dtype

    def floats(own: Sequence[mx.array], bits: int) -> mx.array:
        return (multiply_scale(own[0], own[1], bits, product_dtype) if bits else own[0]).astype(dtype)

    if value_bit not in (0, quant_bit):
        assert key_dim is not None
        width = key_dim + value_dim_of(stored[0], key_dim, quant_bit, value_bit)
        # of a key in a row, and of its scales
        ends = key_dim * quant_bit // 8, stored[1].shape[-1] * key_dim // width
        keys = floats([array[..., :end] for array, end in zip(stored, ends, strict=True)], quant_bit)
        values = floats([array[..., end:] for array, end in zip(stored, ends, strict=True)], value_bit)
        return [keys, values]
    return [floats(stored, quant_bit)]


def keys_and_values(rows: Sequence[mx.array], key_dim: int | None) -> tuple[mx.array, mx.array]:
    """Return the keys and values (B, K, S, D) in what :func:`float_rows` returns."""
    if len(rows) == 2:
        keys, values = rows
    else:
        (both,) = rows
        if both.shape[-4] == 2:
            return (both[:1], both[1:]) if both.ndim == 4 else (both[:, 0], both[:, 1])
        keys, values = both[..., :key_dim], both[..., key_dim:]
    return (keys, values) if keys.ndim == 4 else (keys[:, 0], values[:, 0])

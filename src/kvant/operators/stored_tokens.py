"""Conversion of keys and values to a cache's stored form, and back."""

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
    """Convert keys and values (B, K, S, D) to the form of a cache and its scale: (B, 2, K, S, last) each.

    Keys and values of different widths or bits share a row instead: (B, 1, K, S, last).

    Args:
        value_bit: bits of values; 0 means those of keys.
        arrays: the cache and, if quantized, its scale. The results have their dtypes.
        unbatched: B is 1, and the results lack its axis.
        backend: where one launch quantizes keys and values; None: use MLX operations.
        fit: at 4 bits use :func:`kvant.operators.quantization.quantize_fitted`.
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
        joined = [mx.concatenate([mx.view(x, like.dtype) for x in parts], axis=-1) for *parts, like in sides]
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
    """Return :func:`stored_tokens` for the engine's caches: PMX's at 8 bits, fitted at 4 bits."""
    fit = FITTED_BITS in (options["quant_bit"], options.get("value_bit"))
    return stored_tokens(key, value, arrays, **options, fit=fit)


def float_tokens(
    stored: Sequence[mx.array], *, key_dim: int | None = None, **form: Any
) -> tuple[mx.array, mx.array]:
    """Reverse :func:`stored_tokens`: return keys and values (B, K, S, D) in ``dtype``; B may be missing.

    ``form``: arguments of :func:`float_rows`.
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
    """Dequantize stored tokens to (..., 2, K, S, D), or (..., 1, K, S, D + Dv) if keys and values share rows.

    Keys and values of different bits become two arrays (..., 1, K, S, D).

    Args:
        product_dtype: dtype of a quantized value times its scale; PMX uses the scale's. None: float32, or on
            a GPU in half precision the scale's, to avoid float32 arrays.
        key_dim: the width of keys that share rows with values.
    """
    if product_dtype is None:
        wide = dtype == mx.float32 or mx.default_device().type == mx.cpu
        product_dtype = mx.float32 if wide or not quant_bit else stored[1].dtype

    def floats(rows: Sequence[mx.array], bits: int) -> mx.array:
        return (multiply_scale(rows[0], rows[1], bits, product_dtype) if bits else rows[0]).astype(dtype)

    if value_bit not in (0, quant_bit):
        assert key_dim is not None
        width = key_dim + value_dim_of(stored[0], key_dim, quant_bit, value_bit)
        # the ends of a row's key and of its scales
        ends = key_dim * quant_bit // 8, stored[1].shape[-1] * key_dim // width
        keys = floats([array[..., :end] for array, end in zip(stored, ends, strict=True)], quant_bit)
        values = floats([array[..., end:] for array, end in zip(stored, ends, strict=True)], value_bit)
        return [keys, values]
    return [floats(stored, quant_bit)]


def keys_and_values(rows: Sequence[mx.array], key_dim: int | None) -> tuple[mx.array, mx.array]:
    """Split the result of :func:`float_rows` into keys and values (B, K, S, D)."""
    if len(rows) == 2:
        keys, values = rows
    else:
        (both,) = rows
        if both.shape[-4] == 2:
            return (both[:1], both[1:]) if both.ndim == 4 else (both[:, 0], both[:, 1])
        keys = both[..., :key_dim]
        values = both[..., key_dim:]
    return (keys, values) if keys.ndim == 4 else (keys[:, 0], values[:, 0])

"""How tokens are stored: keys and values as a cache's arrays have them, and back."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvant.operators.kernels.attend import quantize_tokens
from kvant.operators.kernels.launch import Backend
from kvant.operators.quantization import FITTED_BITS, multiply_scale, quantize, quantize_fitted


def stored_tokens(
    key: mx.array,
    value: mx.array,
    arrays: Sequence[mx.array],
    *,
    quant_bit: int,
    quant_group: int,
    backend: Backend | None = None,
    alone: bool = False,
    fit: bool = False,
) -> list[mx.array]:
    """Keys and values (B, K, S, D) as a cache and its scale, if there is one, store them: (B, 2, K, S, last) each.

    Keys and values of different widths lie side by side: (B, 1, K, S, last).

    Args:
        arrays: the cache, and its scale if there is one. The results have their dtypes.
        alone: B is 1, and the results have no axis for it.
        backend: where one launch quantizes both; None: MLX operations do.
        fit: 4 bits are those of :func:`kvant.operators.quantization.quantize_fitted`.
    """
    B, K, S, D = key.shape
    if quant_bit and backend is not None:
        options: dict[str, Any] = {"quant_bit": quant_bit, "quant_group": quant_group, "backend": backend, "fit": fit}
        words, scales = quantize_tokens(key, value, **options, scale_dtype=arrays[1].dtype)
        axes = (0, 1) if alone else 0
        return [mx.view(words.squeeze(axes), arrays[0].dtype), scales.squeeze(axes)]  # [0] would be a gather
    if value.shape[3] == D:
        both = mx.concatenate([key, value], axis=1).reshape(*([] if alone else [B]), 2, K, S, D)
    else:
        both = mx.concatenate([key, value], axis=-1)
        both = both if alone else both[:, None]
    if not quant_bit:
        return [both.astype(arrays[0].dtype)]
    if fit:
        return list(quantize_fitted(both, quant_group, arrays[1].dtype))
    return list(quantize(both, quant_bit=quant_bit, quant_group=quant_group, scale_dtype=arrays[1].dtype))


def fitted_tokens(key: mx.array, value: mx.array, arrays: Sequence[mx.array], **options: Any) -> list[mx.array]:
    """:func:`stored_tokens` as the engine's caches have them: PMX's at 8 bits, and at 4 bits nearer than PMX's."""
    return stored_tokens(key, value, arrays, **options, fit=options["quant_bit"] == FITTED_BITS)


def float_tokens(
    stored: Sequence[mx.array],
    *,
    quant_bit: int,
    dtype: mx.Dtype,
    product_dtype: mx.Dtype | None = None,
    key_dim: int | None = None,
) -> tuple[mx.array, mx.array]:
    """The reverse of :func:`stored_tokens`, with B or without it: keys and values (B, K, S, D) in ``dtype``.

    ``product_dtype`` is the dtype of a quantized value times its scale. PMX's is the scale's. None: float32, but the
    scale's on a GPU for half precision, so that no array of float32 is made. ``key_dim`` is the width of keys that lie
    side by side with values of another width.
    """
    if product_dtype is None:
        wide = dtype == mx.float32 or mx.default_device().type == mx.cpu
        product_dtype = mx.float32 if wide or not quant_bit else stored[1].dtype
    both = multiply_scale(stored[0], stored[1], quant_bit, product_dtype) if quant_bit else stored[0]
    both = both.astype(dtype)
    if both.ndim == 4:
        return (both[:1], both[1:]) if both.shape[0] == 2 else (both[..., :key_dim], both[..., key_dim:])
    if both.shape[1] == 2:
        return both[:, 0], both[:, 1]
    return both[:, 0, :, :, :key_dim], both[:, 0, :, :, key_dim:]

"""Attention through a cache, unchecked: append new tokens, then attend to every token so far.

The engine's caches call it. A cache is (1, B, 2, K, MaxS, D'), keys at index 0 of the axis of 2; its scale is
(1, B, 2, K, MaxS, D/G), or None at 0 bits. That is PMX's cache_layout 1 with one layer.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvant.operators.attention import attend_tokens
from kvant.operators.bias_split import BiasSplit
from kvant.operators.fused_attention import attend_fused
from kvant.operators.kernels.attend import quantize_tokens
from kvant.operators.kernels.launch import Backend
from kvant.operators.quantization import multiply_scale, quantize


def append_and_attend(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    start: int,
    cache: mx.array,
    scale: mx.array | None,
    *,
    mask: mx.array | None = None,
    is_alibi: bool = False,
    quant_bit: int,
    quant_group: int,
    bias_split: BiasSplit | None = None,
    sinks: mx.array | None = None,
    backend: Backend | None = None,
) -> mx.array:
    """Causal attention of S new tokens to the cache they are appended to. Changes ``cache`` and ``scale``.

    Args:
        query: (B, H, S, D).
        key, value: (B, K, S, D).
        start: tokens already cached.
        mask: as :func:`kvant.operators.attention.attend_tokens` takes it.
        sinks: as ``attend_tokens`` takes them.
        backend: where the fused kernel runs. It must support the call
            (:func:`kvant.operators.kernels.attend.unsupported_reason`). None: the unfused operator.

    Returns:
        (B, H, S, D) in the query's dtype.
    """
    options: dict[str, Any] = {"is_alibi": is_alibi, "mask": mask, "bias_split": bias_split, "sinks": sinks}
    write_tokens(key, value, start, cache, scale, quant_bit=quant_bit, quant_group=quant_group, backend=backend)
    S = key.shape[2]
    if backend is not None:
        return attend_fused(
            query,
            cache,
            scale,
            mx.array(start, mx.int32),
            quant_bit=quant_bit,
            quant_group=quant_group,
            rows=start + S,
            backend=backend,
            **options,
        )
    if S == 1 and scale is not None:
        stored = [first_rows(cache, start + S), scale[0, :, :, :, : start + S]]
        return attend_tokens(query, *float_tokens(stored, quant_bit=quant_bit, dtype=query.dtype), **options)
    tokens = read_tokens(start + S, cache, scale, quant_bit=quant_bit, dtype=query.dtype)
    return attend_tokens(query, *tokens, **options)


def write_tokens(
    key: mx.array,
    value: mx.array,
    start: int,
    cache: mx.array,
    scale: mx.array | None,
    *,
    quant_bit: int,
    quant_group: int,
    backend: Backend | None = None,
) -> None:
    """Quantize keys and values (B, K, S, D) and write them in place at ``start``."""
    stored = [cache] if scale is None else [cache, scale]
    new = stored_tokens(key, value, stored, quant_bit=quant_bit, quant_group=quant_group, backend=backend)
    for array, part in zip(stored, new, strict=True):
        array[0, :, :, :, start : start + key.shape[2]] = part


def read_tokens(
    end: int, cache: mx.array, scale: mx.array | None, *, quant_bit: int, dtype: mx.Dtype
) -> tuple[mx.array, mx.array]:
    """Tokens 0 to ``end`` of every sequence as keys and values (B, K, T, D) in ``dtype``."""
    stored = [x[0, :, :, :, :end] for x in (cache, scale) if x is not None]
    return float_tokens(stored, quant_bit=quant_bit, dtype=dtype)


def first_rows(cache: mx.array, rows: int) -> mx.array:
    """The first rows (B, 2, K, rows, D') of every head of quantized values, on a CPU copied to lie side by side.

    MLX converts rows that are apart to float three times as slowly there. The copy, eight bytes at a time, and the
    conversion take two thirds of that (1,500 rows of 8 heads of 64: 225 us; 70 and 76).
    """
    if mx.default_device().type != mx.cpu or cache.shape[-1] % 8:
        return cache[0, :, :, :, :rows]
    words = mx.view(cache, mx.uint64)[0, :, :, :, :rows]
    return mx.view(mx.contiguous(words), cache.dtype)


def stored_tokens(
    key: mx.array,
    value: mx.array,
    arrays: Sequence[mx.array],
    *,
    quant_bit: int,
    quant_group: int,
    backend: Backend | None = None,
) -> list[mx.array]:
    """Keys and values (B, K, S, D) as a cache and its scale, if there is one, store them: (B, 2, K, S, last) each.

    Keys and values of different widths lie side by side: (B, 1, K, S, last).

    Args:
        arrays: the cache, and its scale if there is one. The results have their dtypes.
        backend: where one launch quantizes both; None: MLX operations do.
    """
    B, K, S, D = key.shape
    if quant_bit and backend is not None:
        options: dict[str, Any] = {"quant_bit": quant_bit, "quant_group": quant_group, "backend": backend}
        words, scales = quantize_tokens(key, value, **options, scale_dtype=arrays[1].dtype)
        return [mx.view(words.squeeze(0), arrays[0].dtype), scales.squeeze(0)]  # [0] would be a gather
    if value.shape[3] == D:
        both = mx.concatenate([key, value], axis=1).reshape(B, 2, K, S, D)
    else:
        both = mx.concatenate([key, value], axis=-1)[:, None]
    if not quant_bit:
        return [both.astype(arrays[0].dtype)]
    return list(quantize(both, quant_bit=quant_bit, quant_group=quant_group, scale_dtype=arrays[1].dtype))


def float_tokens(
    stored: Sequence[mx.array],
    *,
    quant_bit: int,
    dtype: mx.Dtype,
    product_dtype: mx.Dtype = mx.float32,
    key_dim: int | None = None,
) -> tuple[mx.array, mx.array]:
    """The reverse of :func:`stored_tokens`: keys and values (B, K, S, D) in ``dtype``.

    ``product_dtype`` is the dtype of a quantized value times its scale. PMX's is the scale's. ``key_dim`` is the width
    of keys that lie side by side with values of another width.
    """
    both = multiply_scale(stored[0], stored[1], quant_bit, product_dtype) if quant_bit else stored[0]
    both = both.astype(dtype)
    if both.shape[1] == 2:
        return both[:, 0], both[:, 1]
    return both[:, 0, :, :, :key_dim], both[:, 0, :, :, key_dim:]

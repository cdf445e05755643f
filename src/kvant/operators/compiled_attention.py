"""Attention of a compiled decode step: operations that are the same for any offset. Unchecked."""

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvant.operators.attention import GPU_FUSED_HEAD_DIMS
from kvant.operators.bias_split import BiasSplit, score_bias, value_bias_of
from kvant.operators.cached_attention import read_tokens, stored_tokens
from kvant.operators.fused_attention import attend_fused
from kvant.operators.kernels.attend import quantize_tokens
from kvant.operators.kernels.launch import Backend


def append_and_attend_static(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    offset: mx.array,
    cache: mx.array,
    scale: mx.array | None,
    *,
    tokens: int,
    quant_bit: int,
    quant_group: int,
    bias_split: BiasSplit | None,
    sinks: mx.array | None = None,
    backend: Backend | None = None,
    row: mx.array | None = None,
    live: mx.array | None = None,
    window: int | None = None,
    keep: int = 0,
) -> tuple[mx.array, ...]:
    """``append_and_attend`` as a function of arrays that returns new arrays.

    Its operations and shapes do not depend on ``offset``, so it can be part of a compiled step. MLX still writes in
    place if nothing else holds the old arrays. Nothing checks that the new tokens have room in the cache.

    Args:
        query: (B, H, S, D).
        key, value: (B, K, S, D).
        offset: integer (), the position of the first new token.
        tokens: cached tokens to read, ``offset`` + S at least. The fused kernel reads ``offset`` instead.
        sinks: as :func:`kvant.operators.attention.attend_tokens` takes them.
        row: of a ring, where the new tokens go: as ``offset``, or (1, S).
        live: of a ring, which of the T rows the new tokens see: (1, S, T). The fused kernel finds them by
            ``window`` and ``keep``.
        window, keep: of a ring, the last and the first tokens that a query sees.

    Returns:
        (B, H, S, D) in the query's dtype, the new cache, and the new scale if one was given.
    """
    stored = [cache] if scale is None else [cache, scale]
    row = offset if row is None else row
    updated = append_tokens(key, value, row, stored, quant_bit=quant_bit, quant_group=quant_group, backend=backend)
    cache, scale = updated[0], updated[1] if scale is not None else None
    if backend is not None:
        output = attend_fused(
            query,
            cache,
            scale,
            offset,
            quant_bit=quant_bit,
            quant_group=quant_group,
            window=window,
            keep=keep,
            bias_split=bias_split,
            sinks=sinks,
            backend=backend,
        )
        return output, *updated
    keys, values = read_tokens(tokens, cache, scale, quant_bit=quant_bit, dtype=query.dtype)
    if live is None:
        live = mx.arange(tokens) <= positions(offset, query.shape[2])  # (1, S, T)
    return attend_live_tokens(query, keys, values, live, bias_split=bias_split, sinks=sinks), *updated


def positions(offset: mx.array, new_tokens: int) -> mx.array:
    """Positions (1, S, 1) of S new tokens behind ``offset``, an integer ()."""
    first = offset.reshape(-1, 1, 1)
    return first if new_tokens == 1 else first + mx.arange(new_tokens)[:, None]


def append_tokens(
    key: mx.array,
    value: mx.array,
    row: mx.array,
    arrays: Sequence[mx.array],
    *,
    quant_bit: int,
    quant_group: int,
    backend: Backend | None,
) -> list[mx.array]:
    """A cache, and its scale if there is one, with new tokens from ``row`` on, as new arrays.

    The operations are the same for any row.

    Args:
        key, value: (B, K, S, D). Values may have a width of their own.
        row: as ``put_tokens`` takes it.
    """
    options: dict[str, Any] = {"quant_bit": quant_bit, "quant_group": quant_group}
    if quant_bit and backend is not None:  # words are put as they are: a GPU writes bytes more slowly
        new = quantize_tokens(key, value, **options, scale_dtype=arrays[1].dtype, backend=backend)
    else:
        new = [part[None] for part in stored_tokens(key, value, arrays, **options)]
    return put_tokens(arrays, new, row)


def put_tokens(arrays: Sequence[mx.array], tokens: Sequence[mx.array], row: mx.array) -> list[mx.array]:
    """A cache and its scale with S new tokens from ``row`` on, in operations that are the same for any row.

    On a GPU that is one launch each. MLX writes in place if nothing else holds an array. It does not check the row.

    Args:
        arrays: (1, B, 2, K, rows, last) each.
        tokens: (1, B, 2, K, S, last) each, in the array's dtype or in words of its bytes.
        row: integer (); or (1, S), of every token.
    """
    S = tokens[0].shape[4]
    stored = [mx.view(array, part.dtype) for array, part in zip(arrays, tokens, strict=True)]
    if row.size == 1 and mx.default_device().type == mx.cpu:
        # There it takes 0.7 of the time. On a GPU it is two launches: the first finds the place in memory.
        place = row.reshape(1)
        updated = [mx.slice_update(array, part, place, axes=(4,)) for array, part in zip(stored, tokens, strict=True)]
    else:
        place = row.reshape(1, 1, 1, 1, -1, 1)
        if S > 1 and row.ndim < 2:
            place = place + mx.arange(S)[:, None]
        updated = [mx.put_along_axis(array, place, part, axis=4) for array, part in zip(stored, tokens, strict=True)]
    return [mx.view(new, array.dtype) for new, array in zip(updated, arrays, strict=True)]


def attend_live_tokens(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    live: mx.array,
    *,
    bias_split: BiasSplit | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of S queries, each over its live ones of T tokens. The operations do not depend on which are live.

    Unchecked.

    Args:
        query: (B, H, S, D).
        key, value: (B, K, T, D). Tokens that are live for no query have no effect, even if they hold NaN.
        live: boolean, (B or 1, S, T), with at least one True for each query.
        bias_split, sinks: as in :func:`attend_tokens`.

    Returns:
        (B, H, S, D) in the query's dtype.
    """
    (S, D), T = query.shape[2:], key.shape[2]
    dtype = query.dtype
    if bias_split is not None or D not in GPU_FUSED_HEAD_DIMS:  # as in attend_tokens
        query, key, value = (x.astype(mx.float32) for x in (query, key, value))
    mask = live[:, None]  # (B or 1, 1, S, T)
    read = mask if S == 1 else mask.any(axis=2, keepdims=True)
    key, value = (mx.where(read.swapaxes(2, 3), x, mx.zeros_like(x)) for x in (key, value))
    if bias_split is not None and bias_split.pairs:
        mask = mx.where(mask, score_bias(query, bias_split, T), -math.inf)
    if sinks is not None:
        sinks = sinks.astype(query.dtype)
        if bias_split is not None:  # as in attend_tokens
            value = value + bias_split.value_bias[:, None]
    output = mx.fast.scaled_dot_product_attention(query, key, value, scale=1 / math.sqrt(D), mask=mask, sinks=sinks)
    if bias_split is not None and sinks is None:
        output = output + value_bias_of(bias_split, query.shape[1])
    return output.astype(dtype)

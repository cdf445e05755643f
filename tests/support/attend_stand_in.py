"""What the fused kernel's two launches compute, in MLX's operations: these can be part of a compiled step.

MLX makes no graph with a Metal kernel where there is no Metal. B batch, S new tokens, R rows, H query heads, K kv
heads.
"""

import math
from typing import Any

import mlx.core as mx

from kvant.operators.cached_attention import float_tokens
from kvant.operators.kernels.attend import PAGE_SIZE


def attend(
    query: mx.array,
    cache: mx.array,
    scale: mx.array | None,
    offset: mx.array,
    *,
    quant_bit: int,
    quant_group: int,
    value_dim: int | None = None,
    is_causal: bool = True,
    score_scale: float | None = None,
    mask: mx.array | None = None,
    sinks: mx.array | None = None,
    window: int | None = None,
    keep: int = 0,
    pages: mx.array | None = None,
    first: mx.array | None = None,
    rows: int | None = None,
    key_bias: mx.array | None = None,
    pairs: tuple[int, ...] = (),
    rotation: mx.array | None = None,
    value_bias: mx.array | None = None,
    backend: str,
    **others: Any,
) -> mx.array:
    """As :func:`kvant.operators.kernels.attend.attend`, without ALiBi and softcap; of pages without masks too."""
    assert not any(value is not None and value != () and value != 0.0 for value in others.values()), others
    if pages is not None:
        assert first is not None
        assert (is_causal, mask, keep) == (True, None, 0)
        given: dict[str, Any] = {
            "quant_bit": quant_bit,
            "quant_group": quant_group,
            "value_dim": value_dim,
            "score_scale": score_scale,
            "sinks": sinks,
            "window": window,
            "key_bias": key_bias,
            "pairs": pairs,
            "value_bias": value_bias,
            "backend": backend,
        }
        return _attend_pages(query, cache, scale, offset, pages, first, rows, rotation, given)
    B, H, S, D = query.shape
    R = cache.shape[4] if rows is None else rows
    stored = [array[0, :B, :, :, :R] for array in (cache, scale) if array is not None]
    key, value = float_tokens(stored, quant_bit=quant_bit, dtype=mx.float32, key_dim=D)
    K, width = key.shape[1], value.shape[3]
    assert width == (value_dim or D)
    start = mx.broadcast_to(offset.reshape(-1), (B,))[:, None, None, None]
    ring = cache.shape[4] - keep
    row, last = mx.arange(R), start + S - 1
    position = mx.where(row < keep, row, last - (last - row) % ring)  # (B, 1, 1, R)
    position = mx.where((row >= keep) & (position < keep), -1, position)
    place = start + mx.arange(S)[:, None]  # (B, 1, S, 1)
    seen = (position >= 0) & (position <= (place if is_causal else last))
    if window is not None:
        seen = seen & ((position > place - window) | (position < keep))
    live = seen.any(axis=2).reshape(B, 1, R, 1)
    key, value = (mx.where(live, x, 0.0) for x in (key, value))
    query_rows = query.astype(mx.float32).reshape(B, K, H // K, S, D)
    scores = (query_rows @ key[:, :, None].swapaxes(-1, -2)).reshape(B, H, S, R)
    if pairs:
        assert key_bias is not None
        assert rotation is not None
        halves = mx.take(query_rows.reshape(B, K, H // K, S, 2, D // 2), mx.array(pairs), axis=-1)
        q1, q2 = halves[..., 0, :], halves[..., 1, :]
        b1, b2 = (key_bias[:, i, None, None] for i in (0, 1))
        weights = mx.concatenate([q1 * b1 + q2 * b2, q2 * b1 - q1 * b2], axis=-1).reshape(B, H, S, -1)
        table = rotation[..., :R].reshape(-1, 1, 2 * len(pairs), R)
        scores = scores + weights @ table
    scores = scores * (1 / math.sqrt(D) if score_scale is None else score_scale)
    if mask is not None:
        own = mask.reshape(*[1] * (4 - mask.ndim), *mask.shape)
        scores = mx.where(own, scores, -mx.inf) if own.dtype == mx.bool_ else scores + own
    scores = mx.where(seen, scores, -mx.inf)
    top = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(mx.float32).reshape(1, H, 1, 1)
        top = mx.maximum(top, sink)
    top = mx.where(top == -mx.inf, 0.0, top)
    parts = mx.exp(scores - top)
    total = parts.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + mx.exp(sink - top)
    shares = parts / mx.where(total == 0, 1.0, total)
    output = (shares.reshape(B, K, H // K, S, R) @ value[:, :, None]).reshape(B, H, S, width)
    if value_bias is not None:
        output = output + mx.repeat(value_bias, H // K, axis=0)[:, None] * shares.sum(axis=-1, keepdims=True)
    return output.astype(query.dtype)


def _attend_pages(
    query: mx.array,
    cache: mx.array,
    scale: mx.array | None,
    offset: mx.array,
    pages: mx.array,
    first: mx.array,
    rows: int | None,
    rotation: mx.array | None,
    given: dict[str, Any],
) -> mx.array:
    """Each sequence alone: only its own rows are read, and its numbers do not depend on the others."""
    B, _, S, _ = query.shape
    assert len(pages) == B
    assert offset.shape == first.shape == (max(8, B),)
    assert pages.shape[1] >= 8
    assert pages.dtype == first.dtype == offset.dtype == mx.int32
    starts, lengths = first.tolist()[:B], offset.tolist()[:B]
    counts = [length + S - start for length, start in zip(lengths, starts, strict=True)]
    assert rows in (None, max(counts))
    outputs = []
    for b, (start, count, table) in enumerate(zip(starts, counts, pages.tolist(), strict=True)):
        index = mx.array([table[row // PAGE_SIZE] * PAGE_SIZE + row % PAGE_SIZE for row in range(count)])
        own, own_scale = (None if array is None else array[:, :, index][None, None] for array in (cache, scale))
        assert own is not None
        turned = None if rotation is None else rotation[..., start : start + count]
        # Places count from the first row: windows and causality are differences.
        outputs.append(attend(query[b : b + 1], own, own_scale, mx.array(count - S), rotation=turned, **given))
    return mx.concatenate(outputs)

"""What the fused kernel's two launches compute, in MLX's operations.

B batch, S new tokens, R rows, H query heads, K kv heads, P rotary pairs.
"""

import math
from typing import Any

import mlx.core as mx

from kvant.operators.stored_tokens import float_tokens
from kvant.operators.kernels.attend import PAGE_SIZE


def attend(
    query: mx.array,
    cache: mx.array,
    scale: mx.array | None,
    offset: mx.array,
    *,
    pages: mx.array | None = None,
    first: mx.array | None = None,
    rows: int | None = None,
    rotation: mx.array | None = None,
    **options: Any,
) -> mx.array:
    """As :func:`kvant.operators.kernels.attend.attend`, without ALiBi and softcap; of pages without masks too.

    Of pages each sequence alone: only its own rows are read, and its numbers do not depend on the others.
    """
    if pages is None:
        return _attend_rows(query, cache, scale, offset, rows=rows, rotation=rotation, **options)
    B, _, S, _ = query.shape
    assert first is not None
    assert (options.get("is_causal", True), options.get("mask"), options.get("keep", 0)) == (True, None, 0)
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
        turned = None if rotation is None else rotation[..., start : start + count]
        # Places count from the first row: windows and causality are differences.
        outputs.append(
            _attend_rows(query[b : b + 1], own, own_scale, mx.array(count - S), rows=None, rotation=turned, **options)
        )
    return mx.concatenate(outputs)


def _attend_rows(
    query: mx.array,
    cache: mx.array,
    scale: mx.array | None,
    offset: mx.array,
    *,
    rows: int | None,
    rotation: mx.array | None,
    quant_bit: int,
    quant_group: int,
    value_dim: int | None = None,
    is_causal: bool = True,
    score_scale: float | None = None,
    mask: mx.array | None = None,
    sinks: mx.array | None = None,
    window: int | None = None,
    keep: int = 0,
    key_bias: mx.array | None = None,
    pairs: tuple[int, ...] = (),
    value_bias: mx.array | None = None,
    backend: str,
    **others: Any,
) -> mx.array:
    assert not any(value is not None and value != () and value != 0.0 for value in others.values()), others
    B, _, S, D = query.shape
    R = cache.shape[4] if rows is None else rows
    stored = [array[0, :B, :, :, :R] for array in (cache, scale) if array is not None]
    key, value = float_tokens(stored, quant_bit=quant_bit, dtype=mx.float32, key_dim=D)
    assert value.shape[3] == (value_dim or D)
    start = mx.broadcast_to(offset.reshape(-1), (B,))[:, None, None, None]
    ring = cache.shape[4] - keep
    row, last = mx.arange(R), start + S - 1
    position = mx.where(row < keep, row, last - (last - row) % ring)  # (B, 1, 1, R)
    position = mx.where((row >= keep) & (position < keep), -1, position)
    place = start + mx.arange(S)[:, None]  # (B, 1, S, 1)
    seen = (position >= 0) & (position <= (place if is_causal else last))
    if window is not None:
        seen = seen & ((position > place - window) | (position < keep))
    if pairs:
        assert key_bias is not None
        assert rotation is not None
        # (B or 1, 2, P, R) -> (2, B or 1, 1, R, P)
        cosine, sine = rotation[..., :R].reshape(-1, 2, len(pairs), R).transpose(1, 0, 3, 2)[:, :, None]
        b1, b2 = key_bias[:, 0, None], key_bias[:, 1, None]
        key = key.at[..., mx.array(pairs)].add(b1 * cosine - b2 * sine)
        key = key.at[..., mx.array(pairs) + D // 2].add(b1 * sine + b2 * cosine)
    if value_bias is not None:
        value = value + value_bias[:, None]
    live = seen.any(axis=2).reshape(B, 1, R, 1)
    key, value = (mx.where(live, x, 0.0) for x in (key, value))
    added = mx.where(seen, 0.0, -mx.inf)
    if mask is not None:
        own = mask.reshape(*[1] * (4 - mask.ndim), *mask.shape)
        own = mx.where(own, 0.0, -mx.inf) if own.dtype == mx.bool_ else own
        added = mx.where(seen, own, -mx.inf)
    output = mx.fast.scaled_dot_product_attention(
        query.astype(mx.float32),
        key,
        value,
        scale=1 / math.sqrt(D) if score_scale is None else score_scale,
        mask=added,
        sinks=None if sinks is None else sinks.astype(mx.float32),
    )
    sees = (added > -mx.inf).any(axis=-1, keepdims=True)
    return mx.where(sees, output, 0.0).astype(query.dtype)

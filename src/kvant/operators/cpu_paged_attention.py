"""Attention to paged rows on a CPU. Unchecked.

Many new tokens use every core; a few new tokens get the same bits as one by one.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from kvant.operators.attention import attend_each
from kvant.operators.bias_split import BiasSplit
from kvant.operators.cpu_attention import attend_singly, queries_at_once
from kvant.operators.exact_attention import attend_each_exactly, attend_few_exactly
from kvant.operators.exact_rows import ExactTail
from kvant.operators.paged_rows import (
    PagedRows,
    float_bytes,
    read_sequences,
    shares,
    tokens_at_once,
)
from kvant.operators.row_runs import cut_runs, stored_rows
from kvant.operators.streams import FEW_ROWS

# attend_long is faster for queries that see at least this many tokens (measured on 2 cores)
LONG_TOKENS = 2048
# attend_tiles is faster for more than a few queries from this many scores on (measured on 2 cores)
TILED_SCORES = 1 << 20


def attend_rows_on_cpu(
    query: mx.array,
    arrays: Sequence[mx.array],
    rows: PagedRows,
    *,
    quant_bit: int,
    value_bit: int,
    mask: mx.array | None,
    waiting: Sequence[mx.array],
    bias_split: BiasSplit | None,
    sinks: mx.array | None,
    exact: ExactTail | None = None,
) -> mx.array:
    """Compute :func:`kvant.operators.paged_attention.attend_rows` without padding."""
    _, H, S, D = query.shape
    few = S <= FEW_ROWS
    bits: dict[str, Any] = {"quant_bit": quant_bit, "value_bit": value_bit}
    options: dict[str, Any] = bits | {"bias_split": bias_split, "sinks": sinks}
    counts = rows.counts
    size = tokens_at_once(float_bytes(arrays[0], D, quant_bit, value_bit), S, quant_bit)
    long = LONG_TOKENS if few else min(-(-TILED_SCORES // (H * S)), size + 1)
    outputs: list[mx.array] = []
    for share in shares(counts, size, long):
        count = counts[share.start]
        share_rows = rows.only(share)
        tail = exact and exact.only(share)
        if few and mask is None and not waiting and min(count, rows.window or count) >= LONG_TOKENS:
            outputs.append(_attend_few_to_many(query[share], arrays, share_rows, **options, exact=tail))
            continue
        if not few and mask is None and count + (S if waiting else 0) >= long:
            outputs.append(_attend_many(query[share], arrays, share_rows, waiting, **options, exact=tail))
            continue
        # Without this dependency MLX reads the tokens of every share before it uses the first.
        readable = mx.depends(arrays, outputs[-1:]) if outputs else arrays
        if tail is None:
            outputs.append(
                _attend_together(query[share], readable, share_rows, **options, mask=mask, waiting=waiting)
            )
        elif few and mask is None and not waiting:
            outputs.append(attend_few_exactly(query[share], readable, share_rows, tail, **options))
        else:
            in_float32 = few or bias_split is not None
            dtype = mx.float32 if in_float32 else query.dtype
            outputs += attend_each_exactly(
                query[share], readable, share_rows, tail, waiting, **options, mask=mask, dtype=dtype
            )
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def _attend_few_to_many(
    query: mx.array, arrays: Sequence[mx.array], rows: PagedRows, *, exact: ExactTail | None, **options: Any
) -> mx.array:
    """Attend a few queries of one sequence, the last of which sees at least ``LONG_TOKENS``."""
    from kvant.operators.cpu_decode import attend_long  # imports NumPy, which short texts do not need

    S = query.shape[2]
    (count,) = rows.counts
    (runs,) = rows.runs
    visible = [min(count - S + 1 + i, rows.window or count) for i in range(S)]
    fewer = sum(number < LONG_TOKENS for number in visible)
    output = attend_long(
        query[:, :, fewer:], arrays, runs, rows.first[0], rows.window, **options, exact=exact
    )
    if not fewer:
        return output
    before = replace(rows, runs=[cut_runs(runs, 0, count - S + fewer)])
    earlier = exact and replace(exact, rows=exact.rows.before(before.ends(0)))
    short = attend_rows_on_cpu(
        query[:, :, :fewer], arrays, before, **options, mask=None, waiting=(), exact=earlier
    )
    return mx.concatenate([short, output], axis=2)


def _attend_many(
    query: mx.array,
    arrays: Sequence[mx.array],
    rows: PagedRows,
    waiting: Sequence[mx.array],
    *,
    exact: ExactTail | None,
    **options: Any,
) -> mx.array:
    """Attend more than a few queries of one sequence, tile by tile."""
    from kvant.operators.cpu_prefill import attend_tiles  # imports NumPy, which short texts do not need

    (runs,) = rows.runs
    if waiting:
        both = zip(arrays, waiting, strict=True)
        arrays = [mx.concatenate([stored_rows(array, runs), new], axis=2) for array, new in both]
        runs = [(0, arrays[0].shape[2])]
    return attend_tiles(query, arrays, runs, rows.first[0], rows.window, **options, exact=exact)


def _attend_together(
    query: mx.array,
    arrays: Sequence[mx.array],
    rows: PagedRows,
    *,
    quant_bit: int,
    value_bit: int,
    bias_split: BiasSplit | None,
    sinks: mx.array | None,
    mask: mx.array | None,
    waiting: Sequence[mx.array],
) -> mx.array:
    """Read the tokens of all sequences at once, then attend to each sequence's own."""
    _, H, S, D = query.shape
    few = S <= FEW_ROWS
    tokens = read_sequences(
        arrays,
        rows,
        waiting,
        quant_bit=quant_bit,
        value_bit=value_bit,
        key_dim=D,
        dtype=mx.float32 if few or bias_split is not None else query.dtype,
        copy=few and quant_bit > 0,
    )
    options: dict[str, Any] = {"bias_split": bias_split, "sinks": sinks}
    together = sum(key.shape[2] for key, _, _ in tokens)
    if few and mask is None and queries_at_once(1, H, S, together) == S:
        return _attend_few_of_each(query, tokens, rows.window, **options)
    outputs = attend_each(query, tokens, rows.window, mask=mask, **options)
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def computes_at_once(tokens: int) -> bool:
    """Return whether decode attention to this many tokens runs at the call, not when MLX evaluates it."""
    return tokens >= LONG_TOKENS and mx.default_device().type == mx.cpu


def _attend_few_of_each(
    query: mx.array,
    sequences: Sequence[tuple[mx.array, mx.array, int]],
    window: int | None,
    bias_split: BiasSplit | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attend sequences with a few new tokens each. ``sequences``: keys, values and first position."""
    B, H, S, D = query.shape
    tokens = []
    places = []
    for key, value, first in sequences:
        T = key.shape[2]
        for end in range(T - S + 1, T + 1):
            start = 0 if window is None else max(0, end - window)
            seen = slice(start, end)
            tokens.append((key, value) if end - start == T else (key[:, :, seen], value[:, :, seen]))
            places.append(first + start)
    singles = query.swapaxes(1, 2).reshape(B * S, 1, H, D).astype(mx.float32)
    output = attend_singly(singles, tokens, bias_split=bias_split, first=places, sinks=sinks)
    return output.reshape(B, S, H, -1).swapaxes(1, 2).astype(query.dtype)

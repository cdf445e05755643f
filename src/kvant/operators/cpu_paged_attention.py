"""Attention to paged rows on a CPU: of many new tokens from every core, of a few each as alone. Unchecked."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import mlx.core as mx

from kvant.operators.attention import attend_tokens, attend_window
from kvant.operators.bias_split import BiasSplit, value_bias_of
from kvant.operators.cpu_attention import attend_singly, join_parts, one_part, queries_at_once
from kvant.operators.paged_rows import PagedRows, Run, cut_runs, float_bytes, read_rows, shares, tokens_at_once
from kvant.operators.streams import FEW_ROWS, cpu_streams

# A query that sees so many tokens is worth attend_long (measured).
LONG_TOKENS = 1024


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
) -> mx.array:
    """:func:`kvant.operators.paged_attention.attend_rows`, of the sequences that have rows."""
    _, H, S, D = query.shape
    few = S <= FEW_ROWS
    bits: dict[str, Any] = {"quant_bit": quant_bit, "value_bit": value_bit}
    options: dict[str, Any] = {"bias_split": bias_split, "sinks": sinks}
    counts, window = rows.counts, rows.window
    size = tokens_at_once(float_bytes(arrays[0], D, quant_bit, value_bit), S, quant_bit)
    outputs: list[mx.array] = []
    for share in shares(counts, size, alone=LONG_TOKENS if few else None):
        count, runs, first = counts[share.start], rows.runs[share.start], rows.first[share.start]
        if few and mask is None and not waiting and min(count, window or count) >= LONG_TOKENS:
            from kvant.operators.cpu_decode import attend_long

            fewer = sum(min(count - S + 1 + i, window or count) < LONG_TOKENS for i in range(S))
            if fewer:  # the first queries do not see so many tokens yet
                before = replace(rows, runs=[cut_runs(runs, 0, count - S + fewer)], first=[first])
                short: dict[str, Any] = bits | options | {"mask": None, "waiting": ()}
                outputs.append(attend_rows_on_cpu(query[share, :, :fewer], arrays, before, **short))
            long = attend_long(query[share, :, fewer:], arrays, runs, first, window, **bits, **options)
            outputs.append(mx.concatenate([outputs.pop(), long], axis=2) if fewer else long)
            continue
        # Without this dependency MLX reads the tokens of every share before it uses the first.
        readable = mx.depends(arrays, outputs[-1:]) if outputs else arrays
        if not few and mask is None and window is None and count > size:
            outputs.append(_attend_in_parts(query[share], readable, runs, bits | {"key_dim": D}, size, **options))
            continue
        # The bytes of several sequences are put side by side and made floats in one multiplication: twice as fast as to
        # take them by row numbers, and ten times as fast as to read padded pages (measured).
        joined = [run for own in rows.runs[share] for run in own]
        form: dict[str, Any] = bits | {
            "key_dim": D,
            "dtype": mx.float32 if few or bias_split is not None else query.dtype,
        }
        keys, values = read_rows(readable, joined, waiting, **form, copy=few and quant_bit > 0)
        ends = list(accumulate(counts[share]))[:-1]
        tokens = list(zip(mx.split(keys, ends, axis=2), mx.split(values, ends, axis=2), rows.first[share], strict=True))
        if few and mask is None and queries_at_once(1, H, S, keys.shape[2]) == S:
            outputs.append(_attend_few_of_each(query[share], tokens, window, **options))
            continue
        for b, (key, value, first) in enumerate(tokens, share.start):
            outputs.append(
                attend_window(query[b : b + 1], key, value, first=first, window=window, mask=mask, **options)
            )
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def computes_at_once(tokens: int) -> bool:
    """Whether a few queries that see so many tokens have their attention when it is called, before it is evaluated."""
    return tokens >= LONG_TOKENS and mx.default_device().type == mx.cpu


def _attend_few_of_each(
    query: mx.array,
    sequences: Sequence[tuple[mx.array, mx.array, int]],
    window: int | None,
    bias_split: BiasSplit | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attention of sequences with a few new tokens each, on a CPU: all of them together.

    Of each there are keys, values and the position of the first.
    """
    B, H, S, D = query.shape
    tokens, places = [], []
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


def _attend_in_parts(
    query: mx.array,
    arrays: Sequence[mx.array],
    runs: Sequence[Run],
    form: dict[str, Any],
    size: int,
    bias_split: BiasSplit | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attention (1, H, S, Dv) of many queries to ``size`` tokens at a time, from every core in turn.

    The last part has all of the queries' own tokens too.
    """
    _, H, S, _ = query.shape
    T, streams = sum(end - first for first, end in runs), cpu_streams()
    parts: list[mx.array] = []
    for number, start in enumerate(range(0, T - S + 1, size)):
        end = T if start + size > T - S else start + size
        before = parts[-len(streams)] if len(parts) >= len(streams) else query
        split = bias_split and replace(bias_split, rotation=bias_split.rotation[..., start:])
        with mx.stream(streams[number % len(streams)]):
            readable = mx.depends(arrays, [before])
            own, copy = cut_runs(runs, start, end), form["quant_bit"] > 0
            key, value = read_rows(readable, own, **form, dtype=mx.float32, copy=copy)
            if bias_split is not None and sinks is not None:
                value = value + bias_split.value_bias[:, None]
            parts.append(attend_tokens(query, key, value, is_causal=end == T, bias_split=split, is_part=True))
        if len(parts) > 2 * len(streams):  # they are large
            parts[:2] = [one_part(parts[:2])]
    output = join_parts(parts, sinks)
    if bias_split is not None and sinks is None:
        output = output + value_bias_of(bias_split, H)
    return output.astype(query.dtype)

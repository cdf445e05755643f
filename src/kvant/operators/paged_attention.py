"""Attention of several sequences whose tokens are rows of shared arrays, unchecked: append, then attend.

The arrays of a layer are values (2, K, T, D') and, if they are quantized, scales (2, K, T, D/G): PMX's dynamic
batching with cache_mode 1, cache_layout 3 and one layer. Keys and values of different widths or bits lie side by side
in (1, K, T, a key and a value). B sequences, S new tokens each, H query heads, K kv heads, D head_dim.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import mlx.core as mx

from kvant.operators.attention import attend_tokens
from kvant.operators.bias_split import BiasSplit, value_bias_of
from kvant.operators.cpu_attention import attend_singly, join_parts, one_part, queries_at_once
from kvant.operators.kernels.attend import value_dim_of
from kvant.operators.kernels.launch import Backend
from kvant.operators.masks import both_masks, window_mask
from kvant.operators.paged_kernel import StepPages, attend_pages
from kvant.operators.stored_tokens import fitted_tokens, float_tokens
from kvant.operators.streams import FEW_ROWS, cpu_streams

# Bytes of keys and values as float32 that are made at once (measured): 16 MiB for a token of 32k took 1.2 to 2.5 times
# as long, 1 MiB 1.3 times. Of many queries a fourth is as fast, and more prompts are long enough for every core.
READ_BYTES = 4 * 1024 * 1024
PARTS_OF_MANY = 4

Run = tuple[int, int]  # the first row of some that lie side by side, and the one behind the last


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Where a step's tokens are. Each list has an entry for every sequence.

    Attributes:
        new: the B * S rows that are written, sequence by sequence: those of one sequence as runs, those of several as
            an integer array. None: of one sequence, whose new tokens wait until the step is committed, because they
            would take the place of rows that it, or another step in its place, needs.
        runs: the rows that are read, in the order of positions, the new ones included.
        first: the position of the first row that is read.
        window: the last tokens that a query sees, its own included; None: it sees all.
        pages: the same for the fused kernel; None: it does not take the step.
    """

    new: list[Run] | mx.array | None
    runs: list[list[Run]]
    first: list[int]
    window: int | None
    pages: StepPages | None = None


def append_and_attend_paged(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    arrays: list[mx.array],
    rows: PagedRows,
    *,
    quant_bit: int,
    quant_group: int,
    value_bit: int = 0,
    mask: mx.array | None = None,
    bias_split: BiasSplit | None = None,
    sinks: mx.array | None = None,
    backend: Backend | None = None,
) -> tuple[mx.array, list[mx.array] | None]:
    """Causal attention of S new tokens of each sequence to its rows, once they are written. Changes ``arrays``.

    Args:
        query: (R, H, S, D), R >= B. Sequences past the B of ``rows`` are padding: nothing is written of them, and
            their attention is 0.
        key, value: (R, K, S, D) and (R, K, S, Dv).
        value_bit: of values; 0: as of keys.
        mask: of one sequence, which is unfused then: as :func:`kvant.operators.attention.attend_tokens` takes it, with
            a column for every token so far.
        bias_split: the biases that keys and values lack. Position j is at column j of its rotation.
        sinks: as ``attend_tokens`` takes them.
        backend: where the fused kernel runs, which must take the layer's tokens
            (:func:`kvant.operators.kernels.attend.unsupported_reason`). None: the unfused operator.

    Returns:
        (R, H, S, Dv) in the query's dtype, and what waits to be written, as it is stored.
    """
    B, pages = len(rows.runs), rows.pages if mask is None and backend is not None else None
    bits: dict[str, Any] = {"quant_bit": quant_bit, "value_bit": value_bit}
    form = bits | {"quant_group": quant_group}
    waiting: list[mx.array] | None = None
    if rows.new is None:
        waiting = fitted_tokens(key, value, arrays, **form, alone=True)
    else:
        write_rows(key[:B], value[:B], arrays, rows.new, **form, backend=None if pages is None else backend)
    options: dict[str, Any] = {"bias_split": bias_split, "sinks": sinks}
    if pages is not None:
        return attend_pages(query, arrays, pages, **form, **options, backend=backend), None
    own = attend_rows(query, arrays, rows, **bits, mask=mask, waiting=waiting or (), **options)
    return own, waiting


def attend_rows(
    query: mx.array,
    arrays: Sequence[mx.array],
    rows: PagedRows,
    *,
    quant_bit: int,
    value_bit: int = 0,
    mask: mx.array | None = None,
    waiting: Sequence[mx.array] = (),
    bias_split: BiasSplit | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """:func:`append_and_attend_paged` of tokens that are written already, or ``waiting`` as they are stored."""
    R, H, S, D = query.shape
    on_cpu = mx.default_device().type == mx.cpu
    few = S <= FEW_ROWS and on_cpu
    dtype = mx.float32 if few or bias_split is not None else query.dtype  # as attention takes them
    counts = [sum(end - first for first, end in own) for own in rows.runs]
    row_bytes = 4 * arrays[0].shape[1] * (D + value_dim_of(arrays[0], D, quant_bit, value_bit))  # as float32
    size = tokens_at_once(row_bytes, S, quant_bit)
    form: dict[str, Any] = {"quant_bit": quant_bit, "value_bit": value_bit, "key_dim": D}
    outputs: list[mx.array] = []
    for share in _shares(counts, size):
        # The bytes of several sequences are put side by side and made floats in one multiplication: on a CPU twice as
        # fast as to take them by row numbers, and ten times as fast as to read padded pages (measured).
        joined = [run for own in rows.runs[share] for run in own]
        # Without this dependency MLX reads the tokens of every share before it uses the first.
        readable = mx.depends(arrays, outputs[-1:]) if outputs else arrays
        if counts[share.start] > size and on_cpu and mask is None and rows.window is None:
            outputs.append(_attend_in_parts(query[share], readable, joined, form, size, bias_split, sinks))
            continue
        keys, values = read_rows(readable, joined, waiting, **form, dtype=dtype, copy=few and quant_bit > 0)
        ends = list(accumulate(counts[share]))[:-1]
        tokens = list(zip(mx.split(keys, ends, axis=2), mx.split(values, ends, axis=2), rows.first[share], strict=True))
        if few and mask is None and queries_at_once(1, H, S, keys.shape[2]) == S:
            outputs.append(_attend_few_of_each(query[share], tokens, rows.window, bias_split, sinks))
            continue
        for b, (key, value, first) in zip(range(R)[share], tokens, strict=True):
            split = bias_split and replace(bias_split, rotation=bias_split.rotation[..., first:])
            own_mask, T = None if mask is None else mask[..., first:], key.shape[2]
            if rows.window is not None and rows.window < T:
                seen = window_mask(S, T, rows.window)
                own_mask = seen if own_mask is None else both_masks(seen, own_mask)
            alone = query[b : b + 1]
            outputs.append(attend_tokens(alone, key, value, mask=own_mask, bias_split=split, sinks=sinks))
    if (padding := R - len(counts)) > 0:
        outputs.append(mx.zeros((padding, *outputs[0].shape[1:]), query.dtype))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def tokens_at_once(row_bytes: int, new_tokens: int, quant_bit: int) -> int:
    """Tokens that are floats at once for so many queries of each sequence, of ``row_bytes`` each.

    Those that are stored as floats, and are only read, are four times as many.
    """
    most = max(READ_BYTES * (1 if quant_bit else 4) // row_bytes, PARTS_OF_MANY * FEW_ROWS)
    return most if new_tokens <= FEW_ROWS else most // PARTS_OF_MANY


def read_rows(
    arrays: Sequence[mx.array],
    runs: Sequence[Run],
    waiting: Sequence[mx.array] = (),
    *,
    quant_bit: int,
    value_bit: int = 0,
    dtype: mx.Dtype,
    key_dim: int,
    copy: bool = False,
) -> tuple[mx.array, mx.array]:
    """Keys and values (1, K, T, D) of rows, and of tokens behind them that wait to be written.

    A single run is read as a slice. With ``copy`` its quantized values are copied to lie side by side: MLX converts
    rows that are apart to float three times as slowly on a CPU (1,500 rows of 8 heads of 64: 225 us; a copy and the
    conversion of it 70 and 76).
    """
    stored = [
        stored_rows(array, runs) if len(runs) != 1 or (copy and array is arrays[0]) else array[:, :, slice(*runs[0])]
        for array in arrays
    ]
    if waiting:
        stored = [mx.concatenate([held, more], axis=2) for held, more in zip(stored, waiting, strict=True)]
    return float_tokens(stored, quant_bit=quant_bit, value_bit=value_bit, dtype=dtype, key_dim=key_dim)


def write_rows(
    key: mx.array,
    value: mx.array,
    arrays: Sequence[mx.array],
    rows: list[Run] | mx.array,
    **form: Any,
) -> None:
    """Quantize keys (B, K, S, D) and values (B, K, S, Dv) and write them in place.

    That is one operation an array, or an array and run. ``form``: of
    :func:`kvant.operators.stored_tokens.fitted_tokens`.
    """
    new = fitted_tokens(key, value, arrays, **form, alone=not isinstance(rows, mx.array))
    for array, part in zip(arrays, new, strict=True):
        if not isinstance(rows, mx.array):
            put_rows(array, part, rows)
            continue
        # In words of four bytes: Metal writes fewer one by one, with an atomic exchange of all four each.
        words = mx.uint32 if array.shape[-1] * array.dtype.size % 4 == 0 else array.dtype
        # (B, 2, K, S, last) -> (2, K, B * S, last)
        tokens = mx.view(part, words).transpose(1, 2, 0, 3, 4).flatten(2, 3)
        put = mx.put_along_axis(mx.view(array, words), rows[None, None, :, None], tokens, axis=2)
        array[:] = mx.view(put, array.dtype)


def put_rows(array: mx.array, tokens: mx.array, rows: Sequence[Run]) -> None:
    """Write tokens (2, K, rows, last) in place; MLX copies the whole array if anything else holds it."""
    done = 0
    if len(rows) == 1 and tokens.shape[2] == rows[0][1] - rows[0][0]:
        array[:, :, rows[0][0] : rows[0][1]] = tokens
        return
    for first, end in rows:
        array[:, :, first:end] = tokens[:, :, done : done + end - first]
        done += end - first


def stored_rows(array: mx.array, runs: Sequence[Run]) -> mx.array:
    """The rows of runs side by side: (2, K, rows, last), a copy. None at all: (2, K, 0, last).

    They are copied in the widest words that a row divides into: of bytes a sixth of the time (measured).
    """
    row_bytes = array.shape[-1] * array.dtype.size
    words = next((word for word in (mx.uint64, mx.uint32, mx.uint16) if row_bytes % word.size == 0), mx.uint8)
    source = mx.view(array, words)
    parts = [source[:, :, first:end] for first, end in runs] or [source[:, :, :0]]
    joined = mx.contiguous(parts[0]) if len(parts) == 1 else mx.concatenate(parts, axis=2)
    return mx.view(joined, array.dtype)


def _attend_few_of_each(
    query: mx.array,
    sequences: Sequence[tuple[mx.array, mx.array, int]],
    window: int | None,
    split: BiasSplit | None,
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
    output = attend_singly(singles, tokens, bias_split=split, first=places, sinks=sinks)
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
    """Attention (1, H, S, Dv) of a sequence to ``size`` tokens at a time, from every core in turn, on a CPU.

    A few queries are each as alone: a part ends at a multiple of ``size``. The last part of many queries has all of
    their tokens too.
    """
    _, H, S, _ = query.shape
    T, streams, few = sum(end - first for first, end in runs), cpu_streams(), S <= FEW_ROWS
    singles = query.transpose(2, 0, 1, 3).astype(mx.float32)  # (S, 1, H, D)
    parts: list[mx.array] = []
    for number, start in enumerate(range(0, T if few else T - S + 1, size)):
        end = T if not few and start + size > T - S else min(T, start + size)
        before = parts[-len(streams)] if len(parts) >= len(streams) else query
        split = bias_split and replace(bias_split, rotation=bias_split.rotation[..., start:])
        with mx.stream(streams[number % len(streams)]):
            readable = mx.depends(arrays, [before])
            own, copy = cut_runs(runs, start, end), form["quant_bit"] > 0
            key, value = read_rows(readable, own, **form, dtype=mx.float32, copy=copy)
            if bias_split is not None and sinks is not None:
                value = value + bias_split.value_bias[:, None]
            if few:
                seen = [min(end, T - S + 1 + i) - start for i in range(S)]
                tokens = [(key[:, :, :count], value[:, :, :count]) for count in seen if count > 0]
                part = attend_singly(singles[S - len(tokens) :], tokens, bias_split=split, is_part=True)
                parts.append(part.transpose(1, 2, 0, 3))  # (1, H, those that see a token here, Dv + 2)
            else:
                parts.append(attend_tokens(query, key, value, is_causal=end == T, bias_split=split, is_part=True))
        if not few and len(parts) > 2 * len(streams):  # they are large
            parts[:2] = [one_part(parts[:2])]
    fewer = S - parts[-1].shape[2]  # of a few queries, those before the last part
    outputs = [join_parts([part[:, :, :fewer] for part in parts[:-1]], sinks)] if fewer else []
    outputs.append(join_parts([part[:, :, fewer:] for part in parts[:-1]] + parts[-1:], sinks))
    output = mx.concatenate(outputs, axis=2)
    if bias_split is not None and sinks is None:
        output = output + value_bias_of(bias_split, H)
    return output.astype(query.dtype)


def cut_runs(runs: Sequence[Run], start: int, end: int) -> list[Run]:
    """The runs of some of the rows, counted from the first."""
    found, before = [], 0
    for first, last in runs:
        own = first + max(0, start - before), min(last, first + end - before)
        found += [own] if own[0] < own[1] else []
        before += last - first
    return found


def _shares(counts: list[int], most: int) -> Iterator[slice]:
    """The sequences that are read together: of ``most`` rows at most, or one."""
    start, total = 0, 0
    for b, count in enumerate(counts):
        if b > start and total + count > most:
            yield slice(start, b)
            start, total = b, 0
        total += count
    yield slice(start, len(counts))

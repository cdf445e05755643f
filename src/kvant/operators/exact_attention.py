"""Unfused attention to quantized tokens and an exact tail (:mod:`kvant.operators.exact_rows`). Unchecked."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import mlx.core as mx

from kvant.operators.attention import attend_tokens
from kvant.operators.bias_split import BiasSplit
from kvant.operators.cpu_attention import SingleQueries, single_queries, single_scores
from kvant.operators.exact_rows import TAIL_ROWS, TAIL_WINDOW, ExactRows, ExactTail
from kvant.operators.exponential import softmax_parts
from kvant.operators.masks import both_masks
from kvant.operators.paged_rows import PagedRows, read_float_rows, read_rows
from kvant.operators.row_runs import cut_runs
from kvant.operators.stored_tokens import keys_and_values

# Queries that attend at once through a mask, whose score terms take 16 bytes per query and token.
MASKED_QUERIES = 128


def attend_few_exactly(
    query: mx.array,
    arrays: Sequence[mx.array],
    rows: PagedRows,
    exact: ExactTail,
    *,
    quant_bit: int,
    value_bit: int,
    bias_split: BiasSplit | None,
    sinks: mx.array | None,
) -> mx.array:
    """Attend a few new tokens of each sequence on a CPU, with the bits of one by one: (B, H, S, Dv).

    Args:
        query: (B, H, S, D).
        arrays, rows: as in :func:`kvant.operators.paged_attention.attend_rows`.
        exact: the exact tail of the same sequences.
    """
    B, H, S, D = query.shape
    K = arrays[0].shape[1]
    tokens = _read_quantized(arrays, rows, exact.rows, quant_bit=quant_bit, value_bit=value_bit, key_dim=D)
    if tokens is None:
        query = _after_writes(query, arrays)
    # (B, K, TAIL_ROWS, D) -> (B, 1, K, TAIL_ROWS, D)
    page_keys, page_values = (array[:, None] for array in exact.read_pages(mx.float32, D))
    value_bias = None if bias_split is None else bias_split.value_bias[:, None]  # (K, 1, Dv)
    if value_bias is not None and sinks is not None:  # as in attend_singly
        page_values = page_values + value_bias
        if tokens is not None:
            keys, values, shifts = tokens
            tokens = keys, values + value_bias, shifts
        value_bias = None
    # (B, H, S, D) -> (B, S, H, D) -> (B * S, 1, H, D)
    singles = query.swapaxes(1, 2).reshape(B * S, 1, H, D).astype(mx.float32)
    queries = single_queries(singles, K, bias_split)
    page_scores = _page_scores(queries, page_keys, exact.rows, S, rows.window)
    column = None if sinks is None else sinks.astype(mx.float32).reshape(1, K, H // K, 1)
    outputs: list[mx.array | None] = []
    page_weights: list[mx.array] = []
    sums: list[mx.array | None] = []
    for number, scores in enumerate(mx.split(page_scores, B * S)):
        b, i = divmod(number, S)
        first, count = _quantized_span(rows, exact.rows, b, rows.ends(b) - S + i)
        seen_values = None
        if tokens is not None and count:
            keys, values, shifts = tokens
            columns = slice(first + shifts[b], first + shifts[b] + count)
            seen_values = values[:, :, columns]
            more = single_scores(queries, number, keys[:, :, columns], first)
            scores = mx.concatenate([more, scores], axis=-1)
        if column is not None:
            scores = mx.concatenate([scores, column], axis=-1)
        weights, total = softmax_parts(scores)
        sums.append(total)
        outputs.append(None if seen_values is None else weights[..., :count] @ seen_values)
        page_weights.append(weights[..., count : count + TAIL_ROWS])
    joined = mx.concatenate(page_weights).reshape(B, S, K, H // K, -1)
    output = (joined @ page_values).reshape(B * S, K, H // K, -1) + _joined(outputs, 0.0)
    if any(total is not None for total in sums):
        output = output / _joined(sums, 1.0)
    if value_bias is not None:
        output = output + value_bias
    return output.reshape(B, S, H, -1).swapaxes(1, 2).astype(query.dtype)


def _read_quantized(
    arrays: Sequence[mx.array],
    rows: PagedRows,
    exact: ExactRows,
    *,
    quant_bit: int,
    value_bit: int,
    key_dim: int,
) -> tuple[mx.array, mx.array, list[int]] | None:
    """Read the quantized tokens that queries read, concatenated over all sequences.

    Returns:
        keys (1, K, T, D) and values (1, K, T, Dv), float32, and each sequence's shift from a position to its
        column. None if queries read only exact tokens.
    """
    runs = []
    shifts = []
    T = 0
    for b, sequence_runs in enumerate(rows.runs):
        first = max(rows.first[b], exact.sinks[b])
        end = max(first, exact.tail_start(b, rows.ends(b) - 1))
        runs += cut_runs(sequence_runs, first - rows.first[b], end - rows.first[b])
        shifts.append(T - first)
        T += end - first
    if not runs:
        return None
    keys, values = read_rows(
        arrays,
        runs,
        quant_bit=quant_bit,
        value_bit=value_bit,
        key_dim=key_dim,
        dtype=mx.float32,
        copy=quant_bit > 0,
    )
    return keys, values, shifts


def _quantized_span(rows: PagedRows, exact: ExactRows, sequence: int, position: int) -> tuple[int, int]:
    """Return the first position that the query at ``position`` reads quantized, and how many."""
    seen = 0 if rows.window is None else position + 1 - rows.window
    first = max(rows.first[sequence], exact.sinks[sequence], seen)
    return first, max(0, exact.tail_start(sequence, position) - first)


def _page_scores(
    queries: SingleQueries, page_keys: mx.array, exact: ExactRows, new_tokens: int, window: int | None
) -> mx.array:
    """Return the scores (B * S, K, H/K, TAIL_ROWS) of queries with exact keys (B, 1, K, TAIL_ROWS, D)."""
    scaled = queries.scaled.reshape(len(page_keys), new_tokens, *queries.scaled.shape[1:])
    scores = scaled @ page_keys.swapaxes(-1, -2)  # (B, S, K, H/K, TAIL_ROWS)
    scores = scores + exact.hidden(new_tokens, window)
    if queries.weights is not None and queries.rotation is not None:
        weights = queries.weights.reshape(*scores.shape[:-1], -1)  # (B, S, K, H/K, 2P)
        table = mx.take(queries.rotation, exact.positions, axis=1)  # (2P, B, TAIL_ROWS)
        scores = scores + weights @ table.swapaxes(0, 1)[:, None, None]
    return scores.flatten(0, 1)


def _joined(parts: Sequence[mx.array | None], absent: float) -> mx.array | float:
    """Concatenate arrays of one shape, with a constant in place of absent ones."""
    present = [array for array in parts if array is not None]
    if not present:
        return absent
    constant = mx.full(present[0].shape, absent) if len(present) < len(parts) else present[0]
    return mx.concatenate([constant if array is None else array for array in parts])


def _put_exact(
    floats: list[mx.array],
    exact: ExactTail,
    sequence: int,
    reads: tuple[int, int],
    *,
    place: tuple[int, int],
    key_dim: int,
) -> None:
    """Replace the floats of a sequence's first and last tokens by its exact rows.

    Args:
        reads: the tail's first position and the position past its last.
        place: the position of the first token in ``floats``, and its column.
    """
    begin, column = place
    tail_start, stop = reads
    for first, end in ((0, min(exact.rows.sinks[sequence], tail_start)), (tail_start, stop)):
        first = max(first, begin)
        if first >= end:
            continue
        at = column + first - begin
        for rows in exact.pieces(sequence, first, end):
            parts = keys_and_values([rows], key_dim) if len(floats) == 2 else (rows,)
            for array, new in zip(floats, parts, strict=True):
                array[:, :, at : at + new.shape[2]] = new
            at += rows.shape[2]


def read_exactly(
    arrays: Sequence[mx.array],
    rows: PagedRows,
    exact: ExactTail,
    new_tokens: int,
    waiting: Sequence[mx.array] = (),
    *,
    quant_bit: int,
    value_bit: int,
    dtype: mx.Dtype,
    key_dim: int,
) -> list[tuple[mx.array, mx.array, int]]:
    """Read the tokens of all sequences, with the exact rows that the first new token reads and all new ones.

    For many new tokens on a GPU: later new tokens read more tokens exactly than in small steps. To give each
    new token its own tail would take a mask and twice the memory.

    Returns:
        the same as :func:`kvant.operators.paged_rows.read_sequences`.
    """
    runs = [run for sequence_runs in rows.runs for run in sequence_runs]
    form: dict[str, Any] = {"quant_bit": quant_bit, "value_bit": value_bit}
    floats = read_float_rows(arrays, runs, waiting, dtype=dtype, key_dim=key_dim, **form)
    counts = [end - first for first, end in zip(rows.first, exact.rows.ends, strict=True)]
    columns = [0, *accumulate(counts)]
    for b, end in enumerate(exact.rows.ends):
        reads = (exact.rows.tail_start(b, end - new_tokens), end)
        _put_exact(floats, exact, b, reads, place=(rows.first[b], columns[b]), key_dim=key_dim)
    keys, values = keys_and_values(floats, key_dim)
    return [
        (keys[:, :, start : start + count], values[:, :, start : start + count], first)
        for start, count, first in zip(columns[:-1], counts, rows.first, strict=True)
    ]


def attend_each_exactly(
    query: mx.array,
    arrays: Sequence[mx.array],
    rows: PagedRows,
    exact: ExactTail,
    waiting: Sequence[mx.array],
    *,
    quant_bit: int,
    value_bit: int,
    dtype: mx.Dtype,
    mask: mx.array | None,
    bias_split: BiasSplit | None,
    sinks: mx.array | None,
) -> list[mx.array]:
    """Attend queries (B, H, S, D) causally, each row to its own sequence: B arrays (1, H, S, Dv).

    Quantized and exact tokens are columns of one product; a mask selects those that each query sees.

    Args:
        arrays, rows, waiting: as in :func:`kvant.operators.paged_attention.attend_rows`.
        exact: the exact tail of the same sequences.
        dtype: of keys and values in the products.
        mask: has a column for every position from 0 on.
        bias_split, sinks: as in :func:`kvant.operators.attention.attend_tokens`.
    """
    S, D = query.shape[2:]
    form: dict[str, Any] = {"quant_bit": quant_bit, "value_bit": value_bit, "dtype": dtype, "key_dim": D}
    outputs: list[mx.array] = []
    for b, tail in enumerate(exact.read(dtype)):
        end = exact.rows.ends[b]
        first = rows.first[b]
        last = exact.rows.tail_start(b, end - 1)
        first = max(first, exact.rows.sinks[b])
        keys, values = keys_and_values([tail], D)
        start = exact.rows.starts[b]
        positions = [*range(exact.rows.sinks[b]), *range(start, end)]
        is_mixed = first < last
        if is_mixed:
            quantized_runs = cut_runs(rows.runs[b], first - rows.first[b], last - rows.first[b])
            behind = rows.ends(b)  # position of the first unwritten token
            late = [x[:, :, max(0, first - behind) : max(0, last - behind)] for x in waiting]
            late = late if late and late[0].shape[2] else []
            # Without this dependency MLX reads the tokens of every sequence before it uses the first.
            readable = mx.depends(arrays, outputs[-1:]) if outputs else arrays
            floats = read_float_rows(readable, quantized_runs, late, **form)
            more_keys, more_values = keys_and_values(floats, D)
            keys = mx.concatenate([keys, more_keys], axis=2)
            values = mx.concatenate([values, more_values], axis=2)
        else:
            last = first
            query = _after_writes(query, arrays)
        options: dict[str, Any] = {"bias_split": bias_split, "sinks": sinks}
        if not is_mixed and keys.shape[2] == end and mask is None and rows.window is None:  # all, in order
            outputs.append(attend_tokens(query[b : b + 1], keys, values, **options))
            continue
        column = mx.array([*positions, *range(first, last)], mx.int32)
        seen = _columns_seen(exact.rows, b, S, rows.window, column, len(positions))
        if mask is not None:
            seen = both_masks(seen, mx.take(mask, column, axis=-1))
        if bias_split is not None:
            rotation = mx.take(bias_split.rotation, column, axis=-1)
            options["bias_split"] = replace(bias_split, rotation=rotation)
        blocks: list[mx.array] = []
        for start in range(0, S, MASKED_QUERIES):
            block = slice(start, start + MASKED_QUERIES)
            own_query = query[b : b + 1, :, block]
            if blocks:  # as above
                (own_query,) = mx.depends([own_query], blocks[-1:])
            own_mask = seen[..., block, :]
            blocks.append(attend_tokens(own_query, keys, values, is_causal=False, mask=own_mask, **options))
        outputs.append(blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis=2))
    return outputs


def _after_writes(query: mx.array, arrays: Sequence[mx.array]) -> mx.array:
    """Make queries depend on the writes to the quantized rows, which they do not read.

    If the tail is wider than the window, nothing else depends on those writes: MLX would never compute them
    and keep their inputs alive, step after step.
    """
    (query,) = mx.depends([query], list(arrays))
    return query


def _columns_seen(
    rows: ExactRows, sequence: int, new_tokens: int, window: int | None, column: mx.array, num_exact: int
) -> mx.array:
    """Return which columns each new token of a sequence sees: boolean (S, columns).

    ``column``: each column's position, exact rows first. The layers of a step share the result.
    """
    end = rows.ends[sequence]
    key = ("columns", sequence, end, new_tokens, window, column.size)
    if key not in rows.masks:
        position = mx.arange(end - new_tokens, end, dtype=mx.int32)[:, None]
        tail_start = mx.maximum(position + 1 - TAIL_WINDOW, rows.starts[sequence])
        is_exact = mx.arange(column.size) < num_exact
        is_read = mx.where(
            is_exact, (column >= tail_start) | (column < rows.sinks[sequence]), column < tail_start
        )
        seen = is_read & (column <= position)
        if window is not None:
            seen = seen & (column > position - window)
        rows.masks[key] = seen
    mask: mx.array = rows.masks[key]
    return mask


def with_exact_rows(
    keys: mx.array, values: mx.array, exact: ExactTail, new_tokens: int
) -> tuple[mx.array, mx.array]:
    """Replace keys and values (R, K, T, D) by the exact rows that the first new token of a sequence reads.

    Sequences are right-aligned. For models that attend to one array for all new tokens; for the later ones it
    is an approximation, because they should read a few of these tokens quantized.
    """
    T, D = keys.shape[2:]
    keys = copy.copy(keys)
    values = copy.copy(values)
    for b, tail in enumerate(exact.read(keys.dtype)):
        rows = exact.rows
        end = rows.ends[b]
        tail_start = rows.tail_start(b, end - new_tokens)
        own_keys, own_values = keys_and_values([tail], D)
        for first, stop in ((0, min(rows.sinks[b], tail_start)), (tail_start, end)):
            first = max(first, end - T)
            if first >= stop:
                continue
            tail_rows = slice(rows.count_before(b, first), rows.count_before(b, stop))
            columns = slice(T - end + first, T - end + stop)
            keys[b : b + 1, :, columns] = own_keys[:, :, tail_rows]
            values[b : b + 1, :, columns] = own_values[:, :, tail_rows]
    return keys, values

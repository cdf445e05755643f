"""Rows of a layer's arrays as runs: rows that lie side by side."""

from collections.abc import Sequence

import mlx.core as mx

Run = tuple[int, int]  # the first row of some that lie side by side, and the one behind the last


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


def cut_runs(runs: Sequence[Run], start: int, end: int) -> list[Run]:
    """The runs of some of the rows, counted from the first."""
    found, before = [], 0
    for first, last in runs:
        own = first + max(0, start - before), min(last, first + end - before)
        found += [own] if own[0] < own[1] else []
        before += last - first
    return found

"""Attention of several sequences whose tokens are rows of shared arrays, unchecked: append, then attend.

The arrays of a layer are values (2, K, T, D') and, where they are quantized, scales (2, K, T, D/G): PMX's dynamic
batching with cache_mode 1, cache_layout 3 and one layer. Keys and values of different widths lie side by side in
(1, K, T, D + Dv). B sequences, S new tokens each, H query heads, K kv heads, D head_dim.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from kvant.operators.attention import attend_tokens
from kvant.operators.bias_split import BiasSplit
from kvant.operators.cached_attention import float_tokens, stored_tokens

# Bytes of keys and values as float32 that are made at once, of one sequence at least.
READ_BYTES = 16 * 1024 * 1024

Run = tuple[int, int]  # the first row of some that lie side by side, and the one behind the last


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Where a step's tokens are. Each list has an entry for every sequence.

    Attributes:
        new: the B * S rows that are written, sequence by sequence: those of one sequence as runs, those of several as
            an integer array.
        runs: the rows that are read, in the order of positions, the new ones included.
        first: the position of the first row that is read.
        masks: (S, rows) boolean, True where a query sees a row; None: it sees all up to its own.
    """

    new: list[Run] | mx.array
    runs: list[list[Run]]
    first: list[int]
    masks: list[mx.array | None]


def append_and_attend_paged(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    arrays: list[mx.array],
    rows: PagedRows,
    *,
    quant_bit: int,
    quant_group: int,
    bias_split: BiasSplit | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Causal attention of S new tokens of each sequence to its rows, once they are written. Changes ``arrays``.

    Args:
        query: (R, H, S, D), R >= B. Sequences past the B of ``rows`` are padding: nothing is written of them, and
            their attention is 0.
        key, value: (R, K, S, D) and (R, K, S, Dv).
        bias_split: the biases that keys and values lack. Position j is at column j of its rotation.
        sinks: as :func:`kvant.operators.attention.attend_tokens` takes them.

    Returns:
        (R, H, S, Dv) in the query's dtype.
    """
    B = len(rows.runs)
    write_rows(key[:B], value[:B], arrays, rows.new, quant_bit=quant_bit, quant_group=quant_group)
    return attend_rows(query, arrays, rows, quant_bit=quant_bit, bias_split=bias_split, sinks=sinks)


def attend_rows(
    query: mx.array,
    arrays: Sequence[mx.array],
    rows: PagedRows,
    *,
    quant_bit: int,
    bias_split: BiasSplit | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """:func:`append_and_attend_paged` of tokens that are written already."""
    outputs = []
    for b, keys, values in _tokens(arrays, rows.runs, quant_bit=quant_bit, key_dim=query.shape[3], dtype=query.dtype):
        split = None if bias_split is None else _from(bias_split, rows.first[b])
        mask = rows.masks[b]
        outputs.append(attend_tokens(query[b : b + 1], keys, values, mask=mask, bias_split=split, sinks=sinks))
    if (padding := len(query) - len(outputs)) > 0:
        outputs.append(mx.zeros((padding, *outputs[0].shape[1:]), query.dtype))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def write_rows(
    key: mx.array,
    value: mx.array,
    arrays: Sequence[mx.array],
    rows: list[Run] | mx.array,
    *,
    quant_bit: int,
    quant_group: int,
) -> None:
    """Quantize keys (B, K, S, D) and values (B, K, S, Dv) and write them in place: one operation an array and run."""
    new = stored_tokens(key, value, arrays, quant_bit=quant_bit, quant_group=quant_group)
    for array, part in zip(arrays, new, strict=True):
        # (B, 2, K, S, last) -> (2, K, B * S, last)
        part = part[0] if part.shape[0] == 1 else part.transpose(1, 2, 0, 3, 4).flatten(2, 3)
        put_rows(array, part, rows)


def put_rows(array: mx.array, tokens: mx.array, rows: list[Run] | mx.array) -> None:
    """Write tokens (2, K, rows, last) in place; MLX copies the whole array where anything else holds it."""
    if isinstance(rows, mx.array):
        array[:, :, rows] = tokens
        return
    done = 0
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


def _tokens(
    arrays: Sequence[mx.array], runs: list[list[Run]], *, quant_bit: int, key_dim: int, dtype: mx.Dtype
) -> Iterator[tuple[int, mx.array, mx.array]]:
    """The number of each sequence, its keys (1, K, T, D) and values (1, K, T, Dv).

    The bytes of several are put side by side and made floats in one multiplication: on a CPU twice as fast as to take
    them by row numbers, and ten times as fast as to read padded pages (measured).
    """
    sides, heads, _, width = arrays[0].shape
    row_bytes = 4 * sides * heads * width * (2 if quant_bit == 4 else 1)
    for some in _shares(runs, READ_BYTES // row_bytes):
        joined = [run for b in some for run in runs[b]]
        stored = [stored_rows(array, joined)[None] for array in arrays]
        keys, values = float_tokens(stored, quant_bit=quant_bit, dtype=dtype, key_dim=key_dim)
        start = 0
        for b in some:
            end = start + sum(last - first for first, last in runs[b])
            yield b, keys[:, :, start:end], values[:, :, start:end]
            start = end


def _shares(runs: list[list[Run]], most: int) -> Iterator[list[int]]:
    """The numbers of sequences that are read together: of ``most`` rows at most, or one."""
    share: list[int] = []
    total = 0
    for b, own in enumerate(runs):
        count = sum(end - first for first, end in own)
        if share and total + count > most:
            yield share
            share, total = [], 0
        share.append(b)
        total += count
    yield share


def _from(split: BiasSplit, first: int) -> BiasSplit:
    """A bias split for rows from position ``first`` on."""
    return replace(split, rotation=split.rotation[..., first:]) if first else split

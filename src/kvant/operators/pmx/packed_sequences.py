"""The rows of a packed cache that a call of PMX's dynamic operators reads and writes.

N, T and MaxT are as in :mod:`kvant.operators.pmx.dynamic_batching`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx

from kvant.operators.pmx.validation import as_int, check_numbers

Run = tuple[int, int]  # first row and last row + 1 of the cache


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """One of the sequences of a call."""

    queries: slice  # its new tokens among the N
    keys: slice  # all its tokens among the T
    runs: list[Run]  # the rows that hold its tokens, in order; contiguous rows are one run
    new_runs: list[Run]  # the rows among them that the call writes


def check_sequences(
    new_tokens: int,
    max_rows: int,
    seqstarts: Any,
    kvstarts: Any,
    cachestarts: Any,
    start_pos: Any,
    max_seqlen: int,
    max_kvlen: int,
    cache_mode: int,
    page_size: int,
) -> list[PackedSequence]:
    """Check the index arguments of a call; raise a ValueError that names the first defect."""
    starts = _ints("start_pos", start_pos)
    B = len(starts)
    seq = _sums("seqstarts", seqstarts, B)
    kv = _sums("kvstarts", kvstarts, B)
    check_numbers([("the end of seqstarts", seq[-1], new_tokens, new_tokens)])
    for b, start in enumerate(starts):
        new = seq[b + 1] - seq[b]
        name = f"kvstarts[{b + 1}], with start_pos {start} and {new} new tokens,"
        end = kv[b] + start + new
        check_numbers([(f"start_pos[{b}]", start, 0, None), (name, kv[b + 1], end, end)])
    kvlens = [b - a for a, b in pairwise(kv)]
    longest = max(b - a for a, b in pairwise(seq))
    most = max(kvlens)
    check_numbers([("max_seqlen", max_seqlen, longest, longest), ("max_kvlen", max_kvlen, most, most)])
    check_numbers([("cache_mode", cache_mode, 0, 1), ("page_size", page_size, 1, None)])
    tables = _tables(cachestarts, kvlens, cache_mode, page_size)
    sequences = []
    past = []
    for b, (table, start, kvlen) in enumerate(zip(tables, starts, kvlens, strict=True)):
        page = page_size if cache_mode else max(kvlen, 1)
        for i in range(-(-kvlen // page)):  # entries past the last token are ignored
            count = min(page, kvlen - i * page)
            entry = f"cachestarts[{b}][{i}]" if cache_mode else f"cachestarts[{b}]"
            check_numbers(
                [(f"{entry}, with {count} tokens in {max_rows} rows,", table[i], 0, max_rows - count)]
            )
        parts = [_runs(table, page, *span) for span in ((0, kvlen), (start, kvlen), (0, start))]
        sequences.append(PackedSequence(slice(seq[b], seq[b + 1]), slice(kv[b], kv[b + 1]), *parts[:2]))
        past.append(parts[2])
    _check_written_rows(past, [sequence.new_runs for sequence in sequences])
    return sequences


def _sums(name: str, argument: Any, batch: int) -> list[int]:
    """Return the starts of B sequences and the end of the last: they begin with 0 and never decrease."""
    sums = _ints(name, argument)
    _check_entries(name, sums, batch + 1, batch + 1)
    check_numbers([(f"{name}[0]", sums[0], 0, 0)])
    check_numbers(
        (f"{name}[{b + 1}]", after, before, None) for b, (before, after) in enumerate(pairwise(sums))
    )
    return sums


def _tables(cachestarts: Any, kvlens: list[int], cache_mode: int, page_size: int) -> list[list[int]]:
    """Return the first row of each of a sequence's pages. In cache_mode 0 it has one page."""
    if cache_mode:
        rows = _listed("cachestarts", cachestarts, 2)
        tables = [_ints(f"cachestarts[{b}]", row) for b, row in enumerate(rows)]
    else:
        tables = [[entry] for entry in _ints("cachestarts", cachestarts)]
    _check_entries("cachestarts", tables, len(kvlens), len(kvlens))
    for b, (table, kvlen) in enumerate(zip(tables, kvlens, strict=True)):
        _check_entries(f"cachestarts[{b}]", table, -(-kvlen // page_size) if cache_mode else 1, None)
    return tables


def _runs(table: Sequence[int], page_size: int, first: int, end: int) -> list[Run]:
    """Return the rows of tokens first to end - 1 of a sequence whose page i begins at row table[i]."""
    runs: list[Run] = []
    while first < end:
        page, within = divmod(first, page_size)
        count = min(page_size - within, end - first)
        row = table[page] + within
        if runs and runs[-1][1] == row:
            runs[-1] = (runs[-1][0], row + count)
        else:
            runs.append((row, row + count))
        first += count
    return runs


def _check_written_rows(read: Sequence[list[Run]], written: Sequence[list[Run]]) -> None:
    """Check that every written row holds only one token of one sequence."""
    parts = [(*run, b, is_new) for is_new, all_runs in ((False, read), (True, written))
             for b, runs in enumerate(all_runs) for run in runs]  # fmt: skip
    any_end = written_end = (0, 0)  # the largest end so far, and its sequence
    for first, end, b, is_new in sorted(parts):  # a run overlaps earlier ones that end past its first row
        other_end, other = any_end if is_new else written_end
        if other_end > first:
            writer, holder = (b, other) if is_new else (other, b)
            raise ValueError(
                f"cachestarts: sequence {writer} writes row {first} of the cache, which holds another token "
                f"of sequence {holder}; expected one token in a written row"
            )
        any_end = max(any_end, (end, b))
        if is_new:  # it overlaps no earlier run, so its end is the largest
            written_end = (end, b)


def _check_entries(name: str, entries: Sequence[Any], least: int, most: int | None) -> None:
    check_numbers([(f"the number of entries of {name}", len(entries), least, most)])


def _ints(name: str, argument: Any) -> list[int]:
    """Return the ints of a one-dimensional integer array or of a sequence."""
    return [as_int(x, f"{name}[{i}]") for i, x in enumerate(_listed(name, argument, 1))]


def _listed(name: str, argument: Any, ndim: int) -> Sequence[Any]:
    """Return the entries of an integer array with ``ndim`` dimensions or of a sequence."""
    if isinstance(argument, mx.array):
        if argument.ndim != ndim or not mx.issubdtype(argument.dtype, mx.integer):
            kind = f"{argument.dtype} {argument.shape}"
            raise ValueError(f"{name} is an array, {kind}; expected integers, number of dimensions {ndim}")
        return argument.tolist()  # type: ignore[return-value]
    if not isinstance(argument, Sequence) or isinstance(argument, str | bytes | bytearray):
        raise ValueError(
            f"{name} is a {type(argument).__name__}; expected integers in an mx.array or a sequence"
        )
    return argument

"""Checks of PMX's dynamic operators, and which rows of the cache a call reads and writes.

N new tokens of all sequences, laid end to end; T tokens that all sequences then have; MaxT rows of the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx

from kvant.operators.validation import MAX_ELEMENTS, as_int, check_current, check_layout

LAYOUTS = (
    ("MaxT", "L", "2", "H", "Dh"),
    ("L", "MaxT", "2", "H", "Dh"),
    ("L", "2", "MaxT", "H", "Dh"),
    ("L", "2", "H", "MaxT", "Dh"),
)
Run = tuple[int, int]  # first row and last row + 1 of the cache


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """One of the sequences of a call.

    Attributes:
        queries: its new tokens among the N.
        keys: all its tokens among the T.
        runs: the rows that hold its tokens, in order; rows side by side are one run.
        new_runs: those of them that the call writes.
    """

    queries: slice
    keys: slice
    runs: list[Run]
    new_runs: list[Run]

    @property
    def new_tokens(self) -> int:
        return int(self.queries.stop - self.queries.start)

    @property
    def tokens(self) -> int:
        return int(self.keys.stop - self.keys.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCall:
    """One checked call.

    Attributes:
        arrays: the caller's cache, and scale where there is one.
        sequences: all of them, in order.
        layer_idx, quant_bit, quant_group, cache_layout: as given.
    """

    arrays: list[mx.array]
    sequences: list[PackedSequence]
    layer_idx: int
    quant_bit: int
    quant_group: int
    cache_layout: int

    @property
    def new_tokens(self) -> int:
        """N."""
        return int(self.sequences[-1].queries.stop)

    @property
    def tokens(self) -> int:
        """T."""
        return int(self.sequences[-1].keys.stop)


def check_packed_call(
    current_key: mx.array,
    current_value: mx.array,
    seqstarts: mx.array | Sequence[int],
    kvstarts: mx.array | Sequence[int],
    cachestarts: mx.array | Sequence[int] | Sequence[Sequence[int]],
    start_pos: mx.array | Sequence[int],
    max_seqlen: int,
    max_kvlen: int,
    cache: mx.array,
    scale: mx.array | None,
    *,
    num_layer: int,
    layer_idx: int,
    quant_bit: int,
    quant_group: int,
    cache_mode: int,
    cache_layout: int,
    page_size: int,
) -> PackedCall:
    """Check the inputs both dynamic operators share; raise a ValueError that names the first defect."""
    check_current(("N", "H", "Dh"), current_key, current_value, cache, scale, quant_bit, quant_group)
    sizes = check_layout(
        LAYOUTS,
        current_key,
        cache,
        scale,
        num_layer=num_layer,
        layer_idx=layer_idx,
        quant_bit=quant_bit,
        quant_group=quant_group,
        cache_layout=cache_layout,
    )
    seqlens, kvlens = _lengths(current_key.shape[0], seqstarts, kvstarts, start_pos)
    for name, given, lengths in (("max_seqlen", max_seqlen, seqlens), ("max_kvlen", max_kvlen, kvlens)):
        if as_int(given, name) != max(lengths):
            raise ValueError(f"{name} is {given}; expected {max(lengths)}, that of the longest sequence")
    sequences: list[PackedSequence] = []
    query = key = 0
    tables = _page_tables(cachestarts, kvlens, cache_mode, page_size)
    for b, ((table, page), seqlen, kvlen) in enumerate(zip(tables, seqlens, kvlens, strict=True)):
        _check_pages(b, table, page, kvlen, sizes["MaxT"], cache_mode)
        runs, new_runs = (cache_runs(table, page, first, kvlen) for first in (0, kvlen - seqlen))
        sequences.append(PackedSequence(slice(query, query + seqlen), slice(key, key + kvlen), runs, new_runs))
        query, key = query + seqlen, key + kvlen
    _check_written_rows(tables, seqlens, kvlens)
    return PackedCall(
        arrays=[cache] if scale is None else [cache, scale],
        sequences=sequences,
        layer_idx=as_int(layer_idx, "layer_idx"),
        quant_bit=quant_bit,
        quant_group=quant_group,
        cache_layout=cache_layout,
    )


def check_packed_attention(
    mask: mx.array | None, call: PackedCall, decoding_batches: int, num_heads: int, key_elements: int
) -> None:
    """Check what only the attention has: a mask's shape, ``decoding_batches`` and the size of a sequence's keys.

    A token's keys have ``key_elements`` elements.
    """
    if not 0 <= as_int(decoding_batches, "decoding_batches") <= len(call.sequences):
        raise ValueError(f"decoding_batches is {decoding_batches}; expected 0 to {len(call.sequences)}")
    longest = max(sequence.tokens for sequence in call.sequences)
    if longest * key_elements > MAX_ELEMENTS:
        raise ValueError(f"a sequence has {longest} tokens; expected at most {MAX_ELEMENTS // key_elements}")
    if mask is None:
        return
    N, T = call.new_tokens, call.tokens
    fits = mask.ndim in (2, 3) and mask.shape[-2] == N and mask.shape[-1] >= T
    if not fits or (mask.ndim == 3 and mask.shape[0] != num_heads):
        raise ValueError(f"attn_mask has shape {tuple(mask.shape)}; expected ({N}, >={T}) or ({num_heads}, {N}, >={T})")


def cache_runs(table: Sequence[int], page_size: int, first: int, end: int) -> list[Run]:
    """The rows of tokens first to end - 1 of a sequence. Page i of ``table`` begins at row table[i]."""
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


def _lengths(
    new_tokens: int,
    seqstarts: mx.array | Sequence[int],
    kvstarts: mx.array | Sequence[int],
    start_pos: mx.array | Sequence[int],
) -> tuple[list[int], list[int]]:
    """The number of new tokens, and of all tokens, of each sequence."""
    starts = _ints(start_pos, "start_pos")
    seq, kv = _prefix_sums(seqstarts, "seqstarts", len(starts)), _prefix_sums(kvstarts, "kvstarts", len(starts))
    if seq[-1] != new_tokens:
        raise ValueError(f"seqstarts ends with {seq[-1]}; expected {new_tokens}, the rows of current_key")
    seqlens, kvlens = ([b - a for a, b in pairwise(sums)] for sums in (seq, kv))
    for b, (start, seqlen, kvlen) in enumerate(zip(starts, seqlens, kvlens, strict=True)):
        if start < 0:
            raise ValueError(f"start_pos[{b}] is {start}; expected at least 0")
        if kvlen != start + seqlen:
            raise ValueError(
                f"kvstarts gives sequence {b} {kvlen} tokens; expected {start + seqlen}, "
                f"start_pos {start} and {seqlen} new ones"
            )
    return seqlens, kvlens


def _prefix_sums(given: mx.array | Sequence[int], name: str, batch: int) -> list[int]:
    sums = _ints(given, name)
    if len(sums) != batch + 1:
        raise ValueError(f"{name} has {len(sums)} entries; expected {batch + 1}, one more than start_pos")
    if sums[0] != 0:
        raise ValueError(f"{name} begins with {sums[0]}; expected 0")
    for b in range(batch):
        if sums[b + 1] < sums[b]:
            raise ValueError(f"{name}[{b + 1}] is {sums[b + 1]}; expected at least {sums[b]}, the entry before it")
    return sums


def _page_tables(
    cachestarts: mx.array | Sequence[int] | Sequence[Sequence[int]],
    kvlens: list[int],
    cache_mode: int,
    page_size: int,
) -> list[tuple[list[int], int]]:
    """The rows at which each sequence's pages begin, and the size of a page. In cache_mode 0 it has one page."""
    if type(cache_mode) is not int or cache_mode not in (0, 1):
        raise ValueError(f"cache_mode is {cache_mode!r}; expected one of 0, 1")
    page_size = as_int(page_size, "page_size")
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}; expected a positive int")
    batch = len(kvlens)
    if cache_mode == 0:
        entries = _ints(cachestarts, "cachestarts")
        if len(entries) != batch:
            raise ValueError(f"cachestarts has {len(entries)} entries; expected {batch}, one a sequence")
        return [([entry], max(kvlen, 1)) for entry, kvlen in zip(entries, kvlens, strict=True)]
    if isinstance(cachestarts, mx.array):
        _check_array(cachestarts, "cachestarts", 2)
        cachestarts = cachestarts.tolist()  # type: ignore[assignment]
    _check_sequence(cachestarts, "cachestarts")
    if len(cachestarts) != batch:
        raise ValueError(f"cachestarts has {len(cachestarts)} page tables; expected {batch}, one a sequence")
    tables = [_ints(table, f"cachestarts[{b}]") for b, table in enumerate(cachestarts)]
    for b, (table, kvlen) in enumerate(zip(tables, kvlens, strict=True)):
        needed = -(-kvlen // page_size)
        if len(table) < needed:
            raise ValueError(
                f"cachestarts[{b}] has {len(table)} entries; expected at least {needed}, "
                f"{kvlen} tokens in pages of {page_size} rows"
            )
    return [(table, page_size) for table in tables]


def _check_pages(b: int, table: list[int], page_size: int, kvlen: int, max_rows: int, cache_mode: int) -> None:
    """Check that the rows of a sequence's tokens are rows of the cache. Entries behind the last token do not count."""
    for page in range(-(-kvlen // page_size)):
        entry, count = table[page], min(page_size, kvlen - page * page_size)
        if entry < 0 or entry + count > max_rows:
            name = f"cachestarts[{b}]" if cache_mode == 0 else f"cachestarts[{b}][{page}]"
            raise ValueError(f"{name} is {entry}; {count} tokens from there do not fit a cache of {max_rows} rows")


def _check_written_rows(tables: list[tuple[list[int], int]], seqlens: list[int], kvlens: list[int]) -> None:
    """Check that a row that is written holds one token only, of one sequence."""
    parts: list[tuple[int, int, int, bool]] = []  # first row, last row + 1, sequence, written
    for b, ((table, page_size), seqlen, kvlen) in enumerate(zip(tables, seqlens, kvlens, strict=True)):
        start = kvlen - seqlen
        parts += [(*run, b, False) for run in cache_runs(table, page_size, 0, start)]
        parts += [(*run, b, True) for run in cache_runs(table, page_size, start, kvlen)]
    # In the order of their first rows. A part overlaps an earlier one where that one's end is past its first row.
    any_end = written_end = (0, 0)  # the largest end so far, and its sequence
    for first, end, b, written in sorted(parts):
        other_end, other = any_end if written else written_end
        if other_end > first:
            writer, holder = (b, other) if written else (other, b)
            raise ValueError(
                f"sequence {writer} writes row {first} of the cache, which holds another token of sequence {holder}; "
                "expected one token in a written row"
            )
        any_end = max(any_end, (end, b))
        if written:  # it overlaps nothing before it, so its end is the largest
            written_end = (end, b)


def _ints(given: object, name: str) -> list[int]:
    """The ints of an integer array of one dimension, or of a sequence."""
    if isinstance(given, mx.array):
        _check_array(given, name, 1)
        return given.tolist()  # type: ignore[return-value]
    _check_sequence(given, name)
    return [as_int(x, f"{name}[{i}]") for i, x in enumerate(given)]  # type: ignore[arg-type, var-annotated]


def _check_array(given: mx.array, name: str, ndim: int) -> None:
    if given.ndim != ndim or not mx.issubdtype(given.dtype, mx.integer):
        raise ValueError(
            f"{name} is an array of shape {tuple(given.shape)} and dtype {given.dtype}; "
            f"expected integers in {ndim} dimension{'s' if ndim > 1 else ''}"
        )


def _check_sequence(given: object, name: str) -> None:
    if not isinstance(given, Sequence) or isinstance(given, str | bytes | bytearray):
        raise ValueError(f"{name} is a {type(given).__name__}; expected an integer mx.array or a sequence of ints")

"""The exact tail: the first and the last tokens of a sequence, which a layer also stores as floats.

Attention to quantized keys errs most at the tokens that a query attends to most: the first and the most
recent ones. So a query reads the first ``SINKS`` tokens and its last W tokens, including its own, as floats,
and all others quantized. The quantized rows stay complete: a sequence that lacks some exact rows reads the
quantized ones instead.

The exact rows of a sequence are one page of ``TAIL_ROWS`` rows, which never grows: the first tokens, and a
ring of the others. The ring has ``SLACK`` rows more than a query reads, so a step of up to ``SLACK + 1``
tokens can be undone after it was written.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from kvant.operators.kernels.attend import PAGE_SIZE
from kvant.operators.row_runs import Run, cut_runs, stored_rows
from kvant.operators.stored_tokens import keys_and_values

TAIL_ROWS = PAGE_SIZE
SINKS = 4  # first tokens; StreamingLLM (arXiv 2309.17453) keeps as many
SLACK = 16  # tokens that a sequence can always go back
RING = TAIL_ROWS - SINKS
TAIL_WINDOW = RING - SLACK  # W


@dataclass(frozen=True, slots=True)
class ExactRows:
    """The exact rows of a step's sequences. Each list has an entry for every sequence.

    The rows of a sequence are those of positions 0 to ``sinks``, then those from ``starts`` to ``ends``.

    Attributes:
        new: the rows of the new tokens, as in :class:`kvant.operators.paged_rows.PagedRows`.
        runs: the rows to read, in the order of positions. If ``new`` is None, the new tokens follow them and
            are written later.
        sinks: how many of the first tokens are read.
        starts: position of the first row after these.
        ends: position past the last row, which is a new token's.
        page_numbers: the page of each sequence.
        pages: the same for the fused kernel; None: the kernel does not support the step.
        masks: cache of the arrays that the unfused attention of all layers shares.
    """

    new: list[Run] | mx.array | None
    runs: list[list[Run]]
    sinks: list[int]
    starts: list[int]
    ends: list[int]
    page_numbers: list[int]
    pages: "ExactPages | None" = None
    masks: dict[Any, Any] = field(default_factory=dict, repr=False)

    def only(self, share: slice) -> "ExactRows":
        """Return the rows of some of the sequences."""
        if share == slice(0, len(self.runs)):
            return self
        return replace(
            self,
            runs=self.runs[share],
            sinks=self.sinks[share],
            starts=self.starts[share],
            ends=self.ends[share],
            page_numbers=self.page_numbers[share],
            masks=self.masks.setdefault((share.start, share.stop), {}),
        )

    def tail_start(self, sequence: int, position: int) -> int:
        """Return the start of the tail read by the query at ``position``; past it if there is none."""
        return min(max(position + 1 - TAIL_WINDOW, self.starts[sequence]), position + 1)

    @property
    def positions(self) -> mx.array:
        """Return the position of the token in each row of each page: (B, TAIL_ROWS), 0 for empty rows."""
        key = ("positions", self.ends[0], len(self.ends))
        if key not in self.masks:
            by_page = [[max(0, position) for position in self._in_page(b)] for b in range(len(self.ends))]
            self.masks[key] = mx.array(by_page, mx.int32)
        positions: mx.array = self.masks[key]
        return positions

    def hidden(self, new_tokens: int, window: int | None) -> mx.array:
        """Return a mask to add to the scores of each page's rows: (B, S, 1, 1, TAIL_ROWS), 0 or -inf."""
        key = ("hidden", self.ends[0], len(self.ends), new_tokens, window)
        if key not in self.masks:
            added = [
                [self._hidden(sequence, position, window) for position in range(end - new_tokens, end)]
                for sequence, end in enumerate(self.ends)
            ]
            self.masks[key] = mx.array(added)[:, :, None, None]
        mask: mx.array = self.masks[key]
        return mask

    def _hidden(self, sequence: int, position: int, window: int | None) -> list[float]:
        start = self.tail_start(sequence, position)
        sinks = self.sinks[sequence]
        low = 0 if window is None else max(0, position + 1 - window)
        tokens = self._in_page(sequence)
        read = (low <= token <= position and (token >= start or token < sinks) for token in tokens)
        return [0.0 if is_read else -math.inf for is_read in read]

    def _in_page(self, sequence: int) -> list[int]:
        """Return the position of the token in each row of a sequence's page; negative for empty rows."""
        last = self.ends[sequence] - 1 - SINKS  # counted after the first tokens
        first = [row if row <= last + SINKS else -1 for row in range(SINKS)]
        others = [last - (last - row) % RING for row in range(RING)]
        return [*first, *(-1 if token < 0 else token + SINKS for token in others)]

    def before(self, end: int) -> "ExactRows":
        """Return the rows for the queries of the single sequence before position ``end``."""
        (runs,) = self.runs
        return replace(self, runs=[cut_runs(runs, 0, self.count_before(0, end))], ends=[end])

    def count_before(self, sequence: int, position: int) -> int:
        """Return how many rows hold tokens before a position."""
        sinks = self.sinks[sequence]
        return min(position, sinks) + max(0, position - max(sinks, self.starts[sequence]))


@dataclass(frozen=True, slots=True)
class ExactPages:
    """The exact rows of B sequences for the fused kernel.

    Attributes:
        table: (B, 8) int32; column 0 is each sequence's page.
        spans: (max(B, 2), 4) int32: the ``sinks``, ``starts`` and ``ends`` of each sequence, and 0. A row
            past B is not read.
    """

    table: mx.array
    spans: mx.array


@dataclass(frozen=True, slots=True)
class ExactTail:
    """The exact rows of a layer in a step.

    Attributes:
        rows: which rows.
        arrays: (2, K, rows, D) floats, or (1, K, rows, D + Dv) if keys and values differ in width.
        waiting: the new tokens of each sequence in the same form, if they are written later.
    """

    rows: ExactRows
    arrays: Sequence[mx.array]
    waiting: Sequence[mx.array] = ()

    def only(self, share: slice) -> "ExactTail":
        """Return the tail of some of the sequences."""
        return replace(self, rows=self.rows.only(share), waiting=self.waiting[share])

    def read(self, dtype: mx.Dtype) -> list[mx.array]:
        """Return the rows of each sequence, in the order of positions: (2, K, rows, D) in ``dtype``."""
        return [self.read_one(sequence, dtype) for sequence in range(len(self.rows.runs))]

    def read_pages(self, dtype: mx.Dtype, key_dim: int) -> tuple[mx.array, mx.array]:
        """Return keys (B, K, TAIL_ROWS, D) and values of each sequence's page, in the page's order."""
        (array,) = self.arrays
        pages = self.rows.page_numbers
        # (2, K, rows, D) -> (2, K, pages, TAIL_ROWS, D)
        array = array.reshape(*array.shape[:2], -1, TAIL_ROWS, array.shape[3])
        if pages == [*range(pages[0], pages[0] + len(pages))]:
            array = array[:, :, pages[0] : pages[0] + len(pages)]
        else:
            array = mx.take(array, mx.array(pages), axis=2)
        # (2, K, B, TAIL_ROWS, D) -> (B, 2, K, TAIL_ROWS, D)
        return keys_and_values([array.astype(dtype).transpose(2, 0, 1, 3, 4)], key_dim)

    def read_one(self, sequence: int, dtype: mx.Dtype) -> mx.array:
        """Return the rows of one sequence."""
        (array,) = self.arrays
        runs = self.rows.runs[sequence]
        if self.waiting:
            rows = mx.concatenate([stored_rows(array, runs), self._waiting(sequence)], axis=2)
        else:
            rows = array[:, :, slice(*runs[0])] if len(runs) == 1 else stored_rows(array, runs)
        return rows.astype(dtype)

    def pieces(self, sequence: int, first: int, end: int) -> Iterator[mx.array]:
        """Yield the rows of positions ``first`` to ``end``, in order."""
        (array,) = self.arrays
        runs = self.rows.runs[sequence]
        start = self.rows.count_before(sequence, first)
        stop = self.rows.count_before(sequence, end)
        for run in cut_runs(runs, start, stop):
            yield array[:, :, slice(*run)]
        written = sum(last - begin for begin, last in runs)
        if self.waiting and stop > written:
            yield self._waiting(sequence)[:, :, max(0, start - written) : stop - written]

    def _waiting(self, sequence: int) -> mx.array:
        """Return the unwritten new tokens of a sequence that are read exactly.

        First tokens (below ``SINKS``) are excluded if the sequence does not read them exactly.
        """
        new = self.waiting[sequence]
        written = sum(last - begin for begin, last in self.rows.runs[sequence])
        count = self.rows.count_before(sequence, self.rows.ends[sequence]) - written
        return new if count == new.shape[2] else new[:, :, -count:]


@dataclass(slots=True)
class ExactSpan:
    """Which tokens of a sequence have exact rows: the first ``sinks``, and those from ``start`` on.

    Attributes:
        page: the page that holds them.
        sinks: ``SINKS``, or 0 if the first tokens were copied from another sequence without exact rows.
        start: at least ``SINKS``.
    """

    page: int
    sinks: int = SINKS
    start: int = SINKS

    def go_back(self, length: int) -> None:
        """Shorten the sequence to its first ``length`` tokens."""
        if not length:
            self.sinks = SINKS
        self.start = max(SINKS, min(self.start, length))

    def lose(self, length: int) -> None:
        """Note that the sequence now has ``length`` tokens, none with exact rows."""
        self.sinks = 0 if length else SINKS
        self.start = max(SINKS, length)

    def is_whole(self, length: int) -> bool:
        """Return whether the query at position ``length`` finds all rows of its tail."""
        return self.start <= max(SINKS, length + 1 - TAIL_WINDOW)

    def will_write(self, end: int) -> None:
        """Note that tokens before ``end`` are written, which overwrites the oldest rows of the ring."""
        self.start = max(self.start, end - RING)

    def runs(self, first: int, end: int) -> list[Run]:
        """Return the rows of positions ``first`` to ``end``, fewer than ``RING`` past the first tokens."""
        base = self.page * TAIL_ROWS
        runs = [(base + first, base + min(end, SINKS))] if first < min(end, SINKS) else []
        first = max(first, SINKS) - SINKS
        while first < end - SINKS:
            row = first % RING
            count = min(end - SINKS - first, RING - row)
            runs.append((base + SINKS + row, base + SINKS + row + count))
            first += count
        return runs

    def read(self, length: int, end: int) -> tuple[int, list[Run]]:
        """Return the tail's start for the query at position ``length``, and all exact rows up to ``end``."""
        start = max(self.start, length + 1 - TAIL_WINDOW)
        sinks = self.runs(0, min(self.sinks, end))
        tail = self.runs(start, end)
        if sinks and tail and sinks[-1][1] == tail[0][0]:  # contiguous until the ring wraps
            joined = (sinks[-1][0], tail[0][1])
            return min(start, end), [*sinks[:-1], joined, *tail[1:]]
        return min(start, end), [*sinks, *tail]

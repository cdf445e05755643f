"""The exact tails of a pool's sequences: pages of floats in addition to the quantized rows.

A quantizing layer also stores the first and the last tokens of each sequence as floats, in a page of fixed
size that belongs to the sequence while it is open; :mod:`kvant.operators.exact_rows` explains which tokens.
A sequence that shares a prefix lacks its exact rows, unless a checkpoint has them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import mlx.core as mx

from kvant.cache.layer_format import LayerFormat, stored_of
from kvant.cache.pages import Pages
from kvant.operators.exact_rows import RING, SINKS, SLACK, TAIL_ROWS, ExactRows, ExactSpan
from kvant.operators.paged_kernel import exact_pages
from kvant.operators.row_runs import Run, put_rows, stored_rows

if TYPE_CHECKING:
    from kvant.cache.layer_group import PoolLayer


@dataclass(frozen=True, slots=True)
class TailCopy:
    """A copy of a sequence's exact rows, for a checkpoint or a file.

    Attributes:
        sinks: how many of the first tokens it has.
        start: position of the first row after these.
        length: tokens of the sequence.
        rows: (2, K, rows, D) for each layer with a tail.
    """

    sinks: int
    start: int
    length: int
    rows: Sequence[mx.array]

    @classmethod
    def checked(
        cls,
        sinks: int,
        start: int,
        length: int,
        rows: Sequence[mx.array | None],
        formats: Sequence[LayerFormat],
    ) -> "TailCopy":
        """Return the tail described by a file; raise a ValueError if the layers cannot have it."""
        check_tail((sinks, start), length)
        expected = [layer.tail(sinks + length - start)[0] for layer in formats]
        arrays = [array for array in rows if array is not None]
        if [stored_of([array])[0] for array in arrays] != expected or len(arrays) != len(rows):
            raise ValueError(f"a tail of {len(rows)} arrays that are not those of its layers")
        return cls(sinks, start, length, arrays)


def check_tail(numbers: Sequence[int], length: int) -> tuple[int, int]:
    """Return a tail's ``sinks`` and ``start``; raise a ValueError unless ``length`` tokens can have them."""
    if len(numbers) == 2:
        sinks, start = numbers
        least = min(SINKS, length)
        if sinks in (0, least) and least <= start <= length and length - start <= RING:
            return sinks, start
    raise ValueError(f"a tail of {numbers!s:.80}; expected one that {length} tokens can have")


class DeferredTail:
    """The exact new tokens of a sequence that are read later, until their step is committed."""

    def __init__(self, length: int, new_tokens: int) -> None:
        """``length``: tokens of the sequence before the step."""
        end = length + new_tokens
        self.ranges: list[Run] = [(max(length, SINKS, end - RING), end)]  # positions of the tokens
        if length < SINKS:
            self.ranges.insert(0, (length, SINKS))
        self.length = length
        self.num_tokens = 0  # committed tokens
        self.before: ExactSpan | None = None  # the sequence's span before the commit
        self.layers: list[tuple[PoolLayer, mx.array]] = []  # each with its tokens (2, K, n, D)

    @property
    def arrays(self) -> list[mx.array]:
        """Return the tokens of all layers."""
        return [tokens for _, tokens in self.layers]

    def add(self, layer: "PoolLayer", tokens: mx.array) -> mx.array:
        """Store the needed ones of a layer's new tokens (2, K, S, D), and return them."""
        rows = stored_rows(tokens, [(first - self.length, end - self.length) for first, end in self.ranges])
        self.layers.append((layer, rows))
        return rows

    def commit(self, span: ExactSpan, num_tokens: int) -> None:
        """Note that the first ``num_tokens`` tokens are committed; until written, the span excludes them."""
        self.before = replace(span)
        self.num_tokens = num_tokens
        if self.length < SINKS:
            span.sinks = 0
        span.start = max(span.start, self.length + num_tokens)


# Actions that other ranks repeat: ("clear", page), ("copy", page, to), or ("write", page, length, num_tokens)
# for the first deferred tokens of a sequence of this length.
TailEvent = tuple[str, int] | tuple[str, int, int] | tuple[str, int, int, int]


class ExactTails:
    """The pages of a pool's exact tails."""

    def __init__(self, layers: Sequence["PoolLayer"], sequences: int, *, logs: bool = False) -> None:
        """
        Args:
            layers: the layers of the pool that have a tail.
            sequences: how many can be open at once.
            logs: record events for :meth:`take_events`.
        """
        self.layers = tuple(layers)
        self._pages = Pages(sequences)
        self._logs = logs
        self._events: list[TailEvent] = []

    def open(self) -> ExactSpan:
        """Return the span of a new sequence without tokens.

        Its page is cleared, because attention multiplies unread rows by 0, which keeps NaN and infinity.
        """
        (page,) = self._pages.allocate(1)
        self.clear(page)
        return ExactSpan(page)

    def clear(self, page: int) -> None:
        """Fill a page with zeros, in all layers."""
        if self._logs:
            self._events.append(("clear", page))
        for layer in self.layers:
            (array,) = layer.exact_arrays
            array[:, :, page * TAIL_ROWS : (page + 1) * TAIL_ROWS] = 0

    def close(self, span: ExactSpan) -> None:
        """Free the page of a sequence."""
        self._pages.release([span.page])

    def fork(self, span: ExactSpan, to: ExactSpan) -> None:
        """Give the span of a new sequence the rows of another."""
        self.copy(span.page, to.page)
        to.sinks = span.sinks
        to.start = span.start

    def copy(self, page: int, to: int) -> None:
        """Copy a page to another, in all layers."""
        if self._logs:
            self._events.append(("copy", page, to))
        for layer in self.layers:
            (array,) = layer.exact_arrays
            rows = stored_rows(array, [(page * TAIL_ROWS, (page + 1) * TAIL_ROWS)])
            mx.eval(rows)  # before the write: MLX would copy the whole array for it
            put_rows(array, rows, [(to * TAIL_ROWS, (to + 1) * TAIL_ROWS)])

    def copied(self, span: ExactSpan, length: int) -> TailCopy:
        """Return a copy of the rows of a sequence of ``length`` tokens."""
        start = min(span.start, length)
        sinks = min(span.sinks, length)
        rows = [*span.runs(0, sinks), *span.runs(start, length)]
        copies = [stored_rows(layer.exact_arrays[0], rows) for layer in self.layers]
        mx.eval(copies)
        return TailCopy(sinks, start, length, copies)

    def restore(self, span: ExactSpan, copy: TailCopy) -> None:
        """Restore a copy's rows in a sequence of the same length."""
        rows = [*span.runs(0, copy.sinks), *span.runs(copy.start, copy.length)]
        for layer, tokens in zip(self.layers, copy.rows, strict=True):
            put_rows(layer.exact_arrays[0], tokens, rows)
        mx.eval([layer.exact_arrays for layer in self.layers])
        span.sinks = SINKS if copy.sinks == min(SINKS, copy.length) else 0
        span.start = max(SINKS, copy.start)

    def write(self, span: ExactSpan, tail: DeferredTail) -> None:
        """Write the committed tokens of a deferred step, and add them to the span."""
        assert tail.before is not None
        if self._logs:
            self._events.append(("write", span.page, tail.length, tail.num_tokens))
        end = tail.length + tail.num_tokens
        start = max(tail.before.start, end - RING)
        first, _ = tail.ranges[-1]
        if first > max(tail.length, SINKS):  # earlier new tokens were not stored
            start = max(start, min(first, end))
        tail.before.start = start  # earlier rows are about to be overwritten
        before = 0
        for first, last in tail.ranges:
            if (stop := min(last, end)) > first:
                rows = span.runs(first, stop)
                for layer, tokens in tail.layers:
                    put_rows(layer.exact_arrays[0], tokens[:, :, before : before + stop - first], rows)
            before += last - first
        span.start = start
        span.sinks = tail.before.sinks

    def take_events(self) -> list[TailEvent]:
        """Return the events since the last call, if they are recorded."""
        events = self._events
        self._events = []
        return events


def place_exact(
    spans: Sequence[ExactSpan], lengths: Sequence[int], new_tokens: int, *, fused: bool
) -> ExactRows:
    """Return where S new tokens of each sequence are written, and the rows that their queries read.

    More than ``SLACK + 1`` new tokens are written when their step is committed.
    """
    is_deferred = new_tokens > SLACK + 1
    new: list[list[Run]] = []
    read: list[list[Run]] = []
    starts: list[int] = []
    ends = [length + new_tokens for length in lengths]
    for span, length, end in zip(spans, lengths, ends, strict=True):
        span.go_back(length)  # in case a trim was interrupted
        if not is_deferred:
            new.append(span.runs(length, end))
        start, rows = span.read(length, length if is_deferred else end)
        if not is_deferred:
            span.will_write(end)
        read.append(rows)
        starts.append(min(max(start, SINKS), end))
    sinks = [min(span.sinks, end) for span, end in zip(spans, ends, strict=True)]
    written: list[Run] | mx.array | None = None
    if not is_deferred:
        written = new[0]
        if len(new) > 1:
            written = mx.array([row for runs in new for run in runs for row in range(*run)], mx.int32)
    pages = exact_pages(spans, sinks, starts, ends) if fused and not is_deferred else None
    return ExactRows(written, read, sinks, starts, ends, [span.page for span in spans], pages)

"""The exact tails of a pool's sequences: pages of floats beside the quantized rows.

A layer that quantizes stores the first and the last tokens of each sequence as floats too, in a page of a
fixed size that belongs to the sequence while it is open; :mod:`kvant.operators.exact_rows` says which tokens
these are. A sequence that begins with tokens of others lacks their exact rows, unless a checkpoint kept them.
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
    """The exact rows of a sequence, as a checkpoint or a file keeps them.

    Attributes:
        sinks: how many of the first tokens there are.
        start: position of the first row behind these.
        length: tokens of the sequence.
        rows: of each layer that has a tail: (2, K, rows, D).
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
        """Return what a file says of the tail of layers; a ValueError if that cannot be one."""
        check_tail((sinks, start), length)
        expected = [own.tail(sinks + length - start)[0] for own in formats]
        found = [array for array in rows if array is not None]
        if [stored_of([array])[0] for array in found] != expected or len(found) != len(rows):
            raise ValueError(f"a tail of {len(rows)} arrays that are not those of its layers")
        return cls(sinks, start, length, found)


def check_tail(numbers: Sequence[int], length: int) -> tuple[int, int]:
    """Return how many of the first tokens a tail has, and where the rest of it starts; a ValueError unless a
    sequence of so many tokens can have such a tail.
    """
    if len(numbers) == 2:
        sinks, start = numbers
        least = min(SINKS, length)
        if sinks in (0, least) and least <= start <= length and length - start <= RING:
            return sinks, start
    raise ValueError(f"a tail of {numbers!s:.80}; expected its first tokens and where it starts, of {length}")


class DeferredTail:
    """Exact new tokens of a sequence until their step is committed, as many of them as are read later."""

    def __init__(self, length: int, new_tokens: int) -> None:
        """``length``: tokens of the sequence before the step."""
        end = length + new_tokens
        # Positions of the tokens.
        self.ranges: list[Run] = [(max(length, SINKS, end - RING), end)]
        if length < SINKS:
            self.ranges.insert(0, (length, SINKS))
        self.length = length
        self.num_tokens = 0  # that are committed
        # The sequence's span before they were.
        self.before: ExactSpan | None = None
        self.layers: list[tuple[PoolLayer, mx.array]] = []  # with (2, K, n, D) of each

    @property
    def arrays(self) -> list[mx.array]:
        """The tokens of all layers."""
        return [tokens for _, tokens in self.layers]

    def add(self, layer: "PoolLayer", tokens: mx.array) -> mx.array:
        """Keep what is needed of a layer's new tokens (2, K, S, D), and return it."""
        kept = stored_rows(tokens, [(first - self.length, end - self.length) for first, end in self.ranges])
        self.layers.append((layer, kept))
        return kept

    def commit(self, span: ExactSpan, num_tokens: int) -> None:
        """Note that the first ``num_tokens`` tokens are committed; the span lacks them until they are
        written.
        """
        self.before = replace(span)
        self.num_tokens = num_tokens
        if self.length < SINKS:
            span.sinks = 0
        span.start = max(span.start, self.length + num_tokens)


# What other ranks do as well: "clear" a page, "copy" it to another, or "write" to it, behind so many tokens,
# the first of those that waited.
TailEvent = tuple[str, int] | tuple[str, int, int] | tuple[str, int, int, int]


class ExactTails:
    """The pages of a pool's exact tails."""

    def __init__(self, layers: Sequence["PoolLayer"], sequences: int, *, logs: bool = False) -> None:
        """
        Args:
            layers: those of the pool that have a tail.
            sequences: that can be open at once.
            logs: note what was written, for :meth:`take_events`.
        """
        self.layers = tuple(layers)
        self._pages = Pages(sequences)
        self._logs = logs
        self._events: list[TailEvent] = []

    def open(self) -> ExactSpan:
        """Return the span of a new sequence without tokens.

        Its page is cleared: all rows are multiplied, those that are not read by 0, which does not remove what
        is not finite.
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
        """Give the page of a sequence back."""
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
        """Return a copy of the rows of a sequence of so many tokens."""
        start = min(span.start, length)
        sinks = min(span.sinks, length)
        rows = [*span.runs(0, sinks), *span.runs(start, length)]
        copies = [stored_rows(layer.exact_arrays[0], rows) for layer in self.layers]
        mx.eval(copies)
        return TailCopy(sinks, start, length, copies)

    def restore(self, span: ExactSpan, copy: TailCopy) -> None:
        """Give a sequence the rows of a copy, whose length it has."""
        rows = [*span.runs(0, copy.sinks), *span.runs(copy.start, copy.length)]
        for layer, tokens in zip(self.layers, copy.rows, strict=True):
            put_rows(layer.exact_arrays[0], tokens, rows)
        mx.eval([layer.exact_arrays for layer in self.layers])
        span.sinks = SINKS if copy.sinks == min(SINKS, copy.length) else 0
        span.start = max(SINKS, copy.start)

    def write(self, span: ExactSpan, tail: DeferredTail) -> None:
        """Write the deferred tokens of a step that are committed, and put them into the span."""
        assert tail.before is not None
        if self._logs:
            self._events.append(("write", span.page, tail.length, tail.num_tokens))
        end = tail.length + tail.num_tokens
        start = max(tail.before.start, end - RING)
        first, _ = tail.ranges[-1]
        if first > max(tail.length, SINKS):  # those before it were not kept
            start = max(start, min(first, end))
        tail.before.start = start  # rows before it are going to be written over
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
        """Return what was done to the pages since the last call, if that is noted."""
        events = self._events
        self._events = []
        return events


def place_exact(
    spans: Sequence[ExactSpan], lengths: Sequence[int], new_tokens: int, *, fused: bool
) -> ExactRows:
    """Return where S new tokens of each sequence are written, and what their queries read.

    More than ``SLACK + 1`` new tokens are written when their step is committed.
    """
    waits = new_tokens > SLACK + 1
    new: list[list[Run]] = []
    read: list[list[Run]] = []
    starts: list[int] = []
    ends = [length + new_tokens for length in lengths]
    for span, length, end in zip(spans, lengths, ends, strict=True):
        span.go_back(length)  # if a trim was interrupted
        if not waits:
            new.append(span.runs(length, end))
        start, rows = span.read(length, length if waits else end)
        if not waits:
            span.will_write(end)
        read.append(rows)
        starts.append(min(max(start, SINKS), end))
    sinks = [min(span.sinks, end) for span, end in zip(spans, ends, strict=True)]
    written: list[Run] | mx.array | None = None
    if not waits:
        written = new[0]
        if len(new) > 1:
            written = mx.array([row for own in new for run in own for row in range(*run)], mx.int32)
    pages = exact_pages(spans, sinks, starts, ends) if fused and not waits else None
    return ExactRows(written, read, sinks, starts, ends, [span.page for span in spans], pages)

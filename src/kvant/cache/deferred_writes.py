"""New tokens that are written only when their step is committed."""

from collections import defaultdict
from collections.abc import Sequence

import mlx.core as mx

from kvant.cache.exact_tail import DeferredTail, place_exact
from kvant.cache.layer_group import LayerGroup, PageTable, PoolLayer
from kvant.cache.pages import runs
from kvant.cache.pool_sequence import PoolSequence
from kvant.operators.exact_rows import ExactRows, ExactSpan
from kvant.operators.paged_attention import NewTokens
from kvant.operators.paged_rows import PagedRows
from kvant.operators.row_runs import put_rows


class DeferredWrites:
    """The new tokens of a step that are written when it is committed; usually none.

    Written at once, they would overwrite rows that they, or other tokens in their place, still see. Layers
    with a window have such tokens in a conversation's step that exceeds the room in the window's pages; exact
    tails have them in every step of more than ``SLACK + 1`` tokens. The step attends to the unwritten tokens.
    """

    def __init__(self, sequences: Sequence[PoolSequence], *, is_single: bool) -> None:
        """``is_single``: it is the sequence of a single pool; other pools have room for every step."""
        self._sequences = sequences
        self._is_single = is_single
        self._start = 0  # position of the first token deferred in pages
        self._stored: defaultdict[LayerGroup, list[tuple[PoolLayer, Sequence[mx.array]]]] = defaultdict(list)
        self.tails: list[DeferredTail] = []  # one per sequence, or empty

    @property
    def arrays(self) -> list[mx.array]:
        """Return the tokens in stored form."""
        stored = [array for layers in self._stored.values() for _, arrays in layers for array in arrays]
        return [*stored, *(array for tail in self.tails for array in tail.arrays)]

    def place(self, group: LayerGroup, table: PageTable, new_tokens: int) -> PagedRows | None:
        """Return the rows that a step with deferred tokens reads, or None if tokens are written at once."""
        if not self._is_single:
            return None
        (sequence,) = self._sequences
        if not group.must_defer(table, sequence.length, new_tokens):
            return None
        self._start = sequence.length
        first = group.first_read(self._start)
        before = runs(table.pages, first - table.start, self._start - table.start)
        return PagedRows(None, [before], [first], group.window)

    def place_tails(
        self, spans: Sequence[ExactSpan], lengths: Sequence[int], new_tokens: int, *, fused: bool
    ) -> ExactRows:
        """Return the exact rows of a step; see :func:`place_exact`."""
        placed = place_exact(spans, lengths, new_tokens, fused=fused)
        is_deferred = placed.new is None
        self.tails = [DeferredTail(length, new_tokens) for length in lengths] if is_deferred else []
        return placed

    def add(self, group: LayerGroup, layer: PoolLayer, waiting: NewTokens) -> list[mx.array]:
        """Defer a layer's new tokens; return the exact ones among them, which the step must compute."""
        if waiting.stored:
            self._stored[group].append((layer, waiting.stored))
        if not waiting.exact:
            return []
        return [tail.add(layer, new) for tail, new in zip(self.tails, waiting.exact, strict=True)]

    def commit(self, num_tokens: Sequence[int]) -> None:
        """Note how many tokens of each sequence are being committed, before the sequences count them."""
        for sequence, tail, count in zip(self._sequences, self.tails, num_tokens, strict=False):
            if sequence.tail is not None and not sequence.released:
                tail.commit(sequence.tail, count)

    def write(self) -> None:
        """Write the committed tokens, and drop the others."""
        if self._stored:
            self._write_stored(*self._sequences)
        if self.tails:
            self._write_tails()

    def _write_stored(self, sequence: PoolSequence) -> None:
        for table, group in zip(sequence.tables, sequence.pool.groups, strict=True):
            if sequence.length <= self._start or group not in self._stored:
                continue
            group.advance(table, sequence.length - 1, sequence.length)
            first = max(table.first, self._start)
            rows = runs(table.pages, first - table.start, sequence.length - table.start)
            for layer, arrays in self._stored[group]:
                for array, tokens in zip(layer.arrays, arrays, strict=True):
                    put_rows(array, tokens[:, :, first - self._start :], rows)
        self._stored.clear()

    def _write_tails(self) -> None:
        for sequence, tail in zip(self._sequences, self.tails, strict=False):
            tails = sequence.pool.tails
            span = sequence.tail
            if tail.before is None or tails is None or span is None or sequence.released:
                continue
            if sequence.length == tail.length:  # the commit was interrupted before the sequence counted
                span.sinks = tail.before.sinks
                span.start = tail.before.start
            elif sequence.length == tail.length + tail.num_tokens:
                tails.write(span, tail)
        self.tails = []  # last, so that after an interruption the next call writes the rest

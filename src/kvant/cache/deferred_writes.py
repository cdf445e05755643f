"""New tokens of a conversation that are written only when their step is committed."""

from collections import defaultdict
from collections.abc import Sequence

import mlx.core as mx

from kvant.cache.layer_group import LayerGroup, PageTable, PoolLayer
from kvant.cache.pages import runs
from kvant.cache.pool_sequence import PoolSequence
from kvant.operators.paged_rows import PagedRows
from kvant.operators.row_runs import put_rows


class DeferredWrites:
    """Tokens that would take the place of rows which they, or other tokens in their place, still see.

    A conversation through a window has them, if a step has more new tokens than its pages have room for.
    The step attends to them as they come.
    """

    def __init__(self, sequence: PoolSequence | None) -> None:
        """``sequence``: of a single pool; None: nothing is deferred."""
        self._sequence = sequence
        self._start = 0  # the position of the first of the tokens
        self._tokens: defaultdict[LayerGroup, list[tuple[PoolLayer, Sequence[mx.array]]]] = defaultdict(list)

    @property
    def arrays(self) -> list[mx.array]:
        """The tokens, as they are stored."""
        return [array for layers in self._tokens.values() for _, arrays in layers for array in arrays]

    def place(self, group: LayerGroup, table: PageTable, new_tokens: int) -> PagedRows | None:
        """Return what a step of so many new tokens reads, if they are deferred; None: they are written."""
        sequence = self._sequence
        if sequence is None or not group.must_defer(table, sequence.length, new_tokens):
            return None
        self._start = sequence.length
        first = group.first_read(self._start)
        before = runs(table.pages, first - table.start, self._start - table.start)
        return PagedRows(None, [before], [first], group.window)

    def add(self, group: LayerGroup, layer: PoolLayer, tokens: Sequence[mx.array]) -> None:
        """Defer the new tokens of a layer, as they are stored: (2, K, S, D') and (2, K, S, D/G)."""
        self._tokens[group].append((layer, tokens))

    def write(self) -> None:
        """Write those of the tokens that were committed, and drop the others."""
        if not self._tokens or (sequence := self._sequence) is None:
            return
        for table, group in zip(sequence.tables, sequence.pool.groups, strict=True):
            if sequence.length <= self._start or group not in self._tokens:
                continue
            group.advance(table, sequence.length - 1, sequence.length)
            first = max(table.first, self._start)
            rows = runs(table.pages, first - table.start, sequence.length - table.start)
            for layer, arrays in self._tokens[group]:
                for array, tokens in zip(layer.arrays, arrays, strict=True):
                    put_rows(array, tokens[:, :, first - self._start :], rows)
        self._tokens.clear()

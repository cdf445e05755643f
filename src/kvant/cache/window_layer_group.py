"""Layers that see a window of the last tokens, whose pages move along with it."""

from collections.abc import Sequence

from kvant.cache.layer_group import LayerGroup, PageTable, PoolLayer
from kvant.cache.pages import PAGE_SIZE, pages_for
from kvant.operators.exact_rows import SLACK


class WindowLayerGroup(LayerGroup):
    """The layers of one window width, which share page tables.

    A page is released once all its rows are outside the window and the ``SLACK`` tokens before it, which a
    sequence may go back. Every sequence is promised its maximum number of pages when it is opened; here
    :attr:`promised` also counts the pages that it has.
    """

    window: int

    def __init__(
        self,
        window: int,
        layers: Sequence[PoolLayer],
        num_pages: int,
        step_size: int,
        checkpoints: int = 0,
        *,
        logs_copies: bool = False,
    ) -> None:
        """``step_size``: the most new tokens of a sequence in one step. The others as in LayerGroup."""
        super().__init__(layers, num_pages, checkpoints, logs_copies=logs_copies)
        self.window = window
        self.in_chunks = any(layer.format.kind == "chunks" for layer in layers)
        self._window_pages = window_pages(window, step_size)

    def limit(self, max_tokens: int) -> int:
        return min(pages_for(max_tokens), self._window_pages)

    @property
    def num_free(self) -> int:
        return self.pages.num - self.promised

    @property
    def _room(self) -> int:
        return self.pages.num_free + self.prefix.num_idle

    def first_seen(self, length: int) -> int:
        return max(0, length - self.window + 1)

    def first_read(self, length: int) -> int:
        """Return the first position to read for a query, which may be the start of its chunk."""
        return length // self.window * self.window if self.in_chunks else self.first_seen(length)

    def oldest_length(self, table: PageTable) -> int:
        return table.first + self.window - 1 if table.first else 0

    def go_back(self, table: PageTable, length: int) -> None:
        """Empty a table that lacks rows which the token at position ``length`` sees."""
        if self.first_seen(length) < table.first:
            self.pages.release(table.pages)
            table.pages = []
            table.first = 0

    def begin_at(self, table: PageTable, first: int, length: int) -> None:
        self.pages.release(table.pages)
        table.pages = []
        table.first = max(first, self._first_needed(table, length))
        table.pages = self._take(pages_for(length - table.start))

    def must_defer(self, table: PageTable, length: int, new_tokens: int) -> bool:
        if not table.moves:
            return False
        first = max(table.start, self._first_needed(table, length))
        return pages_for(length + new_tokens - first) > table.limit

    def advance(self, table: PageTable, start: int, end: int) -> None:
        """Allocate pages up to ``end``; release those not seen from ``SLACK`` before ``start`` on."""
        first = self._first_needed(table, start)
        if first > table.start:
            gone = (first - table.start) // PAGE_SIZE
            released = table.pages[:gone]
            table.first, table.pages = first, table.pages[gone:]  # at once: no interruption in between
            self.pages.release(released)
        self._extend(table, end)

    def _table(self, max_tokens: int, first: int = 0, pages: Sequence[int] = ()) -> PageTable:
        moves = self._window_pages < pages_for(max_tokens)
        return PageTable(first, [*pages], self.limit(max_tokens), moves)

    def _first_needed(self, table: PageTable, length: int) -> int:
        """Return the first position of the first page seen by ``length`` tokens or ``SLACK`` fewer."""
        return self.first_seen(max(0, length - SLACK)) // PAGE_SIZE * PAGE_SIZE if table.moves else 0

    def _extend(self, table: PageTable, end: int) -> None:
        table.pages += self._take(max(0, pages_for(end - table.start) - len(table.pages)))

    def _missing(self, table: PageTable) -> int:
        return table.limit

    def _reserve(self, table: PageTable, max_tokens: int) -> PageTable:
        """Promise a new table its pages, which are allocated as it is written."""
        self._promise(table, max_tokens)
        return table


def window_pages(window: int, step_size: int) -> int:
    """Return how many pages store the tokens that steps of ``step_size`` tokens see through a window."""
    return pages_for(window - 1 + SLACK + step_size) + 1

"""The layers that see a window of the last tokens: the pages of a sequence move along with it."""

from collections.abc import Sequence

from kvant.cache.layer_group import LayerGroup, PageTable, PoolLayer
from kvant.cache.pages import PAGE_SIZE, pages_for
from kvant.operators.exact_rows import SLACK


class WindowLayerGroup(LayerGroup):
    """The layers of one window width, which share page tables.

    A page whose rows all left the window, and the 16 tokens before it that a sequence may go back, is given
    back, and one is taken for new rows. How many pages a sequence may have at once is promised when it is
    opened: here :attr:`promised` counts all of them, whether or not they were given.
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
        """``step_size``: new tokens of a sequence in one step, at most. The others as of LayerGroup."""
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
        """Return the first position that is read for a query: the first of its chunk, if there are chunks."""
        return length // self.window * self.window if self.in_chunks else self.first_seen(length)

    def oldest_length(self, table: PageTable) -> int:
        return table.first + self.window - 1 if table.first else 0

    def go_back(self, table: PageTable, length: int) -> None:
        """Become a table of so many tokens; of none, if it lacks rows that the next one sees."""
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
        """Have pages for positions up to ``end``; give back those not seen from 16 before ``start`` on."""
        first = self._first_needed(table, start)
        if first > table.start:
            gone = (first - table.start) // PAGE_SIZE
            given_back = table.pages[:gone]
            table.first, table.pages = first, table.pages[gone:]  # at once: no interruption in between
            self.pages.release(given_back)
        self._extend(table, end)

    def _table(self, max_tokens: int, first: int = 0, pages: Sequence[int] = ()) -> PageTable:
        moves = self._window_pages < pages_for(max_tokens)
        return PageTable(first, [*pages], self.limit(max_tokens), moves)

    def _first_needed(self, table: PageTable, length: int) -> int:
        """Return the first row of the first page that a sequence of so many tokens, or 16 fewer, sees."""
        return self.first_seen(max(0, length - SLACK)) // PAGE_SIZE * PAGE_SIZE if table.moves else 0

    def _extend(self, table: PageTable, end: int) -> None:
        table.pages += self._take(max(0, pages_for(end - table.start) - len(table.pages)))

    def _missing(self, table: PageTable) -> int:
        return table.limit

    def _reserve(self, table: PageTable, max_tokens: int) -> PageTable:
        """Promise a new table its pages. It takes them as it is written."""
        self._promise(table, max_tokens)
        return table


def window_pages(window: int, step_size: int) -> int:
    """Return the pages that hold what steps of ``step_size`` tokens see through a window."""
    return pages_for(window - 1 + SLACK + step_size) + 1

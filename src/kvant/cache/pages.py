"""The reference counts of a pool's pages. It has no arrays."""

from bisect import bisect_left
from collections.abc import Collection, Sequence

from kvant.errors import ContextError

PAGE_SIZE = 128  # rows; PMX's default

Run = tuple[int, int]  # first row and end (exclusive) of contiguous rows


class Pages:
    """The reference counts of pages 0 to ``num - 1``. A page without references is free."""

    def __init__(self, num: int) -> None:
        self.num = self.num_free = num
        self.num_shared = 0  # pages with more than one reference
        self._holders = [0] * num
        self._free = [(0, num)] if num else []  # first page and length of each free stretch, in order

    def allocate(self, count: int) -> list[int]:
        """Return ``count`` free pages in few stretches, each with one reference.

        It uses the smallest stretch that is long enough, to save the long ones, or else the longest first.
        """
        if count > self.num_free:
            raise ContextError(f"{count} pages are needed; {self.num_free} of {self.num} are free")
        pages: list[int] = []
        while len(pages) < count:
            missing = count - len(pages)
            fitting = [length for _, length in self._free if length >= missing]
            stretch = min(fitting) if fitting else max(length for _, length in self._free)
            place = next(i for i, (_, length) in enumerate(self._free) if length == stretch)
            first = self._free[place][0]
            used = min(stretch, missing)
            self._free[place : place + 1] = [(first + used, stretch - used)] if stretch > used else []
            pages += range(first, first + used)
        for page in pages:
            self._holders[page] = 1
        self.num_free -= count
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add a reference to each page."""
        for page in pages:
            assert self._holders[page], f"page {page} is free"
            self._holders[page] += 1
            self.num_shared += self._holders[page] == 2

    def release(self, pages: Sequence[int]) -> None:
        """Remove a reference from each page."""
        for page in pages:
            assert self._holders[page], f"page {page} is free"
            self._holders[page] -= 1
            self.num_shared -= self._holders[page] == 1
            if not self._holders[page]:
                self._add_free(page)

    def hold_only(self, pages: Collection[int]) -> None:
        """Give these pages one reference each, and free all others."""
        self.num_free = self.num_shared = 0
        self._holders = [int(page in pages) for page in range(self.num)]
        self._free = []
        for page in range(self.num):
            if page not in pages:
                self._add_free(page)

    def refcount(self, page: int) -> int:
        """Return the number of references to a page."""
        return self._holders[page]

    def _add_free(self, page: int) -> None:
        """Free a page and join it with its free neighbours."""
        place = bisect_left(self._free, (page, 0))
        first = page
        last = page + 1
        start = end = place
        if place and sum(self._free[place - 1]) == page:
            start = place - 1
            first = self._free[start][0]
        if place < len(self._free) and self._free[place][0] == page + 1:
            end = place + 1
            last = sum(self._free[place])
        self._free[start:end] = [(first, last - first)]
        self.num_free += 1


def runs(pages: Sequence[int], first: int, end: int) -> list[Run]:
    """Return the rows of tokens ``first`` to ``end`` as runs; token 0 is at the first row of ``pages[0]``."""
    if first >= end:
        return []
    used = pages[first // PAGE_SIZE : pages_for(end)]
    runs: list[Run] = []
    begin = last = used[0]
    for page in used[1:]:
        if page != last + 1:
            runs.append((begin * PAGE_SIZE, (last + 1) * PAGE_SIZE))
            begin = page
        last = page
    runs.append((begin * PAGE_SIZE, (last + 1) * PAGE_SIZE))
    # The first and the last page may be partial.
    runs[0] = (runs[0][0] + first % PAGE_SIZE, runs[0][1])
    runs[-1] = (runs[-1][0], runs[-1][1] - (-end % PAGE_SIZE))
    return runs


def pages_for(num_tokens: int) -> int:
    """Return the number of pages for this many tokens."""
    return -(-num_tokens // PAGE_SIZE)

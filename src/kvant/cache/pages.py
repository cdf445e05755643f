"""Pages of a pool: which are free, and how many hold each. No arrays."""

from bisect import bisect_left
from collections.abc import Collection, Sequence

from kvant.errors import ContextError

PAGE_SIZE = 128  # rows; PMX's default

Run = tuple[int, int]  # the first row of some that lie side by side, and the one behind the last


class Pages:
    """The pages 0 to ``num - 1``. A page that nobody holds is free."""

    def __init__(self, num: int) -> None:
        self.num = self.num_free = num
        self.num_shared = 0  # pages that are held more than once
        self._holders = [0] * num
        self._free = [(0, num)] if num else []  # the first page and the number of each free stretch, in order

    def allocate(self, count: int) -> list[int]:
        """``count`` free pages, held once, as few stretches as there are.

        The smallest stretch that is long enough is taken, so that long ones stay; where none is, the longest
        first.
        """
        if count > self.num_free:
            raise ContextError(f"{count} pages are needed; {self.num_free} of {self.num} are free")
        pages: list[int] = []
        while len(pages) < count:
            missing = count - len(pages)
            fitting = [length for _, length in self._free if length >= missing]
            wanted = min(fitting) if fitting else max(length for _, length in self._free)
            place = next(i for i, (_, length) in enumerate(self._free) if length == wanted)
            first = self._free[place][0]
            taken = min(wanted, missing)
            self._free[place : place + 1] = [(first + taken, wanted - taken)] if wanted > taken else []
            pages += range(first, first + taken)
        for page in pages:
            self._holders[page] = 1
        self.num_free -= count
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Hold pages once more."""
        for page in pages:
            assert self._holders[page], f"page {page} is free"
            self._holders[page] += 1
            self.num_shared += self._holders[page] == 2

    def release(self, pages: Sequence[int]) -> None:
        """Hold pages once less."""
        for page in pages:
            assert self._holders[page], f"page {page} is free"
            self._holders[page] -= 1
            self.num_shared -= self._holders[page] == 1
            if not self._holders[page]:
                self._add_free(page)

    def hold_only(self, pages: Collection[int]) -> None:
        """Hold these once, and no others."""
        self.num_free = self.num_shared = 0
        self._holders = [int(page in pages) for page in range(self.num)]
        self._free = []
        for page in range(self.num):
            if page not in pages:
                self._add_free(page)

    def refcount(self, page: int) -> int:
        """How many hold a page."""
        return self._holders[page]

    def _add_free(self, page: int) -> None:
        """Make a page free and join it with its free neighbours."""
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
    found: list[Run] = []
    begin = last = used[0]
    for page in used[1:]:
        if page != last + 1:
            found.append((begin * PAGE_SIZE, (last + 1) * PAGE_SIZE))
            begin = page
        last = page
    found.append((begin * PAGE_SIZE, (last + 1) * PAGE_SIZE))
    # Of the first page and the last one, parts.
    found[0] = (found[0][0] + first % PAGE_SIZE, found[0][1])
    found[-1] = (found[-1][0], found[-1][1] - (-end % PAGE_SIZE))
    return found


def pages_for(num_tokens: int) -> int:
    """Pages that so many tokens take."""
    return -(-num_tokens // PAGE_SIZE)

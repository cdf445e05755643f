"""Which pages of a pool hold the beginning of a text, so that other sequences may read them."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from kvant.cache.pages import PAGE_SIZE, Pages


class PrefixIndex:
    """Whole pages of committed tokens, each under the :func:`digests` of the text up to its end.

    It holds its pages. Those that nobody else holds are given up where pages are needed, least recently used first.
    """

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._found: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._found

    def __len__(self) -> int:
        return len(self._found)

    @property
    def pages(self) -> list[int]:
        """The pages it holds."""
        return list(self._found.values())

    @property
    def num_idle(self) -> int:
        """Pages that it alone holds."""
        return sum(self._pages.refcount(page) == 1 for page in self._found.values())

    def put(self, digest: bytes, page: int) -> None:
        """Hold a page, unless there is one of the same text."""
        if digest not in self._found:
            self._pages.share([page])
            self._found[digest] = page

    def hold(self, chain: Sequence[bytes]) -> list[int]:
        """The pages of a text that are all in it, held once more."""
        pages = [self._found[digest] for digest in chain]
        self._pages.share(pages)
        return pages

    def use(self, chain: Sequence[bytes]) -> None:
        """Note that a text was used. Its last page counts as used before its first, without which it has no use."""
        for digest in reversed(chain):
            if digest in self._found:
                self._found.move_to_end(digest)

    def give_up(self, count: int) -> None:
        """Let ``count`` of the pages that it alone holds become free, or as many as there are."""
        idle = (digest for digest, page in self._found.items() if self._pages.refcount(page) == 1)
        for digest in [digest for digest, _ in zip(idle, range(count), strict=False)]:
            self._pages.release([self._found.pop(digest)])

    def forget(self, page: int) -> None:
        """Hold a page no longer, where it is held."""
        for digest, held in self._found.items():
            if held == page:
                del self._found[digest]
                self._pages.release([page])
                return


def digests(ids: Sequence[int], salt: bytes) -> list[bytes]:
    """A digest for each whole page of a text: of the salt and all its tokens up to the page's end.

    Two texts have the same BLAKE2b digest of 256 bits only if they are the same, as far as anybody knows. So the tokens
    themselves are not kept. Every part hashed has one length but the salt, which is hashed alone.
    """
    found = []
    digest = hashlib.blake2b(salt, digest_size=32).digest()
    for first in range(0, len(ids) - PAGE_SIZE + 1, PAGE_SIZE):
        digest = hashlib.blake2b(digest + array("q", ids[first : first + PAGE_SIZE]).tobytes(), digest_size=32).digest()
        found.append(digest)
    return found

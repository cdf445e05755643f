"""Which pages of a pool hold the beginning of a text, so that other sequences may read them."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from kvant.cache.pages import PAGE_SIZE, Pages

MOST_COMPARED = 64  # pages that follow the same text, the latest ones
FEWEST_COPIED = 16  # tokens; fewer are fed as fast as they are copied


@dataclass(frozen=True, slots=True)
class _Held:
    """A page, the digest of the text before it, and the tokens in it."""

    page: int
    before: bytes
    ids: Sequence[int]


class PrefixIndex:
    """Pages of committed tokens, each under the :func:`digests` of the text up to its end.

    It holds its pages. Those that nobody else holds are given up where pages are needed, least recently used first.
    """

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._found: OrderedDict[bytes, _Held] = OrderedDict()  # the least recently used first
        self._after: dict[bytes, dict[bytes, None]] = {}  # of a text's digest, those of the pages that follow it

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._found

    def __len__(self) -> int:
        return len(self._found)

    @property
    def pages(self) -> list[int]:
        """The pages it holds."""
        return [held.page for held in self._found.values()]

    @property
    def num_idle(self) -> int:
        """Pages that it alone holds."""
        return sum(self._pages.refcount(held.page) == 1 for held in self._found.values())

    def put(self, digest: bytes, page: int, before: bytes, ids: Sequence[int]) -> None:
        """Hold a page, unless there is one of the same text.

        Args:
            before: the digest of the text before the page.
            ids: the tokens of the page, all of them or its first ones.
        """
        if digest not in self._found:
            self._pages.share([page])
            self._found[digest] = _Held(page, before, array("q", ids))
            self._after.setdefault(before, {})[digest] = None

    def hold(self, chain: Sequence[bytes]) -> list[int]:
        """The pages of a text that are all in it, held once more."""
        pages = [self._found[digest].page for digest in chain]
        self._pages.share(pages)
        return pages

    def use(self, chain: Sequence[bytes]) -> None:
        """Note that a text was used. Its last page counts as used before its first, without which it has no use."""
        for digest in reversed(chain):
            if digest in self._found:
                self._found.move_to_end(digest)

    def stored_after(self, before: bytes) -> Sequence[int]:
        """The tokens of the page behind a text that was stored last; none: there is no such page."""
        last = next(reversed(self._after.get(before, {})), None)
        return () if last is None else self._found[last].ids

    def most_alike(self, before: bytes, ids: Sequence[int]) -> tuple[int, int]:
        """Of the pages that follow a text, the one that shares the most of its first tokens with ``ids``.

        Returns:
            the page, and the number of these tokens; 0 where they are fewer than 16.
        """
        best, most = b"", FEWEST_COPIED - 1
        for digest in islice(reversed(self._after.get(before, {})), MOST_COMPARED):
            pairs = zip(self._found[digest].ids, ids, strict=False)
            if (alike := sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))) > most:
                best, most = digest, alike
        if not best:
            return 0, 0
        self.use([best])
        return self._found[best].page, most

    def give_up(self, count: int) -> None:
        """Let ``count`` of the pages that it alone holds become free, or as many as there are."""
        idle = (digest for digest, held in self._found.items() if self._pages.refcount(held.page) == 1)
        for digest in list(islice(idle, count)):
            self._drop(digest)

    def forget(self, page: int) -> None:
        """Hold a page no longer, where it is held."""
        for digest in [digest for digest, held in self._found.items() if held.page == page]:
            self._drop(digest)

    def _drop(self, digest: bytes) -> None:
        held = self._found.pop(digest)
        after = self._after[held.before]
        del after[digest]
        if not after:
            del self._after[held.before]
        self._pages.release([held.page])


def root(salt: bytes) -> bytes:
    """The digest of no text at all. By its person it is no page's digest, whatever the salt."""
    return hashlib.blake2b(salt, digest_size=32, person=b"kvant salt").digest()


def extended(before: bytes, ids: Sequence[int]) -> bytes:
    """The digest of a text and of more tokens behind it."""
    return hashlib.blake2b(before + array("q", ids).tobytes(), digest_size=32).digest()


def digests(ids: Sequence[int], salt: bytes) -> list[bytes]:
    """A digest for each whole page of a text: of the salt and all its tokens up to the page's end.

    Two texts have the same BLAKE2b digest of 256 bits only if they are the same, as far as anybody knows.
    """
    found, digest = [], root(salt)
    for first in range(0, len(ids) - PAGE_SIZE + 1, PAGE_SIZE):
        digest = extended(digest, ids[first : first + PAGE_SIZE])
        found.append(digest)
    return found

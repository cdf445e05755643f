"""Which pages of a pool hold the beginning of a text, so that other sequences may read them."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from kvant.cache.checkpoints import Checkpoint, Checkpoints
from kvant.cache.pages import PAGE_SIZE, Pages

MOST_COMPARED = 64  # pages that follow the same text, the latest ones


@dataclass(slots=True)
class _IndexedPage:
    """A page, the digest of the text before it, and the tokens in it."""

    page: int
    before: bytes
    ids: Sequence[int]


class PrefixIndex:
    """Pages of committed tokens, each under the :func:`digests` of the text up to its end.

    It holds its pages. Those that nobody else holds are given up where pages are needed, least recently used
    first; those that checkpoints need after all others, with the checkpoint of the lowest score first. States
    of layers that have one in place of rows are kept in checkpoints too; they go with the text's last page.
    """

    def __init__(self, pages: Pages, checkpoints: int = 0) -> None:
        """``checkpoints``: that are kept, at most."""
        self._pages = pages
        self.checkpoints = Checkpoints(checkpoints)
        self._indexed: OrderedDict[bytes, _IndexedPage] = OrderedDict()  # the least recently used first
        self._by_page: dict[int, bytes] = {}
        # of a text's digest, those of the pages that follow it
        self._after: dict[bytes, dict[bytes, None]] = {}

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._indexed

    @property
    def pages(self) -> list[int]:
        """The pages it holds."""
        return list(self._by_page)

    @property
    def num_idle(self) -> int:
        """Pages that it alone holds."""
        return sum(self._pages.refcount(held.page) == 1 for held in self._indexed.values())

    def put(self, digest: bytes, page: int, before: bytes, ids: Sequence[int]) -> None:
        """Hold a page of all its tokens or of its first, ``ids``, behind the text with the digest ``before``.

        Not if there is one of the same text; and once, for the longest text that it was given for.
        """
        if (other := self._by_page.get(page)) is not None and len(self._indexed[other].ids) < len(ids):
            self._drop(other)
        if digest not in self._indexed and page not in self._by_page:
            self._pages.share([page])
            self._indexed[digest] = _IndexedPage(page, before, array("q", ids))
            self._by_page[page] = digest
            self._after.setdefault(before, {})[digest] = None

    def hold(self, page_hashes: Sequence[bytes]) -> list[int]:
        """The pages of a text that are all in it, held once more."""
        pages = [self._indexed[digest].page for digest in page_hashes]
        self._pages.share(pages)
        return pages

    def use(self, page_hashes: Sequence[bytes]) -> None:
        """Note that a text was used: its last page before its first, without which it has no use."""
        for digest in reversed(page_hashes):
            if digest in self._indexed:
                self._indexed.move_to_end(digest)

    def most_alike(self, before: bytes, ids: Sequence[int]) -> tuple[int, int]:
        """Return the page behind a text that begins with the most of ``ids``, and how many these are."""
        best = b""
        most = 0
        for digest in islice(reversed(self._after.get(before, {})), MOST_COMPARED):
            pairs = zip(self._indexed[digest].ids, ids, strict=False)
            if (alike := sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))) > most:
                best = digest
                most = alike
        if not best:
            return 0, 0
        self.use([best])
        return self._indexed[best].page, most

    def use_checkpoints(self, text: bytes, *, by_prompt: bool = False) -> None:
        """Note that the checkpoints in a text were used; as :meth:`Checkpoints.use`."""
        self.use(self.checkpoints.use(text, by_prompt=by_prompt))

    def keep(self, digest: bytes, made: Checkpoint) -> None:
        """Keep a checkpoint at the end of the text of a page that it holds."""
        self.use_checkpoints(made.text)
        for gone in self.checkpoints.keep(digest, made):
            # nobody goes on without states
            if made.states is not None and len(self._indexed[gone].ids) < PAGE_SIZE:
                self._drop(gone)

    def state_lengths(self, before: bytes, ids: Sequence[int]) -> list[int]:
        """How many of the tokens behind a text, fewer than a page, states are kept after; the most first."""
        found = [0] if before in self.checkpoints else []
        for digest in self._after.get(before, {}):
            own = self._indexed[digest].ids
            if digest in self.checkpoints and len(own) < PAGE_SIZE and list(own) == list(ids[: len(own)]):
                found.append(len(own))
        return sorted(found, reverse=True)

    def give_up(self, count: int) -> None:
        """Let ``count`` of the pages that it alone holds become free, or as many as there are."""
        idle = {
            digest: None for digest, held in self._indexed.items() if self._pages.refcount(held.page) == 1
        }
        while count and idle:
            needed = self.checkpoints.pages_needed()
            free = list(islice((digest for digest in idle if digest not in needed), count))
            for digest in free:
                del idle[digest]
                self._drop(digest)
            count -= len(free)
            if count and idle:
                self.checkpoints.drop_lowest(self.checkpoints.needing(idle))

    def forget(self, page: int) -> None:
        """Hold a page no longer, where it is held."""
        if (digest := self._by_page.get(page)) is not None:
            self._drop(digest)

    def _drop(self, digest: bytes) -> None:
        held = self._indexed.pop(digest)
        self.checkpoints.drop(digest)
        del self._by_page[held.page]
        after = self._after[held.before]
        del after[digest]
        if not after:
            del self._after[held.before]
        self._pages.release([held.page])


def root(salt: bytes) -> bytes:
    """The digest of no text at all. By its person it is no page's digest, whatever the salt."""
    return hashlib.blake2b(salt, digest_size=32, person=b"kvant salt").digest()


def as_text(ids: Sequence[int], salt: bytes) -> bytes:
    """A text as bytes: it begins with another of the same salt if its bytes do."""
    return root(salt) + array("q", ids).tobytes()


def extended(before: bytes, ids: Sequence[int]) -> bytes:
    """The digest of a text and of more tokens behind it."""
    return hashlib.blake2b(before + array("q", ids).tobytes(), digest_size=32).digest()


def digests(ids: Sequence[int], salt: bytes, *, last_page: bool = False) -> list[bytes]:
    """A digest for each whole page of a text: of the salt and all its tokens up to the page's end.

    ``last_page``: one for the last page too, where it is not whole.

    Two texts have the same BLAKE2b digest of 256 bits only if they are the same, as far as anybody knows.
    """
    found = []
    digest = root(salt)
    for first in range(0, len(ids) - (0 if last_page else PAGE_SIZE - 1), PAGE_SIZE):
        digest = extended(digest, ids[first : first + PAGE_SIZE])
        found.append(digest)
    return found

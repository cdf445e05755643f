"""The index of a pool's pages by their texts, so that other sequences can share them."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from kvant.cache.checkpoints import Checkpoint, Checkpoints
from kvant.cache.pages import PAGE_SIZE, Pages

MOST_COMPARED = 64  # of the pages that follow the same text, the latest ones


@dataclass(slots=True)
class _IndexedPage:
    """A page, the digest of the text before it, and the tokens in it."""

    page: int
    before: bytes
    ids: Sequence[int]


class PrefixIndex:
    """Pages of committed tokens, by the :func:`digests` of the text up to the page's end.

    The index has a reference to each of its pages. When pages are needed, it releases those without other
    references, least recently used first. Those that checkpoints need go last, the checkpoint with the lowest
    score first. Checkpoints also store the states of layers that have them; these go with the text's last
    page.
    """

    def __init__(self, pages: Pages, checkpoints: int = 0) -> None:
        """``checkpoints``: maximum number of checkpoints."""
        self._pages = pages
        self.checkpoints = Checkpoints(checkpoints)
        self._indexed: OrderedDict[bytes, _IndexedPage] = OrderedDict()  # least recently used first
        self._by_page: dict[int, bytes] = {}
        # by the digest of a text, the digests of the pages that follow it
        self._after: dict[bytes, dict[bytes, None]] = {}

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._indexed

    @property
    def pages(self) -> list[int]:
        """Return its pages."""
        return list(self._by_page)

    @property
    def num_idle(self) -> int:
        """Return how many pages have no other references."""
        return sum(self._pages.refcount(indexed.page) == 1 for indexed in self._indexed.values())

    def put(self, digest: bytes, page: int, before: bytes, ids: Sequence[int]) -> None:
        """Add a page with the tokens ``ids``, or its first tokens, after the text with the digest ``before``.

        A page of the same text is not replaced. The same page is indexed once, for its longest text.
        """
        if (other := self._by_page.get(page)) is not None and len(self._indexed[other].ids) < len(ids):
            self._drop(other)
        if digest not in self._indexed and page not in self._by_page:
            self._pages.share([page])
            self._indexed[digest] = _IndexedPage(page, before, array("q", ids))
            self._by_page[page] = digest
            self._after.setdefault(before, {})[digest] = None

    def hold(self, page_hashes: Sequence[bytes]) -> list[int]:
        """Return the pages of a text, which must all be indexed, with one more reference each."""
        pages = [self._indexed[digest].page for digest in page_hashes]
        self._pages.share(pages)
        return pages

    def use(self, page_hashes: Sequence[bytes]) -> None:
        """Note that a text was used, the last page first, because it is useless without the others."""
        for digest in reversed(page_hashes):
            if digest in self._indexed:
                self._indexed.move_to_end(digest)

    def most_alike(self, before: bytes, ids: Sequence[int]) -> tuple[int, int]:
        """Return the page after a text with the longest common prefix with ``ids``, and its length."""
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
        """Note that the checkpoints in a text were used; see :meth:`Checkpoints.use`."""
        self.use(self.checkpoints.use(text, by_prompt=by_prompt))

    def keep(self, digest: bytes, made: Checkpoint) -> None:
        """Add a checkpoint at the end of the text of an indexed page."""
        self.use_checkpoints(made.text)
        for gone in self.checkpoints.keep(digest, made):
            # no sequence can continue without states
            if made.states is not None and len(self._indexed[gone].ids) < PAGE_SIZE:
                self._drop(gone)

    def state_lengths(self, before: bytes, ids: Sequence[int]) -> list[int]:
        """Return the numbers of tokens after a text, below a page, that have stored states; largest first."""
        lengths = [0] if before in self.checkpoints else []
        for digest in self._after.get(before, {}):
            page_ids = self._indexed[digest].ids
            count = len(page_ids)
            if digest in self.checkpoints and count < PAGE_SIZE and list(page_ids) == list(ids[:count]):
                lengths.append(count)
        return sorted(lengths, reverse=True)

    def give_up(self, count: int) -> None:
        """Free up to ``count`` pages that have no other references."""
        idle = {
            digest: None for digest, each in self._indexed.items() if self._pages.refcount(each.page) == 1
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
        """Remove a page from the index if it is there."""
        if (digest := self._by_page.get(page)) is not None:
            self._drop(digest)

    def _drop(self, digest: bytes) -> None:
        indexed = self._indexed.pop(digest)
        self.checkpoints.drop(digest)
        del self._by_page[indexed.page]
        after = self._after[indexed.before]
        del after[digest]
        if not after:
            del self._after[indexed.before]
        self._pages.release([indexed.page])


def root(salt: bytes) -> bytes:
    """Return the digest of an empty text. Its ``person`` keeps it apart from every page's digest."""
    return hashlib.blake2b(salt, digest_size=32, person=b"kvant salt").digest()


def as_text(ids: Sequence[int], salt: bytes) -> bytes:
    """Return a text as bytes, so that prefixes of texts with one salt are prefixes of bytes."""
    return root(salt) + array("q", ids).tobytes()


def extended(before: bytes, ids: Sequence[int]) -> bytes:
    """Return the digest of a text followed by more tokens."""
    return hashlib.blake2b(before + array("q", ids).tobytes(), digest_size=32).digest()


def digests(ids: Sequence[int], salt: bytes, *, last_page: bool = False) -> list[bytes]:
    """Return a digest for each whole page of a text, of the salt and all tokens up to the page's end.

    ``last_page``: add one for a partial last page. Collisions of 256-bit BLAKE2b digests are not expected.
    """
    hashes = []
    digest = root(salt)
    for first in range(0, len(ids) - (0 if last_page else PAGE_SIZE - 1), PAGE_SIZE):
        digest = extended(digest, ids[first : first + PAGE_SIZE])
        hashes.append(digest)
    return hashes

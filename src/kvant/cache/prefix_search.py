"""The search for a prompt's prefix in a pool's page index and on disk."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import mlx.core as mx

from kvant.cache.checkpoints import Checkpoint
from kvant.cache.exact_tail import TailCopy
from kvant.cache.layer_format import State
from kvant.cache.layer_group import LayerGroup
from kvant.cache.pages import PAGE_SIZE
from kvant.cache.pool_disk import PageGoneError, PoolDisk
from kvant.cache.pool_sequence import PoolSequence
from kvant.cache.prefix import as_text, digests, extended, root
from kvant.threads import ComputeLock

FEWEST_COPIED = 16  # tokens; feeding fewer is as fast as copying them

Page = tuple[LayerGroup, int]  # a layer group's page, by its number in a text


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """A prefix whose pages are in the pool or on disk.

    Attributes:
        ids: its tokens.
        page_hashes: of its pages; the last page may be partial if states are stored there.
        first: the number of the first page that each layer group needs.
    """

    ids: Sequence[int]
    page_hashes: Sequence[bytes]
    first: dict[LayerGroup, int]

    def pages(self) -> list[Page]:
        """Return the pages that all layer groups need, in the order of the text.

        In this order everything before an invalid page has been read and is valid.
        """
        count = len(self.page_hashes)
        pages = [(group, number) for group, first in self.first.items() for number in range(first, count)]
        return sorted(pages, key=lambda page: page[1])

    def page_ids(self, number: int) -> Sequence[int]:
        """Return the tokens of a page."""
        return self.ids[number * PAGE_SIZE : (number + 1) * PAGE_SIZE]


class PrefixSearch:
    """Finds the longest stored prefix of a prompt, and reads its pages from disk.

    The prefix never includes the prompt's last token, which must be fed to get logits.
    """

    def __init__(
        self, groups: Sequence[LayerGroup], main: LayerGroup, states: Sequence[State], lock: ComputeLock
    ) -> None:
        """``groups``, ``states`` and ``lock`` are a pool's; ``main`` is the group that sees most tokens."""
        self._groups = groups
        self._main = main
        self._states = states
        self._lock = lock
        self.disk: PoolDisk | None = None  # also searched if present

    def find(
        self, prompt: Sequence[int], salt: bytes, whole_pages: bool, *, on_disk: bool = False
    ) -> tuple[list[bytes], int]:
        """Return the page hashes of the longest prefix, and how many tokens it has after these pages.

        ``whole_pages``: allow no tokens after them. ``on_disk``: include pages and states on disk.
        """
        known = prompt[: max(0, len(prompt) - 1)]
        every = digests(known, salt)
        count = len(every)  # pages that layers without a window have
        for group in self._groups:
            if group.window is None:
                count = next((n for n in range(count) if not self._has(group, every[n], on_disk)), count)
        windows = [group for group in self._groups if group.window is not None]
        for pages in range(count, -1, -1):
            hashes = every[:pages]
            before = hashes[-1] if hashes else root(salt)
            ids = known[pages * PAGE_SIZE : (pages + 1) * PAGE_SIZE]
            rest = self._behind(before, ids, whole_pages, on_disk)
            for behind in () if rest is None else (rest,) if self._states else (rest, 0):
                seen = ((group, digest) for group in windows for digest in group.seen(hashes, behind))
                if all(self._has(*each, on_disk) for each in seen):
                    return hashes, behind
        return [], 0

    def num_stored(self, ids: Sequence[int], salt: bytes) -> int:
        """Return how many first tokens of a text are stored, even if no sequence can start with them all."""
        hashes = digests(ids, salt)
        while hashes and not self._has(self._main, hashes[-1], on_disk=True):
            hashes.pop()
        length = len(hashes) * PAGE_SIZE
        before = hashes[-1] if hashes else root(salt)
        behind = ids[length : length + PAGE_SIZE]
        return length + self._main.prefix.most_alike(before, behind)[1]

    def fetch(self, prompt: Sequence[int], *, salt: bytes = b"", whole_pages: bool = True, most: int) -> bool:
        """Read up to ``most`` pages of a prompt's prefix from disk, for sequences to share.

        Returns whether there may be more to read.
        """
        if self.disk is None:
            return False
        with self._lock:
            prefix = self._stored(prompt, salt, whole_pages)
            hashes = prefix.page_hashes
            for group in self._groups:
                group.prefix.use(hashes)
            missing = [
                (group, number) for group, number in prefix.pages() if hashes[number] not in group.prefix
            ]
            try:
                for group, number, rows in islice(_read(self.disk, prefix, missing), most):
                    before = hashes[number - 1] if number else root(salt)
                    if not group.take_in(hashes[number], before, prefix.page_ids(number), rows):
                        return False
                mx.eval([layer.arrays for group in self._groups for layer in group.layers])
                if len(missing) > most:
                    return True
                self._fetch_end(self.disk, prefix, salt)
            except PageGoneError:
                return True
            return False

    def _fetch_end(self, disk: PoolDisk, prefix: StoredPrefix, salt: bytes) -> None:
        """Make a checkpoint at the end of a prefix, if its states or tail are on disk."""
        index = self._main.prefix
        if not prefix.ids or (last := prefix.page_hashes[-1]) in index.checkpoints:
            return
        states, tail = disk.end(last, len(prefix.ids))
        if states is not None or tail is not None:
            text = as_text(prefix.ids, salt)
            index.keep(last, Checkpoint(text, len(text), states=states, tail=tail))

    def read_into(self, sequence: PoolSequence, prompt: Sequence[int]) -> bool:
        """Replace a single pool's sequence by a longer prefix from disk, if there is one.

        Returns whether there was.
        """
        if self.disk is None:
            return False
        prefix = self._stored(prompt, sequence.salt, whole_pages=False)
        if len(prefix.ids) <= sequence.length:
            return False
        sequence.trim(sequence.length)
        lost = {layer: prefix.first[group] * PAGE_SIZE for group in self._groups for layer in group.layers}
        tables = dict(zip(self._groups, sequence.tables, strict=True))
        tail: TailCopy | None = None
        with suppress(PageGoneError), sequence.filling(lost, prefix.ids):
            for group, number, rows in _read(self.disk, prefix, prefix.pages()):
                table = tables[group]
                group.put_page(table.pages[number - table.start // PAGE_SIZE], rows)
            mx.eval([layer.arrays for group in self._groups for layer in group.layers])
            states, tail = self.disk.end(prefix.page_hashes[-1], len(prefix.ids))
            if states is not None:
                sequence.will_have(len(prefix.ids), states)
        sequence.take_tail(tail)
        return True

    def _stored(self, prompt: Sequence[int], salt: bytes, whole_pages: bool) -> StoredPrefix:
        """Return the longest prefix whose pages are in the pool or on disk."""
        hashes, rest = self.find(prompt, salt, whole_pages, on_disk=True)
        first = {group: len(hashes) - len(group.seen(hashes, rest)) for group in self._groups}
        length = len(hashes) * PAGE_SIZE
        if rest and self._states:
            ids = prompt[length : length + rest]
            hashes = [*hashes, extended(hashes[-1] if hashes else root(salt), ids)]
            length += rest
        return StoredPrefix(prompt[:length], hashes, first)

    def _behind(self, before: bytes, ids: Sequence[int], whole_pages: bool, on_disk: bool) -> int | None:
        """Return how many tokens after a text can be copied, or None if no sequence can start there."""
        if not self._states:
            alike = 0 if whole_pages else self._alike(before, ids)
            return alike if alike >= FEWEST_COPIED else 0
        lengths = self._main.prefix.state_lengths(before, ids)
        if not on_disk or self.disk is None:
            here = (n for n in lengths if not n or (not whole_pages and self._alike(before, ids[:n]) == n))
            return next(here, None)
        for count in range(0 if whole_pages else len(ids), -1, -1):
            digest = extended(before, ids[:count]) if count else before
            pages = (self._has(group, digest, on_disk) for group in self._groups)
            if (count in lengths or self.disk.has_end(digest)) and (not count or all(pages)):
                return count
        return None

    def _alike(self, before: bytes, ids: Sequence[int]) -> int:
        """Return how many of the tokens after a text have rows in all layers."""
        return min(group.prefix.most_alike(before, ids)[1] for group in self._groups)

    def _has(self, group: LayerGroup, digest: bytes, on_disk: bool) -> bool:
        """Return whether a layer group's page at the end of a text is stored."""
        if digest in group.prefix:
            return True
        return on_disk and self.disk is not None and self.disk.has(group, digest)


def _read(
    disk: PoolDisk, prefix: StoredPrefix, pages: Sequence[Page]
) -> Iterator[tuple[LayerGroup, int, list[mx.array]]]:
    """Yield the rows of pages from disk, one page at a time.

    If one is missing, remove those after it and raise a :class:`PageGoneError`. They will be computed and
    written again, because they may be invalid too, which would otherwise show only after a restart.
    """
    for place, (group, number) in enumerate(pages):
        try:
            rows = disk.page(group, prefix.page_hashes[number], len(prefix.page_ids(number)))
        except PageGoneError:
            for other, behind in pages[place:]:
                disk.remove(other, prefix.page_hashes[behind])
            raise
        yield group, number, rows

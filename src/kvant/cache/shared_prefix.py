"""The prefix that a sequence shares with later ones: its pages, a checkpoint, and files on disk."""

from functools import cached_property
from typing import TYPE_CHECKING

import mlx.core as mx

from kvant.cache.checkpoints import Checkpoint
from kvant.cache.exact_tail import TailCopy
from kvant.cache.layer_format import Arrays
from kvant.cache.pages import PAGE_SIZE
from kvant.cache.pool_disk import PoolDisk
from kvant.cache.prefix import as_text, digests, root

if TYPE_CHECKING:
    from kvant.cache.pool_sequence import PoolSequence


class SharedPrefix:
    """The first tokens of a sequence, which it shares.

    Attributes:
        is_all: whether these are all its tokens, each in a shared page.
    """

    def __init__(self, sequence: "PoolSequence", upto: int | None, *, last_page: bool) -> None:
        """The arguments are those of :meth:`PoolSequence.share_prefix`."""
        self._sequence = sequence
        self._ids = sequence.ids[:upto]
        self._page_hashes = digests(self._ids, sequence.salt, last_page=last_page)
        self._whole_pages = self._page_hashes[: len(self._ids) // PAGE_SIZE]
        self._groups = list(zip(sequence.pool.groups, sequence.tables, strict=True))
        self.is_all = 0 < len(self._ids) == sequence.length <= len(self._page_hashes) * PAGE_SIZE

    @cached_property
    def _text(self) -> bytes:
        return as_text(self._ids, self._sequence.salt)

    @cached_property
    def _states(self) -> list[Arrays] | None:
        """Return copies of the states after all tokens: an array may be a slice of a step's whole result."""
        first = mx.array([0])
        states = self._sequence.states
        copies = [[None if array is None else array[first] for array in arrays] for arrays in states]
        mx.eval(copies)
        return copies or None

    @cached_property
    def _tail(self) -> TailCopy | None:
        """Return a copy of the exact tail at the end of all tokens."""
        return None if self._sequence.pool.divided else self._sequence.copied_tail()

    def keep_in_sequence(self) -> None:
        """Make a checkpoint after all tokens, to which a single pool's sequence itself can go back.

        The first one is a head, because it is the end of the system prompt.
        """
        sequence = self._sequence
        length = sequence.length
        checkpoints = sequence.checkpoints
        if not length or checkpoints.at(length) is not None:
            return
        made = Checkpoint(self._text, len(self._text), is_head=not checkpoints)
        made.rows = {
            layer: sequence.copied_rows(layer, max(table.first, group.first_seen(length)))
            for group, table in self._groups
            if table.moves
            for layer in group.layers
        }
        mx.eval([*made.rows.values()])
        made.states = self._states
        made.tail = self._tail
        checkpoints.keep(self._text, made)

    def put_in_index(self) -> None:
        """Let other sequences of the pool share the pages."""
        hashes = self._page_hashes
        for group, table in self._groups:
            for number in range(-(-table.first // PAGE_SIZE), len(hashes)):  # from its first whole page on
                page = table.pages[number - table.start // PAGE_SIZE]
                ids = self._ids[number * PAGE_SIZE : (number + 1) * PAGE_SIZE]
                before = hashes[number - 1] if number else root(self._sequence.salt)
                group.prefix.put(hashes[number], page, before, ids)
            group.prefix.use(hashes)

    def keep_checkpoint(self, asked: int | None, *, is_head: bool) -> None:
        """Make a checkpoint of the states, and of the pages seen through windows, after all tokens."""
        pool = self._sequence.pool
        last = self._page_hashes[-1]
        keeps_end = bool(pool.states) or (pool.tails is not None and not pool.divided)
        for group in pool.groups:
            is_main = group is pool.main
            if group.window is None and not (is_main and keeps_end):
                continue
            seen = group.seen(self._whole_pages, len(self._ids) % PAGE_SIZE)
            pages = frozenset() if group.window is None else frozenset([*seen, last])
            if last in group.prefix.checkpoints:
                group.prefix.use_checkpoints(self._text)
            elif all(digest in group.prefix for digest in (*pages, last)):
                prompt = as_text(self._ids[:asked], self._sequence.salt)
                made = Checkpoint(self._text, len(prompt), is_head, pages=pages)
                if is_main:
                    made.states = self._states
                    made.tail = self._tail
                group.prefix.keep(last, made)

    def write(self, disk: PoolDisk, *, mid_prompt: bool) -> None:
        """Write the pages that a continuation of the text sees, and the states after all tokens.

        ``mid_prompt``: write only layers without a window.
        """
        whole = self._whole_pages
        hashes = self._page_hashes
        for group, table in self._groups:
            if mid_prompt and group.window is not None:
                continue
            first_seen = len(whole) - len(group.seen(whole, len(self._ids) % PAGE_SIZE))
            for number in range(max(first_seen, -(-table.first // PAGE_SIZE)), len(hashes)):
                rows = min(PAGE_SIZE, len(self._ids) - number * PAGE_SIZE)
                disk.put_page(group, hashes[number], table.pages[number - table.start // PAGE_SIZE], rows)
        if not mid_prompt:
            if self.is_all:
                self._write_end(disk)
            disk.used(hashes)

    def _write_end(self, disk: PoolDisk) -> None:
        """Write the states after all tokens and the exact tail, if texts can start from the disk there."""
        has_states = bool(self._sequence.pool.states)
        ends_page = len(self._ids) % PAGE_SIZE == 0
        if has_states or (ends_page and self._tail is not None):
            disk.put_end(self._page_hashes[-1], self._sequence.states, self._tail)

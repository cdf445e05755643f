"""One reservation for many sequences: the keys and values of all layers, in pages of 128 rows."""

from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import mlx.core as mx

from kvant.cache.checkpoints import Checkpoint
from kvant.cache.disk import DiskCache
from kvant.cache.paged_layers import PagedLayers, PageTable
from kvant.cache.pages import PAGE_SIZE
from kvant.cache.pool_batch import PoolBatch
from kvant.cache.pool_disk import PoolDisk
from kvant.cache.pool_sequence import PoolSequence, close
from kvant.cache.pool_state import PoolState, check_sizes, pool_bytes, rows_alone, sizes_alone
from kvant.cache.prefix import as_text, digests, extended, root
from kvant.errors import ContextError

__all__ = ["Pool", "PoolSequence", "check_sizes", "pool_bytes", "rows_alone", "sizes_alone"]

FEWEST_COPIED = 16  # tokens; fewer are fed as fast as they are copied


class Pool(PoolState):
    """Sequences of one memory, and the steps that they take together. ``model.make_pool`` makes it."""

    def pages_needed(self, max_tokens: int) -> int:
        """Pages, of :attr:`num_pages`, for a sequence of so many tokens that shares none."""
        return self.main.limit(max_tokens)

    def fits(self, max_tokens: int) -> bool:
        """Whether a sequence of so many tokens can be opened now."""
        free = all(part.limit(max_tokens) <= part.num_free for part in self.parts)
        return free and max_tokens <= self.max_seq_len and self.num_sequences < self.max_sequences

    def sequence(
        self, max_tokens: int, prompt: Sequence[int] = (), *, salt: bytes = b"", whole_pages: bool = True
    ) -> PoolSequence:
        """Open a sequence, with pages for ``max_tokens`` tokens, the most that it will have. It must be
        released.

        Args:
            prompt: ids that it will begin with. As many as others have shared are there at once, and at least
                one less than given: one has to be fed for there to be logits.
            salt: sequences share pages only with those of the same one.
            whole_pages: only whole pages are shared, which takes no copy. Else the rows of a page that begins
                alike are copied as well.
        """
        with self.turn:
            self.check_opening(max_tokens)
            if len(prompt) > max_tokens:
                raise ContextError(
                    f"the prompt has {len(prompt)} tokens; max_tokens of its sequence is {max_tokens}"
                )
            chain, rest = self._beginning(prompt, salt, whole_pages)
            tables: list[PageTable] = []
            try:
                for part in self.parts:
                    part.prefix.use(chain)
                    tables.append(part.open(chain, max_tokens, rest))
                length = len(chain) * PAGE_SIZE
                if rest:
                    before, behind = chain[-1] if chain else root(salt), prompt[length : length + rest]
                    parts = zip(self.parts, tables, strict=True)
                    length += min([part.copy_alike(table, length, before, behind) for part, table in parts])
            except BaseException:
                close(self, tables)
                raise
            made = PoolSequence(self, tables, max_tokens, prompt[:length], salt)
            states = None
            if self.states and length:
                states = self.main.prefix.states(digests(made.ids, salt, last_page=True)[-1])
            parts = zip(self.parts, tables, strict=True)
            if (states is None and self.states and length) or any(
                t.first > part.first_seen(length) for part, t in parts
            ):
                made.close()  # what it would go on from went where pages were needed for the sequence itself
                return self.sequence(max_tokens, salt=salt)
            if states is not None:
                made.states = states
            for part in self.parts if length and self.checkpoints else ():
                part.prefix.use_checkpoints(as_text(made.ids, salt), by_prompt=True)
            return made

    def use_disk(self, disk: DiskCache, *, is_exact: bool = False) -> None:
        """Write what its sequences share to a disk cache, and let :meth:`fetch` read it.

        ``is_exact``: only what chunks of 128 tokens computed is read, with this MLX on this kind of device.
        """
        self.disk = PoolDisk(disk, self, is_exact=is_exact)

    def fetch(self, prompt: Sequence[int], *, salt: bytes = b"", whole_pages: bool = True, most: int) -> bool:
        """Read pages that a prompt begins with from disk, ``most`` of them at most, for :meth:`sequence` to
        share.

        Returns whether there may be more to read.
        """
        if self.disk is None:
            return False
        with self.turn:
            ids, chain, first = self.on_disk(prompt, salt, whole_pages)
            for part in self.parts:
                part.prefix.use(chain)
            needed = [(part, number) for part in self.parts for number in range(first[part], len(chain))]
            missing = [(part, number) for part, number in needed if chain[number] not in part.prefix]
            missing.sort(key=lambda each: each[1])  # what is before a wrong page has been read, and is right
            for place, (part, number) in enumerate(missing[:most]):
                own, before = ids[number * PAGE_SIZE : (number + 1) * PAGE_SIZE], [root(salt), *chain][number]
                held = self.disk.page(part, chain[number], len(own))
                if held is None:
                    # It is gone by now, and with it some of the beginning. What is behind it is going to be
                    # computed, so it goes too and is written again: it may be wrong as well, which only a
                    # restart would show.
                    for other, behind in missing[place:]:
                        self.disk.remove(other, chain[behind])
                    return True
                if not part.take_in(chain[number], before, own, held):
                    return False
            mx.eval([layer.arrays for layer in self.layers])
            if len(missing) > most:
                return True
            if self.states and chain and self.main.prefix.states(chain[-1]) is None:
                if (states := self.disk.states(chain[-1])) is None:
                    return True
                text = as_text(ids, salt)
                self.main.prefix.keep(chain[-1], Checkpoint(text, len(text), states=states))
            return False

    def on_disk(
        self, prompt: Sequence[int], salt: bytes, whole_pages: bool
    ) -> tuple[Sequence[int], list[bytes], dict[PagedLayers, int]]:
        """The longest beginning of a prompt, less its last token, that there is in pages here and on disk.

        Returns its tokens, the digests of its pages, and of each part the number of the first page that is
        needed.
        """
        chain, rest = self._beginning(prompt, salt, whole_pages, self.disk)
        first = {part: len(chain) - len(part.seen(chain, rest)) for part in self.parts}
        length = len(chain) * PAGE_SIZE
        if rest and self.states:
            chain = [*chain, extended(chain[-1] if chain else root(salt), prompt[length : length + rest])]
            length += rest
        return prompt[:length], chain, first

    def stored_after(self, ids: Sequence[int], salt: bytes) -> list[int]:
        """Tokens that are stored behind a text, of the page that was stored last; none: nothing is."""
        chain = digests(ids, salt)
        return list(self.main.prefix.stored_after(chain[-1] if chain else root(salt))[len(ids) % PAGE_SIZE :])

    def num_stored(self, ids: Sequence[int], salt: bytes) -> int:
        """Tokens at the beginning of a text that others had too, whether or not it can go on from all of
        them.
        """
        chain = digests(ids, salt)
        while chain and not has_page(self.disk, self.main, chain[-1]):
            chain.pop()
        length = len(chain) * PAGE_SIZE
        behind = self.main.prefix.most_alike(
            chain[-1] if chain else root(salt), ids[length : length + PAGE_SIZE]
        )
        return length + behind[1]

    def batch(self, sequences: Sequence[Any], rows: int | None = None) -> PoolBatch:
        """The cache of steps in which sequences of this pool take part, at least one, none twice.

        ``rows``: sequences that the steps' inputs have, those past the given ones as padding; None: no
            padding.
        """
        return PoolBatch(self, sequences, rows)

    def _beginning(
        self, prompt: Sequence[int], salt: bytes, whole_pages: bool, disk: PoolDisk | None = None
    ) -> tuple[list[bytes], int]:
        """What all layers, or ``disk``, have of a prompt less its last token: the pages' digests, and
        tokens behind.
        """
        known = prompt[: max(0, len(prompt) - 1)]
        chain = digests(known, salt)
        has = partial(has_page, disk)
        count = len(chain)
        for part in self.parts:
            if part.window is None:
                count = min(count, sum(1 for _ in takewhile(partial(has, part), chain)))
        for pages in range(count, -1, -1):
            before = chain[pages - 1] if pages else root(salt)
            rest = self._behind(before, known[pages * PAGE_SIZE : (pages + 1) * PAGE_SIZE], whole_pages, disk)
            for behind in () if rest is None else (rest,) if self.states else (rest, 0):
                windows = (part for part in self.parts if part.window is not None)
                if all(has(part, digest) for part in windows for digest in part.seen(chain[:pages], behind)):
                    return chain[:pages], behind
        return [], 0

    def _behind(
        self, before: bytes, ids: Sequence[int], whole_pages: bool, disk: PoolDisk | None
    ) -> int | None:
        """How many of the tokens behind the whole pages of a text can be copied; None: nobody goes on
        there.
        """
        if not self.states:
            alike = 0 if whole_pages else self._alike(before, ids)
            return alike if alike >= FEWEST_COPIED else 0
        kept = self.main.prefix.kept_behind(before, ids)
        if disk is None:
            here = (n for n in kept if not n or (not whole_pages and self._alike(before, ids[:n]) == n))
            return next(here, None)
        for count in range(0 if whole_pages else len(ids), -1, -1):
            digest = extended(before, ids[:count]) if count else before
            pages = (has_page(disk, part, digest) for part in self.parts)
            if (count in kept or disk.has(None, digest)) and (not count or all(pages)):
                return count
        return None

    def _alike(self, before: bytes, ids: Sequence[int]) -> int:
        """How many of the tokens behind a text have rows in all layers."""
        return min(part.prefix.most_alike(before, ids)[1] for part in self.parts)


def has_page(disk: PoolDisk | None, part: PagedLayers, digest: bytes) -> bool:
    """Whether the page of some layers at the end of a text is in their index, or on disk."""
    return digest in part.prefix or (disk is not None and disk.has(part, digest))

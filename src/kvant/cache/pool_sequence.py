"""A sequence of a pool: its tokens, and the pages they are in."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

import mlx.core as mx

from kvant.cache.identity import Identity
from kvant.cache.layer import KVCache
from kvant.cache.layer_format import difference
from kvant.cache.model import ModelCache
from kvant.cache.paged_layers import PagedLayers, PageTable, PoolLayer
from kvant.cache.pages import PAGE_SIZE, runs
from kvant.cache.prefix import digests, extended, root
from kvant.cache.window import SLACK
from kvant.errors import ContextError, SnapshotError
from kvant.operators.paged_attention import put_rows, stored_rows
from kvant.threads import Turn


class PoolState:
    """What the sequences of a pool have in common.

    Attributes:
        turn: held by the thread that computes through the pool.
        layers: of the model, in order.
        parts: the same layers by the page tables that they share.
        max_sequences: sequences that can be open at once.
        num_sequences: sequences that are open.
        max_seq_len: tokens that a sequence can have.
        prefill_step_size: new tokens of a sequence in one step, at most.
        make_cache: a cache for so many tokens of one sequence, in the pool's format.
        identity: of the model whose tokens it holds; None: not known.
        divided: other ranks hold a part of the rows. A sequence takes no cache and gives none then.
        takes_back: a step of a sequence may be committed in part, one of several sequences too.
        made_for: the config of the model that made it; None: not known.
    """

    divided = False
    takes_back = True
    made_for: object = None

    def __init__(
        self,
        layers: Sequence[PoolLayer],
        parts: Sequence[PagedLayers],
        *,
        max_sequences: int,
        max_seq_len: int,
        prefill_step_size: int,
        make_cache: Callable[[int], ModelCache],
        identity: Identity | None,
    ) -> None:
        self.turn = Turn()
        self.layers = tuple(layers)
        self.parts = tuple(parts)
        self.max_sequences = max_sequences
        self.num_sequences = 0
        self.max_seq_len = max_seq_len
        self.prefill_step_size = prefill_step_size
        self.make_cache = make_cache
        self.identity = identity

    @property
    def has_windows(self) -> bool:
        """Whether the pages of some layers move along with their sequence, while it grows."""
        return any(part.window is not None for part in self.parts)

    def check_whole(self) -> None:
        """Refuse what needs all rows."""
        if self.divided:
            raise SnapshotError("the pool is divided over several ranks: its sequences take no cache and give none")

    def check_opening(self, max_tokens: int) -> None:
        """Refuse a sequence that the pool is not made for, or one too many."""
        if type(max_tokens) is not int or max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens!r}; expected a positive int")
        if max_tokens > self.max_seq_len:
            raise ContextError(
                f"a sequence of {max_tokens} tokens is asked for; one of this pool has at most {self.max_seq_len}"
            )
        if self.num_sequences == self.max_sequences:
            raise ContextError(f"the pool is for {self.max_sequences} sequences; all of them are in use")


class PoolSequence:
    """A text in a pool. ``pool.sequence`` makes it.

    Attributes:
        pool: it is part of.
        tables: its pages, one table for each of the pool's parts.
        max_tokens: tokens that pages are reserved for.
        salt: who may share its pages: sequences with the same one.
        step: the step that it takes part in and that is not committed; None: none.
    """

    def __init__(
        self, pool: PoolState, tables: list[PageTable], max_tokens: int, ids: Sequence[int], salt: bytes
    ) -> None:
        """With ``ids`` of tokens whose rows are in the tables' pages already."""
        self.pool = pool
        self.tables = tables
        self.max_tokens = max_tokens
        self.salt = salt
        self.step: object | None = None
        self._ids = list(ids)
        self._length = len(self._ids)
        self._released = False
        pool.num_sequences += 1

    @property
    def length(self) -> int:
        """Committed tokens; the position of the next one."""
        return self._length

    @property
    def ids(self) -> list[int]:
        """Ids of the committed tokens."""
        return self._ids[: self._length]

    @property
    def released(self) -> bool:
        """Whether its pages were given back."""
        return self._released

    def check_room(self, new_tokens: int) -> None:
        """Raise a ContextError unless so many more tokens fit."""
        self.check_open()
        if self._length + new_tokens > self.max_tokens:
            raise ContextError(
                f"{new_tokens} more tokens do not fit: {self._length} of the {self.max_tokens} reserved tokens are used"
            )

    def check_open(self) -> None:
        """Raise a RuntimeError if it was released."""
        if self._released:
            raise RuntimeError("the sequence was released; expected one that was not")

    def commit(self, ids: Sequence[int]) -> None:
        """Count tokens whose rows were written; for a batch."""
        # The length last: an interruption before leaves ids that are past it and not looked at.
        self._ids[self._length :] = ids
        self._length += len(ids)
        self.step = None

    def trim(self, num_tokens: int) -> int:
        """Forget the last tokens, or all it has.

        Returns:
            how many were forgotten.
        """
        if type(num_tokens) is not int or num_tokens < 0:
            raise ValueError(f"num_tokens is {num_tokens!r}; expected an int, 0 or more")
        with self.pool.turn:
            self.check_open()
            lost = min(num_tokens, self._length)
            length = self._length - lost
            if not self.can_trim_to(length):
                raise ValueError(
                    f"{lost} of {self._length} tokens are to be forgotten; the pages of a window that {length} tokens "
                    "would need were given back"
                )
            self.step = None
            self._length = length
            for part, table in zip(self.pool.parts, self.tables, strict=True):
                part.go_back(table, length)
            return lost

    def trim_to(self, num_tokens: int) -> None:
        """Forget what it has past its first ``num_tokens`` tokens; errors as those of :meth:`trim`."""
        if type(num_tokens) is not int or num_tokens < 0:
            raise ValueError(f"num_tokens is {num_tokens!r}; expected an int, 0 or more")
        self.trim(max(0, self._length - num_tokens))

    def can_trim_to(self, num_tokens: int) -> bool:
        """Whether it can go back to its first ``num_tokens`` tokens, exactly."""
        length = min(num_tokens, self._length)
        parts = zip(self.pool.parts, self.tables, strict=True)
        return length == self._length or all(part.can_go_back(table, length) for part, table in parts)

    def fork(self, max_tokens: int | None = None) -> Self:
        """A sequence of its own with the same tokens. It shares their pages; what one writes the other never sees.

        Args:
            max_tokens: tokens that pages are reserved for; None: as many as this one has.
        """
        max_tokens = self.max_tokens if max_tokens is None else max_tokens
        with self.pool.turn:
            self.check_open()
            self.pool.check_opening(max_tokens)
            if max_tokens < self._length:
                raise ContextError(f"max_tokens is {max_tokens}; the sequence has {self._length} tokens")
            tables: list[PageTable] = []
            try:
                for part, table in zip(self.pool.parts, self.tables, strict=True):
                    tables.append(part.fork(table, self._length, max_tokens))
            except BaseException:
                close(self.pool, tables)
                raise
            return type(self)(self.pool, tables, max_tokens, self.ids, self.salt)

    def share_prefix(self, upto: int | None = None, *, last_page: bool = False) -> None:
        """Let other sequences read its whole pages.

        Through a window they need the pages of the last tokens that they begin with. So where there are windows, texts
        can be joined at the lengths at which this was called, and not before them.

        Args:
            upto: only pages of its first tokens, up to this one; None: of all.
            last_page: the last page too, where it is not whole and there are no windows. It is copied for whoever
                begins alike, and before this sequence writes there again.
        """
        with self.pool.turn:
            self.check_open()
            ids = self.ids[:upto]
            chain = digests(ids, self.salt)
            before = [root(self.salt), *chain]
            if last_page and len(ids) % PAGE_SIZE and not self.pool.has_windows:
                chain.append(extended(before[-1], ids[len(chain) * PAGE_SIZE :]))
            for part, table in zip(self.pool.parts, self.tables, strict=True):
                first = -(-table.first // PAGE_SIZE)  # the first whole page that is there
                for number in range(first, len(chain)):
                    page = table.pages[number - table.start // PAGE_SIZE]
                    part.prefix.put(
                        chain[number], page, before[number], ids[number * PAGE_SIZE : (number + 1) * PAGE_SIZE]
                    )
                part.prefix.use(chain)

    def load(self, cache: ModelCache) -> None:
        """Take the tokens of a cache of the same model and format. The sequence must be empty.

        Args:
            cache: of any reservation; it stays as it is.
        """
        self.pool.check_whole()
        with self.pool.turn, cache.turn:
            length = cache.offset
            self.check_room(length)
            if self._length:
                raise ValueError(f"the sequence holds {self._length} tokens; expected an empty one")
            held = self._check_format(cache)
            (ids,) = cache.ids
            if len(ids) != length:
                raise ValueError(f"the cache knows the ids of {len(ids)} of its {length} tokens")
            self.step = None
            try:
                for part, table in zip(self.pool.parts, self.tables, strict=True):
                    own = [(layer, held[self.pool.layers.index(layer)]) for layer in part.layers]
                    self._load(part, table, own, length, cache.layers[0].sequence.written)
            except BaseException:
                for part, table in zip(self.pool.parts, self.tables, strict=True):
                    part.go_back(table, 0)
                raise
            self.commit(ids)

    def _load(
        self,
        part: PagedLayers,
        table: PageTable,
        layers: Sequence[tuple[PoolLayer, KVCache]],
        length: int,
        written: int,
    ) -> None:
        """:meth:`load`, of some layers and those of the cache; without counting the tokens."""
        first = max((given.format.first(length, written) for _, given in layers), default=0)
        part.begin_at(table, first, length)
        rows = runs(table.pages, table.first - table.start, length - table.start)
        for layer, given in layers:
            given.settle_committed()
            skipped = table.first - given.format.first(length, written)
            for array, tokens in zip(layer.arrays, given.stored(), strict=True):
                put_rows(array, tokens[:, :, skipped:], rows)
            mx.eval(layer.arrays)  # or the cache's next append would copy its whole array

    def to_cache(self, max_seq_len: int | None = None) -> ModelCache:
        """A cache of its own with the same tokens, for ``save`` or another engine.

        Args:
            max_seq_len: its reservation; None: as many tokens as the sequence has pages for.
        """
        self.pool.check_whole()
        with self.pool.turn:
            self.check_open()
            made = self.pool.make_cache(self.max_tokens if max_seq_len is None else max_seq_len)
            length = self._length
            made.reserve(length)
            held = _with_tokens(made)
            # A ring that had this many tokens has lost the rows that are missing here.
            parts = list(zip(self.pool.parts, self.tables, strict=True))
            lost = [table.first + (part.window or 0) + SLACK for part, table in parts if table.first]
            written = max([length, *lost])
            for part, table in parts:
                for layer in part.layers:
                    own = held[self.pool.layers.index(layer)]
                    first = own.format.first(length, written)
                    rows = runs(table.pages, first - table.start, length - table.start)
                    own.restore([stored_rows(array, rows) for array in layer.arrays], first, length)
                    mx.eval(own.buffers)  # or the pool's next append would copy its whole array
            made.layers[0].sequence.restore(length, written, self.ids)
            return made

    def _check_format(self, cache: ModelCache) -> list[KVCache]:
        """The layers of a cache that hold tokens."""
        held = _with_tokens(cache)
        if len(held) != len(self.pool.layers):
            raise ValueError(f"the cache has {len(held)} layers; expected {len(self.pool.layers)}")
        if None not in (cache.identity, self.pool.identity) and cache.identity != self.pool.identity:
            raise ValueError("the cache holds tokens of another model than the pool's")
        for number, (given, layer) in enumerate(zip(held, self.pool.layers, strict=True)):
            own = replace(layer.format, slack=given.format.slack)
            differs = difference(given.format, own, given.max_seq_len, self.pool.max_seq_len)
            if differs:
                raise ValueError(f"the cache is of another format: {differs}, in layer {number}")
        return held

    def release(self) -> None:
        """Give its pages back. It cannot be used after it; to release it again does nothing."""
        with self.pool.turn:
            if not self._released:
                self._released = True
                self.pool.num_sequences -= 1
                close(self.pool, self.tables)


def _with_tokens(cache: ModelCache) -> list[KVCache]:
    """The layers of a cache that a pool has too: not those of a state."""
    return [layer for layer in cache.layers if layer.format.has_tokens]


def close(pool: PoolState, tables: Sequence[PageTable]) -> None:
    """Give back the pages of the first parts' tables, or of all."""
    for part, table in zip(pool.parts, tables, strict=False):
        part.close(table)

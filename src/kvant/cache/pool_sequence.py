"""A sequence of a pool: its tokens, and the pages they are in."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import mlx.core as mx

from kvant.cache.checkpoints import Checkpoint
from kvant.cache.layer_format import SLACK, Arrays, State, difference
from kvant.cache.paged_layers import PageTable, PoolLayer
from kvant.cache.pages import PAGE_SIZE, runs
from kvant.cache.prefix import as_text, digests, root
from kvant.errors import ContextError
from kvant.operators.paged_rows import put_rows, stored_rows

if TYPE_CHECKING:
    from kvant.cache.pool import Pool


class PoolSequence:
    """A text in a pool. ``pool.sequence`` makes it."""

    def __init__(
        self, pool: "Pool", tables: list[PageTable], max_tokens: int, ids: Sequence[int], salt: bytes
    ) -> None:
        """With ``ids`` of tokens whose rows are in the tables' pages already."""
        self.pool = pool
        self.tables = tables  # its pages, one table for each of the pool's parts
        self.max_tokens = max_tokens  # that pages are reserved for
        self.salt = salt  # it shares pages with sequences of the same one
        self.step: object | None = None  # that it takes part in and that is not committed
        self._ids = list(ids)
        self.length = len(self._ids)  # committed tokens; the position of the next one
        self.lookahead = 0  # the last of these tokens, which were computed but not handed out yet
        self._kept: dict[int, tuple[dict[PoolLayer, list[mx.array]], Any]] = {}  # places, by their lengths
        self._states: dict[int, list[Arrays]] = {}  # by the number of tokens
        self.released = False  # its pages were given back
        pool.num_sequences += 1

    @property
    def ids(self) -> list[int]:
        """Ids of the committed tokens."""
        return self._ids[: self.length]

    @property
    def room(self) -> int:
        """Tokens that still fit."""
        return self.max_tokens - self.length

    def check_room(self, new_tokens: int) -> None:
        """Raise a ContextError unless so many more tokens fit."""
        self.check_open()
        if new_tokens > self.room:
            raise ContextError(
                f"{new_tokens} more tokens do not fit: {self.length} of the {self.max_tokens} reserved "
                f"tokens are used"
            )

    def check_open(self) -> None:
        """Raise a RuntimeError if it was released."""
        if self.released:
            raise RuntimeError("the sequence was released; expected one that was not")

    @property
    def states(self) -> list[Arrays]:
        """The arrays of each linear or convolution layer, after the committed tokens."""
        return self._states.get(self.length) or [[None] * len(state.shapes) for state in self.pool.states]

    @states.setter
    def states(self, states: list[Arrays]) -> None:
        self._states = {self.length: states}

    def will_have(self, length: int, states: list[Arrays]) -> None:
        """Take the states of so many tokens, which count from there on: a commit can be interrupted
        anywhere.
        """
        self._states = {self.length: self.states, length: states}

    def commit(self, ids: Sequence[int]) -> None:
        """Count tokens whose rows were written; for a batch."""
        # The length last: an interruption before leaves ids that are past it and not looked at.
        self._ids[self.length :] = ids
        self.length += len(ids)
        self.step = None
        if self._states:
            self.states = self.states  # the others are dropped

    def trim(self, num_tokens: int) -> int:
        """Forget the last tokens, or all it has, as far as :meth:`can_trim_to` allows. Returns how many."""
        check_num_tokens(num_tokens)
        with self.pool.turn, self.pool.handing_out():
            self.check_open()
            lost = min(num_tokens, self.length)
            length = self.length - lost
            if not self.can_trim_to(length):
                raise ValueError(
                    f"{lost} of {self.length} tokens are to be forgotten; its windows or states go back no "
                    f"further "
                    f"than to {self.oldest} tokens, or to none"
                )
            self.step = None
            if 0 < length < min(self.oldest, self.length):
                self._put_back(length)
            else:
                self.length = length
                for part, table in zip(self.pool.parts, self.tables, strict=True):
                    part.go_back(table, length)
            self._kept = {each: kept for each, kept in self._kept.items() if each <= length}
            self.states = self.states
            self.pool.drop_step()
            self.lookahead = 0
            return lost

    def _put_back(self, length: int) -> None:
        """Have the tokens of a place that was kept; none, where that is interrupted."""
        kept, states = self._kept[length]
        self.length = 0
        try:
            for part, table in zip(self.pool.parts, self.tables, strict=True):
                if table.moves:
                    part.begin_at(table, part.first_seen(length), length)
            for layer, rows in kept.items():
                self.put(layer, rows, length)
            self.will_have(length, states)
        except BaseException:
            self._kept.clear()
            for table in self.tables:
                if table.moves:  # whose pages are found again when the cache begins to hand out the next ones
                    table.first, table.pages = 0, []
            raise
        self.length = length

    def keep(self) -> None:
        """Keep what is seen through windows, and the states, so that it can go back to the tokens that it has
        now.

        Of more than the pool has checkpoints the second goes: the first is the end of the system prompt.
        """
        if not self.pool.checkpoints or self.pool.divided or not self.length or self.length in self._kept:
            return
        rows = {}
        for part, table in zip(self.pool.parts, self.tables, strict=True):
            for layer in part.layers if table.moves else ():
                rows[layer] = self.held_rows(layer, max(table.first, part.first_seen(self.length)))
        states = own_copies(self.states)
        mx.eval([*rows.values()], states)
        self._kept[self.length] = rows, states
        if len(self._kept) > self.pool.checkpoints:
            del self._kept[sorted(self._kept)[min(1, self.pool.checkpoints - 1)]]

    @property
    def kept_arrays(self) -> list[mx.array]:
        """What is kept beside its rows."""
        every = [arrays for rows, states in self._kept.values() for arrays in (*rows.values(), *states)]
        return [array for arrays in every for array in arrays if array is not None]

    def nearest(self, num_tokens: int) -> int:
        """The greatest length, of that many tokens or fewer, that it can go back to."""
        if self.can_trim_to(num_tokens):
            return num_tokens
        return max((length for length in self._kept if length < num_tokens), default=0)

    def trim_to(self, num_tokens: int) -> None:
        """Forget what it has past its first ``num_tokens`` tokens."""
        check_num_tokens(num_tokens)
        self.trim(max(0, self.length - num_tokens))

    def go_back(self, num_tokens: int) -> int:
        """Forget what it has past ``num_tokens`` tokens, or past the last checkpoint before, if it must.

        Returns how many tokens it still has.
        """
        self.trim_to(self.nearest(num_tokens))
        return self.length

    def keep_common(self, ids: Sequence[int]) -> int:
        """Go back to what it has in common with these tokens less the last. Returns how many of them it has
        now.

        One token has to be fed for there to be logits. Fewer are left if a window or a state cannot go back
        that far.
        """
        own = self.ids
        length = min(len(own), len(ids) - 1)
        common = next((i for i in range(length) if own[i] != ids[i]), length)
        return self.go_back(common)

    def can_trim_to(self, num_tokens: int) -> bool:
        """Whether it can go back to its first ``num_tokens`` tokens, exactly."""
        return num_tokens == 0 or num_tokens >= min(self.oldest, self.length) or num_tokens in self._kept

    @property
    def oldest(self) -> int:
        """The shortest length, except 0, that it can go back to exactly. A state goes back to nothing."""
        if self.pool.states:
            return self.length
        return self._oldest_rows

    @property
    def _oldest_rows(self) -> int:
        """The shortest length, except 0, whose rows are all there."""
        parts = zip(self.pool.parts, self.tables, strict=True)
        return max(part.oldest_length(table) for part, table in parts)

    def fork(self, max_tokens: int | None = None) -> Self:
        """A sequence of its own with the same tokens. It shares their pages; what one writes the other never
        sees.

        ``max_tokens``: that pages are reserved for; None: as many as this one has.
        """
        max_tokens = self.max_tokens if max_tokens is None else max_tokens
        with self.pool.turn:
            self.check_open()
            self.pool.check_opening(max_tokens)
            if max_tokens < self.length:
                raise ContextError(f"max_tokens is {max_tokens}; the sequence has {self.length} tokens")
            tables: list[PageTable] = []
            try:
                for part, table in zip(self.pool.parts, self.tables, strict=True):
                    tables.append(part.fork(table, self.length, max_tokens))
            except BaseException:
                close(self.pool, tables)
                raise
            made = type(self)(self.pool, tables, max_tokens, self.ids, self.salt)
            made.states = self.states  # a step replaces a state's arrays
            return made

    def share_prefix(
        self,
        upto: int | None = None,
        *,
        last_page: bool = False,
        mid_prompt: bool = False,
        asked: int | None = None,
        is_head: bool = False,
    ) -> None:
        """Let other sequences read its whole pages, and keep a checkpoint if all of its text is shared.

        Through a window they need the pages of the last tokens that they begin with. So where there are
        windows, texts can be joined at the lengths at which this was called, and not before them.

        Args:
            upto: only pages of its first tokens, up to this one; None: of all.
            last_page: the last page too, where it is not whole. It is copied for whoever begins alike, and
                before this sequence writes there again.
            mid_prompt: more of its prompt is to come, and nobody is likely to go on here: no checkpoint is
                kept, and in a disk cache is then what sees all tokens.
            asked: tokens up to the last checkpoint in its prompt; None: all that it has.
            is_head: prompts of other conversations are likely to begin with its text.
        """
        pool = self.pool
        if pool.states and not pool.checkpoints:
            return
        if pool.single and last_page and upto in (None, self.length):
            self.keep()  # the next sequence begins with what this one leaves
        if pool.single and pool.disk is None:
            return
        with pool.turn:
            self.check_open()
            ids = self.ids[:upto]
            chain = digests(ids, self.salt, last_page=last_page)
            is_all = 0 < len(ids) == self.length <= len(chain) * PAGE_SIZE
            if pool.disk is not None:
                self._write(ids, chain, mid_prompt, is_all=is_all)
            if pool.single:
                return
            before = [root(self.salt), *chain]
            for part, table in zip(pool.parts, self.tables, strict=True):
                first = -(-table.first // PAGE_SIZE)  # the first whole page that is there
                for number in range(first, len(chain)):
                    page = table.pages[number - table.start // PAGE_SIZE]
                    own = ids[number * PAGE_SIZE : (number + 1) * PAGE_SIZE]
                    part.prefix.put(chain[number], page, before[number], own)
                part.prefix.use(chain)
            if is_all and not mid_prompt and pool.checkpoints:
                self._keep_checkpoint(ids, chain, asked, is_head=is_head)

    def _keep_checkpoint(
        self, ids: Sequence[int], chain: Sequence[bytes], asked: int | None, *, is_head: bool
    ) -> None:
        """Keep the states, and the pages that are seen through windows, after all its tokens."""
        text = as_text(ids, self.salt)
        for part in self.pool.parts:
            has_states = bool(self.pool.states) and part is self.pool.main
            if part.window is None and not has_states:
                continue
            prefix, whole = part.prefix, chain[: len(ids) // PAGE_SIZE]
            seen = part.seen(whole, len(ids) % PAGE_SIZE)
            pages = frozenset() if part.window is None else frozenset([*seen, chain[-1]])
            if chain[-1] in prefix.checkpoints:
                prefix.use_checkpoints(text)
            elif all(digest in prefix for digest in (*pages, chain[-1])):
                states = own_copies(self.states) if has_states else None
                mx.eval(states)
                prompt = len(as_text(ids[:asked], self.salt))
                prefix.keep(chain[-1], Checkpoint(text, prompt, is_head, states, pages))

    def _write(self, ids: Sequence[int], chain: Sequence[bytes], mid_prompt: bool, *, is_all: bool) -> None:
        """Have the pages written that a text sees which goes on here, and the states after all its tokens."""
        disk, whole = self.pool.disk, chain[: len(ids) // PAGE_SIZE]
        for part, table in zip(self.pool.parts, self.tables, strict=True):
            first = max(
                len(whole) - len(part.seen(whole, len(ids) % PAGE_SIZE)), -(-table.first // PAGE_SIZE)
            )
            for number in range(first, len(chain) if part.window is None or not mid_prompt else 0):
                page, rows = table.pages[number - table.start // PAGE_SIZE], len(ids) - number * PAGE_SIZE
                disk.put_page(part, chain[number], page, min(PAGE_SIZE, rows))
        if not mid_prompt:
            if self.pool.states and is_all:
                disk.put_states(chain[-1], self.states)
            disk.used(chain)

    def load(self, other: "PoolSequence") -> None:
        """Take the tokens of a sequence of another pool, of the same model and format. This one must be
        empty.
        """
        own, given = self.pool, other.pool
        if given.layout != own.layout:
            raise ValueError("the cache is for a model with other layers than the pool's")
        own.check_whole()
        given.check_whole()
        with own.turn, given.turn:
            self.check_open()
            other.check_open()
            length, ids = other.length, other.ids
            if self.length:
                raise ValueError(f"the sequence holds {self.length} tokens; expected an empty one")
            if len(given.layers) != len(own.layers):
                raise ValueError(f"the cache has {len(given.layers)} layers; expected {len(own.layers)}")
            if None not in (given.identity, own.identity) and given.identity != own.identity:
                raise ValueError("the cache holds tokens of another model than the pool's")
            source = dict(zip(own.layers, given.layers, strict=True))
            for number, (layer, from_layer) in enumerate(source.items()):
                differs = difference(from_layer.format, layer.format, given.max_seq_len, own.max_seq_len)
                if differs:
                    raise ValueError(f"the cache is of another format: {differs}, in layer {number}")
            lost = {layer: other._table_of(from_layer).first for layer, from_layer in source.items()}
            with self.filling(lost, ids):
                for layer, from_layer in source.items():
                    first = max(lost[layer], self._table_of(layer).first)
                    self.put(layer, other.held_rows(from_layer, first), length)
                self.will_have(length, other.states)

    @property
    def saved_layers(self) -> list[PoolLayer | Arrays]:
        """What a snapshot has of it, in the order of the model: layers with rows, or the arrays of a
        state.
        """
        states = iter(self.states)
        return [next(states) if isinstance(own, State) else own for own in self.pool.saved]

    def held_rows(self, layer: PoolLayer, first: int) -> list[mx.array]:
        """The rows (2, K, rows, D') of a layer's tokens from position ``first`` on, as they are stored; a
        copy.
        """
        table = self._table_of(layer)
        rows = runs(table.pages, first - table.start, self.length - table.start)
        return [stored_rows(array, rows) for array in layer.arrays]

    def _table_of(self, layer: PoolLayer) -> PageTable:
        return next(
            table for part, table in zip(self.pool.parts, self.tables, strict=True) if layer in part.layers
        )

    @contextmanager
    def filling(self, lost: Mapping[PoolLayer, int], ids: Sequence[int]) -> Iterator[None]:
        """Have tokens whose rows are :meth:`put` in inside the block, and the states; after an error there it
        has none.

        ``lost``: first tokens without rows in a layer.
        """
        self.check_room(len(ids))
        self.step = None
        try:
            for part, table in zip(self.pool.parts, self.tables, strict=True):
                first = max((lost[layer] for layer in part.layers), default=0)
                part.begin_at(table, first, len(ids))
            yield
        except BaseException:
            for part, table in zip(self.pool.parts, self.tables, strict=True):
                part.go_back(table, 0)
            raise
        self.commit(ids)

    def put(self, layer: PoolLayer, tokens: Sequence[mx.array], length: int) -> None:
        """Write the rows (2, K, rows, D') of a layer's tokens before ``length``, those that there are
        pages for.
        """
        table = self._table_of(layer)
        count = length - table.first
        rows = runs(table.pages, table.first - table.start, length - table.start)
        for array, each in zip(layer.arrays, tokens, strict=True):
            put_rows(array, each[:, :, each.shape[2] - count :], rows)
        mx.eval(layer.arrays)  # or the next append would copy the whole array that was read

    @property
    def written(self) -> int:
        """The most tokens that it has had, as a file says it: rows before the last window's, and 16 more,
        are gone.
        """
        oldest = self._oldest_rows
        return max(self.length, oldest + 1 + SLACK) if oldest else self.length

    def release(self) -> None:
        """Give its pages back. It cannot be used after it; to release it again does nothing.

        The sequence of a conversation's cache stays open: the cache has one alone.
        """
        if not self.pool.single:
            self.close()

    def close(self) -> None:
        """Give the pages back, of a conversation's cache too."""
        with self.pool.turn:
            if not self.released:
                self.released = True
                self._kept.clear()
                self.pool.num_sequences -= 1
                close(self.pool, self.tables)
                self._states = {}


def own_copies(states: Sequence[Arrays]) -> list[Arrays]:
    """Copies of states (1, ...): an array may be a part of what a whole step computed."""
    first = mx.array([0])
    return [[None if array is None else array[first] for array in arrays] for arrays in states]


def check_num_tokens(num_tokens: int) -> None:
    if type(num_tokens) is not int or num_tokens < 0:
        raise ValueError(f"num_tokens is {num_tokens!r}; expected an int, 0 or more")


def close(pool: "Pool", tables: Sequence[PageTable]) -> None:
    """Give back the pages of the first parts' tables, or of all."""
    for part, table in zip(pool.parts, tables, strict=False):
        part.close(table)

"""A sequence of a pool: its tokens and their pages."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

import mlx.core as mx

from kvant.cache.checkpoints import Checkpoint, Checkpoints
from kvant.cache.exact_tail import TailCopy
from kvant.cache.layer_format import Arrays, State, difference
from kvant.cache.layer_group import PageTable, PoolLayer
from kvant.cache.pages import runs
from kvant.cache.shared_prefix import SharedPrefix
from kvant.errors import ContextError
from kvant.operators.exact_rows import SLACK, TAIL_WINDOW
from kvant.operators.row_runs import put_rows, stored_rows

if TYPE_CHECKING:
    from kvant.cache.pool import Pool


class PoolSequence:
    """A sequence of tokens in a pool. ``pool.sequence`` makes it."""

    def __init__(
        self, pool: "Pool", tables: list[PageTable], max_tokens: int, ids: Sequence[int], salt: bytes
    ) -> None:
        """Make it with ``ids`` whose rows are already in the tables' pages."""
        self.pool = pool
        self.tables = tables  # its pages, one table for each of the pool's layer groups
        self.max_tokens = max_tokens  # that pages are reserved for
        self.salt = salt  # it shares pages only with sequences of the same salt
        self.step: object | None = None  # its uncommitted step
        self._ids = list(ids)
        self.length = len(self._ids)  # committed tokens; the position of the next one
        self.lookahead = 0  # how many of the last tokens were computed but not returned yet
        self.checkpoints = Checkpoints(pool.checkpoints)  # used by a single pool's sequence
        self._states: dict[int, list[Arrays]] = {}  # by the number of tokens
        self.released = False
        # The last token's hidden state, for the next row of a head: the step's states and its place in them.
        # A slice would be an array that is not evaluated yet, which no other thread could compute. None: not
        # known.
        self.hidden: tuple[mx.array, tuple[int, int]] | None = None
        # Which tokens have exact rows; None: the pool has no exact tails.
        self.tail = None if pool.tails is None else pool.tails.open()
        if self.tail is not None:
            self.tail.lose(self.length)
        pool.num_sequences += 1

    @property
    def ids(self) -> list[int]:
        """Return the ids of the committed tokens."""
        return self._ids[: self.length]

    @property
    def room(self) -> int:
        """Return how many more tokens fit."""
        return self.max_tokens - self.length

    def check_room(self, new_tokens: int) -> None:
        """Raise a ContextError unless this many more tokens fit."""
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
        """Return the arrays of each linear or convolution layer after the committed tokens."""
        return self._states.get(self.length) or [[None] * len(state.shapes) for state in self.pool.states]

    @states.setter
    def states(self, states: list[Arrays]) -> None:
        self._states = {self.length: states}

    def will_have(self, length: int, states: list[Arrays]) -> None:
        """Set the states for ``length`` tokens before they are committed, which may be interrupted."""
        self._states = {self.length: self.states, length: states}

    def commit(self, ids: Sequence[int], hidden: tuple[mx.array, tuple[int, int]] | None = None) -> None:
        """Commit tokens whose rows were written; called by a batch. ``hidden``: the last token's state."""
        # The length changes last: after an interruption, ids past it are ignored.
        self._ids[self.length :] = ids
        self.length += len(ids)
        self.step = None
        self.hidden = hidden if ids else self.hidden
        if self._states:
            self.states = self.states  # drops the states of other lengths

    def trim(self, num_tokens: int) -> int:
        """Forget the last ``num_tokens`` tokens, at most all; return how many.

        Raises:
            ValueError: :meth:`can_trim_to` does not allow it.
        """
        check_num_tokens(num_tokens)
        with self.pool.lock, self.pool.handing_out():
            self.check_open()
            lost = min(num_tokens, self.length)
            length = self.length - lost
            if not self.can_trim_to(length):
                raise ValueError(
                    f"cannot forget {lost} of {self.length} tokens: its windows or states go back no further "
                    f"than to {self.oldest} tokens, or to none"
                )
            self.step = None
            checkpoint = self.checkpoints.at(length) if length < min(self.oldest, self.length) else None
            if checkpoint is not None:
                self._restore(checkpoint)
            else:
                self.length = length
                for group, table in zip(self.pool.groups, self.tables, strict=True):
                    group.go_back(table, length)
                self._go_back_exactly(length)
            self.checkpoints.drop_after(length)
            self.states = self.states
            self.pool.drop_step()
            self.lookahead = 0
            self.hidden = None if lost else self.hidden
            return lost

    def trim_to(self, num_tokens: int) -> None:
        """Forget all tokens after the first ``num_tokens``."""
        check_num_tokens(num_tokens)
        self.trim(max(0, self.length - num_tokens))

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Go back to a checkpoint; the sequence is empty if that is interrupted."""
        length = checkpoint.num_tokens
        self.length = 0
        try:
            for group, table in zip(self.pool.groups, self.tables, strict=True):
                if table.moves:
                    group.begin_at(table, group.first_seen(length), length)
            for layer, rows in checkpoint.rows.items():
                self.put(layer, rows, length)
            self.will_have(length, checkpoint.states or [])
        except BaseException:
            self.checkpoints.drop_after(0)
            for table in self.tables:
                if table.moves:  # Pool.handing_out recovers its pages
                    table.first = 0
                    table.pages = []
            raise
        self.length = length
        if self.tail is not None:
            self.tail.lose(length)
        self.take_tail(checkpoint.tail)

    def _go_back_exactly(self, length: int) -> None:
        """Reduce the exact rows to those of the first ``length`` tokens, or restore them."""
        tails = self.pool.tails
        if tails is None or self.tail is None:
            return
        self.tail.go_back(length)
        checkpoint = self.checkpoints.at(length)
        if checkpoint is not None and checkpoint.tail is not None and not self.tail.is_whole(length):
            tails.restore(self.tail, checkpoint.tail)

    def go_back(self, num_tokens: int) -> int:
        """Go back to ``num_tokens`` tokens or fewer; return the new length.

        If windows or states do not allow that length, it goes back to the last checkpoint before. If the next
        token would lack exact rows, it goes back further, to a checkpoint or by a tail's length, to feed
        those tokens again.
        """
        can = self.can_trim_to(num_tokens)
        length = min(num_tokens, self.length) if can else self.checkpoints.last_before(num_tokens)
        lacks = self.tail is not None and not self.tail.is_whole(length)
        if can and lacks and self.checkpoints.at(length) is None:
            again = max(0, length - TAIL_WINDOW)
            last = self.checkpoints.last_before(length)
            if last > again or not self.can_trim_to(again):
                again = last
            length = again if last or self.can_trim_to(again) else length
        self.trim_to(length)
        return self.length

    def keep_common(self, ids: Sequence[int]) -> int:
        """Go back to the common prefix with ``ids`` without the last one; return the new length.

        One token must be fed to get logits. Windows or states may require going back further.
        """
        stored = self.ids
        length = min(len(stored), len(ids) - 1)
        common = next((i for i in range(length) if stored[i] != ids[i]), length)
        return self.go_back(common)

    def can_trim_to(self, num_tokens: int) -> bool:
        """Return whether it can go back to exactly its first ``num_tokens`` tokens."""
        is_there = num_tokens == 0 or num_tokens >= min(self.oldest, self.length)
        return is_there or self.checkpoints.at(num_tokens) is not None

    @property
    def oldest(self) -> int:
        """Return the shortest length above 0 to go back to without a checkpoint; states cannot go back."""
        return self.length if self.pool.states else self._oldest_rows

    @property
    def _oldest_rows(self) -> int:
        """Return the shortest length above 0 whose rows are all stored."""
        groups = zip(self.pool.groups, self.tables, strict=True)
        return max(group.oldest_length(table) for group, table in groups)

    def fork(self, max_tokens: int | None = None) -> Self:
        """Return a sequence with the same tokens, which shares pages until one of the two writes there.

        ``max_tokens``: how many tokens to reserve pages for; None: as many as this sequence.
        """
        max_tokens = self.max_tokens if max_tokens is None else max_tokens
        with self.pool.lock:
            self.check_open()
            self.pool.check_opening(max_tokens)
            if max_tokens < self.length:
                raise ContextError(f"max_tokens is {max_tokens}; the sequence has {self.length} tokens")
            tables: list[PageTable] = []
            try:
                for group, table in zip(self.pool.groups, self.tables, strict=True):
                    tables.append(group.fork(table, self.length, max_tokens))
            except BaseException:
                close(self.pool, tables)
                raise
            made = type(self)(self.pool, tables, max_tokens, self.ids, self.salt)
            made.states = self.states  # a step replaces a state's arrays
            made.hidden = self.hidden
            if self.pool.tails is not None and self.tail is not None and made.tail is not None:
                self.pool.tails.fork(self.tail, made.tail)
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
        """Let other sequences read its whole pages, and make a checkpoint if all of its text is shared.

        With windows, other sequences need the pages of the last tokens of the prefix, so they can start only
        at lengths for which this was called.

        Args:
            upto: share only pages of this many first tokens; None: of all.
            last_page: also share a partial last page. It is copied for sequences that begin with it, and
                before this sequence writes there again.
            mid_prompt: the prompt is incomplete: make no checkpoint, and write only layers without a window
                to disk.
            asked: number of tokens up to the last checkpoint in its prompt; None: all.
            is_head: prompts of other conversations are likely to begin with its text.
        """
        pool = self.pool
        if pool.states and not pool.checkpoints:
            return
        # A single pool's next text starts from this sequence itself.
        is_own = pool.single and pool.checkpoints > 0 and last_page and upto in (None, self.length)
        if pool.single and pool.disk is None and not is_own:
            return
        with pool.lock:
            self.check_open()
            prefix = SharedPrefix(self, upto, last_page=last_page)
            if is_own:
                prefix.keep_in_sequence()
            if pool.disk is not None:
                prefix.write(pool.disk, mid_prompt=mid_prompt)
            if pool.single:
                return
            prefix.put_in_index()
            if prefix.is_all and not mid_prompt and pool.checkpoints:
                prefix.keep_checkpoint(asked, is_head=is_head)

    def load(self, other: "PoolSequence") -> None:
        """Copy the tokens of a sequence of another pool with the same format into this empty one."""
        target = self.pool
        origin = other.pool
        if origin.layout != target.layout:
            raise ValueError("the cache is for a model with other layers than the pool's")
        target.check_whole()
        origin.check_whole()
        with target.lock, origin.lock:
            self.check_open()
            other.check_open()
            length = other.length
            ids = other.ids
            if self.length:
                raise ValueError(f"the sequence holds {self.length} tokens; expected an empty one")
            if len(origin.layers) != len(target.layers):
                raise ValueError(f"the cache has {len(origin.layers)} layers; expected {len(target.layers)}")
            if None not in (origin.identity, target.identity) and origin.identity != target.identity:
                raise ValueError("the cache holds tokens of another model than the pool's")
            source = dict(zip(target.layers, origin.layers, strict=True))
            for number, (layer, from_layer) in enumerate(source.items()):
                differs = difference(from_layer.format, layer.format, origin.max_seq_len, target.max_seq_len)
                if differs:
                    raise ValueError(f"the cache is of another format: {differs}, in layer {number}")
            lost = {layer: other._table_of(from_layer).first for layer, from_layer in source.items()}
            with self.filling(lost, ids):
                for layer, from_layer in source.items():
                    first = max(lost[layer], self._table_of(layer).first)
                    self.put(layer, other.copied_rows(from_layer, first), length)
                self.will_have(length, other.states)
            self.hidden = other.hidden
            self.take_tail(other.copied_tail())

    def copied_tail(self) -> TailCopy | None:
        """Return a copy of its exact rows, or None if it has none."""
        if self.pool.tails is None or self.tail is None:
            return None
        return self.pool.tails.copied(self.tail, self.length)

    def take_tail(self, copy: TailCopy | None) -> None:
        """Restore exact rows of its tokens, if the pool has exact tails in the same layers."""
        tails = self.pool.tails
        if copy is None or tails is None or self.tail is None or len(copy.rows) != len(tails.layers):
            return
        tails.restore(self.tail, copy)

    @property
    def saved_layers(self) -> list[PoolLayer | Arrays]:
        """Return the layers with rows and the arrays of states for a snapshot, in the model's order."""
        states = iter(self.states)
        return [next(states) if isinstance(layer, State) else layer for layer in self.pool.saved]

    def copied_rows(self, layer: PoolLayer, first: int) -> list[mx.array]:
        """Return a copy of a layer's stored rows (2, K, rows, D') from position ``first`` on."""
        table = self._table_of(layer)
        rows = runs(table.pages, first - table.start, self.length - table.start)
        return [stored_rows(array, rows) for array in layer.arrays]

    def _table_of(self, layer: PoolLayer) -> PageTable:
        return next(
            table for group, table in zip(self.pool.groups, self.tables, strict=True) if layer in group.layers
        )

    @contextmanager
    def filling(self, lost: Mapping[PoolLayer, int], ids: Sequence[int]) -> Iterator[None]:
        """Fill the sequence with tokens whose rows and states the block writes; empty it after an error.

        ``lost``: how many first tokens have no rows in a layer.
        """
        self.check_room(len(ids))
        self.step = None
        try:
            for group, table in zip(self.pool.groups, self.tables, strict=True):
                first = max((lost[layer] for layer in group.layers), default=0)
                group.begin_at(table, first, len(ids))
            yield
        except BaseException:
            for group, table in zip(self.pool.groups, self.tables, strict=True):
                group.go_back(table, 0)
            raise
        if self.tail is not None:
            self.tail.lose(len(ids))
        self.commit(ids)

    def put(self, layer: PoolLayer, tokens: Sequence[mx.array], length: int) -> None:
        """Write a layer's last rows (2, K, rows, D') before position ``length``, as far as it has pages."""
        table = self._table_of(layer)
        count = length - table.first
        rows = runs(table.pages, table.first - table.start, length - table.start)
        for array, each in zip(layer.arrays, tokens, strict=True):
            put_rows(array, each[:, :, each.shape[2] - count :], rows)
        mx.eval(layer.arrays)  # otherwise the next append copies the whole array

    @property
    def written(self) -> int:
        """Return the most tokens it has had, for a file: rows ``SLACK`` before the window are lost."""
        oldest = self._oldest_rows
        return max(self.length, oldest + 1 + SLACK) if oldest else self.length

    def release(self) -> None:
        """Release its pages. It cannot be used afterwards; further calls do nothing.

        A single pool's only sequence stays open.
        """
        if not self.pool.single:
            self.close()

    def close(self) -> None:
        """Release its pages, also in a single pool."""
        with self.pool.lock:
            if not self.released:
                self.released = True
                self.checkpoints.drop_after(0)
                self.pool.num_sequences -= 1
                close(self.pool, self.tables)
                self._states = {}
                if self.pool.tails is not None and self.tail is not None:
                    self.pool.tails.close(self.tail)


def check_num_tokens(num_tokens: int) -> None:
    if type(num_tokens) is not int or num_tokens < 0:
        raise ValueError(f"num_tokens is {num_tokens!r}; expected an int, 0 or more")


def close(pool: "Pool", tables: Sequence[PageTable]) -> None:
    """Release the pages of the tables, which may be those of only the first groups."""
    for group, table in zip(pool.groups, tables, strict=False):
        group.close(table)

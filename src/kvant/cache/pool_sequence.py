"""A sequence of a pool: its tokens, and the pages they are in."""

from collections.abc import Sequence

from kvant.cache.paged_layers import PagedLayers, PageTable, PoolLayer
from kvant.cache.pages import PAGE_SIZE
from kvant.cache.prefix import digests
from kvant.errors import ContextError
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
    """

    def __init__(
        self,
        layers: Sequence[PoolLayer],
        parts: Sequence[PagedLayers],
        *,
        max_sequences: int,
        max_seq_len: int,
        prefill_step_size: int,
    ) -> None:
        self.turn = Turn()
        self.layers = tuple(layers)
        self.parts = tuple(parts)
        self.max_sequences = max_sequences
        self.num_sequences = 0
        self.max_seq_len = max_seq_len
        self.prefill_step_size = prefill_step_size

    def check_opening(self, max_tokens: int) -> None:
        """Refuse a sequence that the pool is not made for, or one too many.

        Raises:
            ValueError: max_tokens is no positive int.
            ContextError: more tokens than a sequence can have, or as many sequences as there can be are open.
        """
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
        """Raise a ContextError unless so many more tokens fit.

        Raises:
            RuntimeError: it was released.
        """
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

        Raises:
            ValueError: no number of tokens, or so many that a window cannot go back; nothing was forgotten.
            RuntimeError: another thread uses the pool, or the sequence was released.
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

    def fork(self, max_tokens: int | None = None) -> "PoolSequence":
        """A sequence of its own with the same tokens. It shares their pages; what one writes the other never sees.

        Args:
            max_tokens: tokens that pages are reserved for; None: as many as this one has.

        Raises:
            ContextError: no room for it, or fewer than the tokens it begins with; nothing was taken.
            RuntimeError: another thread uses the pool, or the sequence was released.
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
            return PoolSequence(self.pool, tables, max_tokens, self.ids, self.salt)

    def share_prefix(self, upto: int | None = None) -> None:
        """Let other sequences read its whole pages.

        Args:
            upto: only pages of its first tokens, up to this one; None: of all.
        """
        with self.pool.turn:
            self.check_open()
            chain = digests(self.ids[:upto], self.salt)
            for part, table in zip(self.pool.parts, self.tables, strict=True):
                first = -(-table.first // PAGE_SIZE)  # the first whole page that is there
                for number in range(first, len(chain)):
                    part.prefix.put(chain[number], table.pages[number - table.start // PAGE_SIZE])
                part.prefix.use(chain)

    def release(self) -> None:
        """Give its pages back. It cannot be used after it; to release it again does nothing."""
        with self.pool.turn:
            if not self._released:
                self._released = True
                self.pool.num_sequences -= 1
                close(self.pool, self.tables)


def close(pool: PoolState, tables: Sequence[PageTable]) -> None:
    """Give back the pages of the first parts' tables, or of all."""
    for part, table in zip(pool.parts, tables, strict=False):
        part.close(table)

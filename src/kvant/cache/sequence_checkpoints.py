"""Lengths that a conversation can go back to, whatever its windows and states forgot since."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from kvant.cache.exact_tail import TailCopy
from kvant.cache.layer_format import Arrays
from kvant.cache.layer_group import PoolLayer

if TYPE_CHECKING:
    from kvant.cache.pool_sequence import PoolSequence


class SequenceCheckpoints:
    """Checkpoints of the sequence of a single pool, by their numbers of tokens.

    One has copies of the states, of the rows that windows saw there, and of the exact tail.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[dict[PoolLayer, list[mx.array]], list[Arrays]]] = {}
        self._tails: dict[int, TailCopy] = {}

    def __contains__(self, length: int) -> bool:
        return length in self._kept

    @property
    def arrays(self) -> list[mx.array]:
        """All copies."""
        every: list[Sequence[mx.array | None]] = []
        for rows, states in self._kept.values():
            every += [*rows.values(), *states]
        every += [tail.rows for tail in self._tails.values()]
        return [array for arrays in every for array in arrays if array is not None]

    def tail(self, length: int) -> TailCopy | None:
        """Return the exact tail of a checkpoint; None: there is none."""
        return self._tails.get(length)

    def last_before(self, length: int) -> int:
        """Return the greatest length of a checkpoint below ``length``; 0 if there is none."""
        return max((each for each in self._kept if each < length), default=0)

    def add(self, sequence: "PoolSequence") -> None:
        """Keep a checkpoint at the length that a sequence has now.

        Of more than the pool has checkpoints the second goes: the first is the end of the system prompt.
        """
        pool = sequence.pool
        length = sequence.length
        if not pool.checkpoints or pool.divided or not length or length in self._kept:
            return
        rows = {}
        for group, table in zip(pool.groups, sequence.tables, strict=True):
            for layer in group.layers if table.moves else ():
                rows[layer] = sequence.copied_rows(layer, max(table.first, group.first_seen(length)))
        states = copy_states(sequence.states)
        mx.eval([*rows.values()], states)
        tail = sequence.copied_tail()
        self._kept[length] = rows, states
        if tail is not None:
            self._tails[length] = tail
        if len(self._kept) > pool.checkpoints:
            second = sorted(self._kept)[min(1, pool.checkpoints - 1)]
            del self._kept[second]
            self._tails.pop(second, None)

    def restore(self, sequence: "PoolSequence", length: int) -> None:
        """Give a sequence the tokens of a checkpoint; none, if that is interrupted."""
        kept, states = self._kept[length]
        sequence.length = 0
        try:
            for group, table in zip(sequence.pool.groups, sequence.tables, strict=True):
                if table.moves:
                    group.begin_at(table, group.first_seen(length), length)
            for layer, rows in kept.items():
                sequence.put(layer, rows, length)
            sequence.will_have(length, states)
        except BaseException:
            self._kept.clear()
            self._tails.clear()
            for table in sequence.tables:
                if table.moves:  # whose pages are found again when the cache begins to hand out the next ones
                    table.first, table.pages = 0, []
            raise
        sequence.length = length
        if sequence.tail is not None:
            sequence.tail.lose(length)
        sequence.take_tail(self._tails.get(length))

    def drop_after(self, length: int) -> None:
        """Drop the checkpoints behind ``length``."""
        self._kept = {each: kept for each, kept in self._kept.items() if each <= length}
        self._tails = {each: tail for each, tail in self._tails.items() if each <= length}


def copy_states(states: Sequence[Arrays]) -> list[Arrays]:
    """Return copies of states (1, ...): an array may be a part of what a whole step computed."""
    first = mx.array([0])
    return [[None if array is None else array[first] for array in arrays] for arrays in states]

"""Lengths that a conversation can go back to, whatever its windows and states forgot since."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from kvant.cache.layer_format import Arrays
from kvant.cache.layer_group import PoolLayer

if TYPE_CHECKING:
    from kvant.cache.pool_sequence import PoolSequence


class SequenceCheckpoints:
    """Checkpoints of the sequence of a single pool, by their numbers of tokens.

    One has copies of the states, and of the rows that windows saw there.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[dict[PoolLayer, list[mx.array]], list[Arrays]]] = {}

    def __contains__(self, length: int) -> bool:
        return length in self._kept

    @property
    def arrays(self) -> list[mx.array]:
        """All copies."""
        every: list[Sequence[mx.array | None]] = []
        for rows, states in self._kept.values():
            every += [*rows.values(), *states]
        return [array for arrays in every for array in arrays if array is not None]

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
        self._kept[length] = rows, states
        if len(self._kept) > pool.checkpoints:
            del self._kept[sorted(self._kept)[min(1, pool.checkpoints - 1)]]

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
            for table in sequence.tables:
                if table.moves:  # whose pages are found again when the cache begins to hand out the next ones
                    table.first, table.pages = 0, []
            raise
        sequence.length = length

    def drop_after(self, length: int) -> None:
        """Drop the checkpoints behind ``length``."""
        self._kept = {each: kept for each, kept in self._kept.items() if each <= length}


def copy_states(states: Sequence[Arrays]) -> list[Arrays]:
    """Return copies of states (1, ...): an array may be a part of what a whole step computed."""
    first = mx.array([0])
    return [[None if array is None else array[first] for array in arrays] for arrays in states]

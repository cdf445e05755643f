"""A pool's step as another process planned it: pages are given, and nothing is counted."""

from collections.abc import Sequence

import mlx.core as mx

from kvant.cache.paged_layers import PageTable
from kvant.cache.pool import Pool
from kvant.cache.pool_batch import PoolBatch, place_rows


class PlannedBatch(PoolBatch):
    """What a model sees of a pool in a step whose sequences another process keeps. It serves one step."""

    def __init__(self, pool: Pool, tables: Sequence[Sequence[PageTable]], lengths: Sequence[int], rows: int) -> None:
        """Take a plan.

        Args:
            pool: as that process has it, with pages of its own.
            tables: of each of the pool's parts, the pages of each sequence.
            lengths: tokens of each sequence.
            rows: of the step, those past the sequences as padding.
        """
        self.pool, self.sequences, self.rows = pool, (), rows
        self.step: mx.array | None = None
        self._placed = {}
        self._tables, self._held = tables, tuple(lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        return (*self._held, *(0,) * (self.rows - len(self._held)))

    def begin(self, inputs: mx.array) -> tuple[int, ...]:
        """Begin the step of token ids (rows, S). Returns the position of each row's first new token."""
        placed = zip(self.pool.parts, self._tables, strict=True)
        self._placed = {part: place_rows(part, tables, self._held, inputs.shape[1]) for part, tables in placed}
        self.step = inputs
        return self.lengths

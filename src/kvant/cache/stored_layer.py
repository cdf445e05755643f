"""What a layer's cache tells of itself to be saved, restored and copied."""

import json
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Self

import mlx.core as mx

from kvant.cache.layer_format import LayerFormat
from kvant.cache.sequences import Sequences
from kvant.cache.snapshot_header import describe
from kvant.operators.bias_split import BiasSplit


class StoredLayer(ABC):
    """The part of :class:`kvant.cache.KVCache` that snapshots and forks ask for."""

    bias_split: BiasSplit | None
    sequences: Sequences
    _number: int | None

    @property
    @abstractmethod
    def max_seq_len(self) -> int | None:
        """The reservation: tokens a sequence can have; None: the cache grows."""

    @property
    @abstractmethod
    def format(self) -> LayerFormat:
        """How it stores tokens."""

    def tables(self) -> dict[str, mx.array]:
        """The biases that tokens are stored without, by their names in a snapshot."""
        split = self.bias_split
        return {} if split is None else {"key_bias": split.key_bias, "value_bias": split.value_bias}

    def stored(self, sequence: int) -> list[mx.array]:
        """The tokens of a sequence that are still there, in order, as they are stored: (sides, K, rows, D') each.

        They are not evaluated, and are to be forgotten before the next append: MLX would copy the whole buffer.
        """
        raise NotImplementedError

    def stored_state(self) -> list[mx.array]:
        """The arrays of a state that have been computed; a layer with tokens has none."""
        return []

    def restore(self, sequence: int, tokens: list[mx.array], first: int, lengths: tuple[int, ...]) -> None:
        """Put in what :meth:`stored` gave, without counting it.

        Args:
            sequence: which one.
            tokens: as :meth:`stored` gives them, in this cache's format.
            first: the position of the first one behind those that a window keeps.
            lengths: tokens of each sequence.

        Raises:
            ValueError: tokens are missing that this cache may have to read.
        """
        raise NotImplementedError

    def restore_state(self, arrays: list[mx.array | None]) -> None:
        """Put in the arrays of a state."""
        raise NotImplementedError

    def settle_committed(self) -> None:
        """Do what waits for a step to be committed, where none is in flight."""
        if self.sequences.step is None:
            self.settle()

    @abstractmethod
    def fork(self) -> Self:
        """The same tokens in arrays of its own. It counts by the same sequences until it is bound to others."""

    @property
    def state(self) -> list[str | mx.array]:
        """For mlx-lm, which evaluates and saves it: what the layer is, as JSON, and the tokens that count.

        What concerns all layers of a cache, one of them tells: the ids of the tokens.
        """
        self.settle_committed()
        sequences = self.sequences
        header = describe([self], {})
        if sequences.speaker not in (None, self._number):
            header = replace(header, has_ids=False)
        ids = [mx.array(own, mx.uint32) for own in sequences.ids if header.has_ids]
        rows = [array for b in range(len(sequences.lengths)) for array in self.stored(b)]
        text = {**header.as_metadata(), "shared": str(sequences.shared)}
        return [json.dumps(text), *ids, *self.tables().values(), *rows]

    def settle(self) -> None:  # noqa: B027
        """Do what waited for a step to be committed."""

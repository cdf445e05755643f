"""A layer's part in saving, loading and forking a cache."""

import json
from abc import ABC, abstractmethod
from copy import copy
from dataclasses import replace
from typing import Self

import mlx.core as mx

from kvant.cache.layer_format import DTYPE_NAMES, LayerFormat
from kvant.cache.sequences import Sequences
from kvant.cache.snapshot_header import describe
from kvant.operators.bias_split import BiasSplit


class SavedLayer(ABC):
    """What every layer of a cache has, whatever it keeps.

    Attributes:
        sequences: the sequences it holds.
        bias_split: the biases that tokens are stored without.
    """

    sequences: Sequences
    bias_split: BiasSplit | None = None
    _number: int | None  # of the layer in a model's cache

    @property
    @abstractmethod
    def max_seq_len(self) -> int | None:
        """The reservation: tokens a sequence can have; None: the cache grows."""

    @property
    @abstractmethod
    def buffers(self) -> list[mx.array]:
        """Its arrays, with what waits to be written into them."""

    def hold(self) -> list[mx.array]:
        """Its arrays before a step, for :meth:`put_back`. MLX copies their buffers at an append while they are held."""
        return [mx.array(array) for array in self.buffers]

    @abstractmethod
    def put_back(self, held: list[mx.array]) -> None:
        """Have the arrays again that were there before a step that was begun, and not computed."""

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

    def settle(self) -> None:  # noqa: B027
        """Do what waited for a step to be committed."""


class SavedRows(SavedLayer):
    """A layer whose tokens are rows of arrays (1, B, sides, K, rows, D').

    Attributes:
        arrays: values, and where they are quantized their scales.
        head_dim, value_head_dim, quant_bit, quant_group: as :class:`kvant.cache.QuantizedKVCache` has them.
    """

    arrays: list[mx.array]
    head_dim: int
    value_head_dim: int
    quant_bit: int
    quant_group: int

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Rows of its arrays that a sequence has."""

    def put_back(self, held: list[mx.array]) -> None:
        """See :class:`kvant.cache.KVCache`."""
        self.arrays[:] = held

    @property
    def format(self) -> LayerFormat:
        """How it stores tokens."""
        return LayerFormat(
            kind="quantized",
            num_kv_heads=self.arrays[0].shape[3],
            head_dim=self.head_dim,
            value_head_dim=self.value_head_dim,
            quant_bit=self.quant_bit,
            quant_group=self.quant_group if self.quant_bit else 0,
            dtype=DTYPE_NAMES[self.arrays[0].dtype],
            scale_dtype=DTYPE_NAMES[self.arrays[1].dtype] if self.quant_bit else "",
            split_pairs=None if self.bias_split is None else self.bias_split.pairs,
        )

    def stored(self, sequence: int) -> list[mx.array]:
        """See :class:`SavedLayer`."""
        return [array[0, sequence, :, :, : self.sequences.lengths[sequence]] for array in self.arrays]

    def restore(self, sequence: int, tokens: list[mx.array], first: int, lengths: tuple[int, ...]) -> None:
        """See :class:`SavedLayer`."""
        if first:
            raise ValueError(f"tokens before {first} are forgotten; a cache without a window needs all of them")
        for array, new in zip(self.arrays, tokens, strict=True):
            array[0, sequence, :, :, : new.shape[2]] = new

    def fork(self) -> Self:
        """See :class:`SavedLayer`."""
        made = copy(self)
        rows = min(self.num_rows, max(self.sequences.written))
        made.arrays = [copied(array, rows) for array in self.arrays]
        return made


def copied(array: mx.array, rows: int | None = None) -> mx.array:
    """An array of its own with the same numbers, of ``rows`` on axis 4 only where they are given.

    MLX's own copies share their buffer until one of them changes.
    """
    made = mx.zeros_like(array)
    if rows is None:
        made[:] = array
    else:
        made[:, :, :, :, :rows] = array[:, :, :, :, :rows]
    mx.eval(made)  # reserved now, not at the first token
    return made

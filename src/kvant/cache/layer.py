"""The interface between a model's layer and its cache."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, Self

import mlx.core as mx

from kvant.cache.layer_format import LayerFormat
from kvant.cache.sequences import Sequences, TrimLimit
from kvant.cache.snapshot_header import describe
from kvant.errors import ContextError
from kvant.operators.bias_split import BiasSplit


class AttentionCache(Protocol):
    """What a model's layer sees of its cache. B batch, S new tokens, H query heads, K kv heads, D head_dim."""

    @property
    def bias_split(self) -> BiasSplit | None:
        """The biases that keys and values are to be given without; None: they are given whole."""

    def attend(
        self,
        query: mx.array,
        key: mx.array,
        value: mx.array,
        mask: mx.array | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Append (B, K, S, D) keys and values, and attend (B, H, S, D) queries to every token so far, causally.

        A cache with a window lets a query see the last tokens only. ``mask`` is added to the scores (boolean: True
        keeps): (S, T), (H, S, T) or (B, H, S, T) with T = offset + S, where H and B may be 1. A sequence shorter than
        the longest reads its own first columns. ``sinks`` (H,) are learned scores that take their share of the softmax
        and add nothing. Returns (B, H, S, D).
        """


class KVCache(ABC):
    """One layer's keys and values.

    A layer alone counts appended tokens at once. A layer of a :class:`kvant.cache.ModelCache` leaves that to the model,
    which commits a step when all layers have it.

    Attributes:
        sequences: the sequences it holds, its own or those of the model's cache.
        window: the last tokens that a query sees, its own included; None: it sees all.
    """

    bias_split: BiasSplit | None = None
    window: int | None = None

    def __init__(self, batch: int | None) -> None:
        self.sequences = Sequences(batch, limits=self.limits)
        self._number: int | None = None  # of the layer in a model's cache

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence; the position of its next one."""
        return self.sequences.lengths

    @property
    def offset(self) -> int:
        """Tokens of the longest sequence."""
        return self.sequences.offset

    @property
    @abstractmethod
    def max_seq_len(self) -> int | None:
        """The reservation: tokens a sequence can have; None: the cache grows."""

    @property
    def limits(self) -> tuple[TrimLimit, ...]:
        """How far it can go back; nothing: to any length."""
        return ()

    @property
    @abstractmethod
    def buffers(self) -> list[mx.array]:
        """Its arrays, with what waits to be written into them."""

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
        rows = [array for b in range(len(self.lengths)) for array in self.stored(b)]
        text = {**header.as_metadata(), "shared": str(sequences.shared)}
        return [json.dumps(text), *ids, *self.tables().values(), *rows]

    @property
    def nbytes(self) -> int:
        """Bytes the cache holds now, with its bias tables."""
        return sum(part.nbytes for part in (*self.buffers, self.bias_split) if part is not None)

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

    @abstractmethod
    def attend(
        self,
        query: mx.array,
        key: mx.array,
        value: mx.array,
        mask: mx.array | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Append and attend; see :meth:`AttentionCache.attend`."""

    @abstractmethod
    def check_shape(self, batch: int, num_kv_heads: int, head_dim: int) -> None:
        """Raise a ValueError unless the cache can hold keys and values (batch, num_kv_heads, S, head_dim)."""

    @abstractmethod
    def reserve(self, num_tokens: int) -> None:
        """Raise a ContextError unless every sequence has room for ``num_tokens`` more tokens."""

    @abstractmethod
    def release(self) -> None:
        """Give the memory back. The cache cannot be used after it."""

    def _check_room(self, num_tokens: int) -> None:
        if self.max_seq_len is not None and self.offset + num_tokens > self.max_seq_len:
            raise ContextError(
                f"{num_tokens} more tokens do not fit: {self.offset} of the {self.max_seq_len} reserved tokens are used"
            )

    def settle(self) -> None:  # noqa: B027
        """Do what waited for a step to be committed."""

    def bind(self, sequences: Sequences, number: int) -> None:
        """Become layer ``number`` of a model's cache with these sequences."""
        self.sequences, self._number = sequences, number
        if sequences.speaker is None and self.format.has_tokens:
            sequences.speaker = number

    def is_trimmable(self) -> bool:
        """True, for mlx-lm."""
        return True

    def trim(self, num_tokens: int | Sequence[int]) -> int:
        """Forget the last tokens of every sequence; see :meth:`Sequences.trim`. Of all layers, in a model's cache."""
        return self.sequences.trim(num_tokens, self._number)

    def reset(self) -> None:
        """Forget every token; of all layers, in a model's cache."""
        self.sequences.reset()

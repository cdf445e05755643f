"""The interface between a model's layer and its cache."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from kvant.cache.saved_layer import SavedLayer
from kvant.cache.sequences import Sequences, TrimLimit
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


class KVCache(SavedLayer):
    """One layer's keys and values.

    A layer alone counts appended tokens at once. A layer of a :class:`kvant.cache.ModelCache` leaves that to the model,
    which commits a step when all layers have it.

    Attributes:
        sequences: the sequences it holds, its own or those of the model's cache.
        window: the last tokens that a query sees, its own included; None: it sees all.
    """

    window: int | None = None

    def __init__(self, batch: int | None) -> None:
        self.sequences = Sequences(batch, limits=self.limits)
        self._number = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence; the position of its next one."""
        return self.sequences.lengths

    @property
    def offset(self) -> int:
        """Tokens of the longest sequence."""
        return self.sequences.offset

    @property
    def limits(self) -> tuple[TrimLimit, ...]:
        """How far it can go back; nothing: to any length."""
        return ()

    @property
    def nbytes(self) -> int:
        """Bytes the cache holds now, with its bias tables."""
        return sum(part.nbytes for part in (*self.buffers, self.bias_split) if part is not None)

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

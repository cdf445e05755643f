"""The interface between a model's layer and its cache."""

from abc import ABC, abstractmethod
from typing import Protocol, Self

import mlx.core as mx

from kvant.cache.layer_format import LayerFormat
from kvant.cache.sequence import CachedSequence, TrimLimit
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
        keeps): (S, T), (H, S, T) or (B, H, S, T) with T = offset + S, where H and B may be 1. ``sinks`` (H,) are
        learned scores that take their share of the softmax and add nothing. Returns (B, H, S, D).
        """


class NotSaved:
    """What mlx-lm's ``save_prompt_cache`` finds in a cache of kvant's, and refuses by these words."""

    def __str__(self) -> str:
        return "kvant's cache is saved by kvant.save_prompt_cache"


class KVCache(ABC):
    """One layer's keys and values, of one sequence.

    A layer alone counts appended tokens at once. A layer of a :class:`kvant.cache.ModelCache` leaves that to the model,
    which commits a step when all layers have it.

    Attributes:
        sequence: that it holds, its own or that of the model's cache.
        window: the last tokens that a query sees, its own included; None: it sees all.
        bias_split: the biases that tokens are stored without.
    """

    window: int | None = None
    bias_split: BiasSplit | None = None

    def __init__(self) -> None:
        self.sequence = CachedSequence(limits=self.limits)
        self._number: int | None = None  # in a model's cache

    @property
    def offset(self) -> int:
        """Tokens so far; the position of the next one."""
        return self.sequence.length

    @property
    def limits(self) -> tuple[TrimLimit, ...]:
        """How far it can go back; nothing: to any length."""
        return ()

    @property
    @abstractmethod
    def max_seq_len(self) -> int | None:
        """The reservation: tokens it can have; None: the cache grows."""

    @property
    @abstractmethod
    def buffers(self) -> list[mx.array]:
        """Its arrays, with what waits to be written into them."""

    @property
    @abstractmethod
    def format(self) -> LayerFormat:
        """How it stores tokens."""

    @property
    def nbytes(self) -> int:
        """Bytes the cache holds now, with its bias tables."""
        return sum(part.nbytes for part in (*self.buffers, self.bias_split) if part is not None)

    @property
    def state(self) -> list[object]:
        """For mlx-lm, which evaluates it."""
        return [NotSaved(), *self.buffers]

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
        """Raise a ContextError unless there is room for ``num_tokens`` more tokens."""

    @abstractmethod
    def release(self) -> None:
        """Give the memory back. The cache cannot be used after it."""

    def _check_room(self, num_tokens: int) -> None:
        if self.max_seq_len is not None and self.offset + num_tokens > self.max_seq_len:
            raise ContextError(
                f"{num_tokens} more tokens do not fit: {self.offset} of the {self.max_seq_len} reserved tokens are used"
            )

    def bind(self, sequence: CachedSequence, number: int) -> None:
        """Become layer ``number`` of a model's cache with this sequence."""
        self.sequence, self._number = sequence, number

    def is_trimmable(self) -> bool:
        """True, for mlx-lm."""
        return True

    def trim(self, num_tokens: int) -> int:
        """Forget the last tokens, of all layers in a model's cache; see :meth:`CachedSequence.trim`."""
        return self.sequence.trim(num_tokens, self._number)

    def reset(self) -> None:
        """Forget every token; of all layers, in a model's cache."""
        self.sequence.reset()

    def settle(self) -> None:  # noqa: B027
        """Do what waited for the step to be committed."""

    def settle_committed(self) -> None:
        """Do what waits for a step to be committed, if none is in flight."""
        if self.sequence.step is None:
            self.settle()

    def fork(self) -> Self:
        """The same tokens in arrays of its own. It counts by the same sequence until it is bound to another."""
        raise NotImplementedError

    def tables(self) -> dict[str, mx.array]:
        """The biases that tokens are stored without, by their names in a snapshot."""
        split = self.bias_split
        return {} if split is None else {"key_bias": split.key_bias, "value_bias": split.value_bias}

    def stored(self) -> list[mx.array]:
        """The tokens that are still there, in order, as they are stored: (sides, K, rows, D') each.

        They are not evaluated, and are to be forgotten before the next append: MLX would copy the whole buffer.
        """
        raise NotImplementedError

    def restore(self, tokens: list[mx.array], first: int, length: int) -> None:
        """Put in what :meth:`stored` gave, without counting it.

        Args:
            tokens: as :meth:`stored` gives them, in this cache's format.
            first: the position of the first one behind those that a window keeps.
            length: tokens of the sequence.
        """
        raise NotImplementedError

    def stored_state(self) -> list[mx.array]:
        """The arrays of a state that have been computed; a layer with tokens has none."""
        return []

    def restore_state(self, arrays: list[mx.array | None]) -> None:
        """Put in the arrays of a state."""
        raise NotImplementedError


def copied(array: mx.array, rows: int | None = None) -> mx.array:
    """An array of its own with the same numbers, of ``rows`` on axis 4 only if they are given.

    MLX's own copies share their buffer until one of them changes.
    """
    made = mx.zeros_like(array)
    if rows is None:
        made[:] = array
    else:
        made[:, :, :, :, :rows] = array[:, :, :, :, :rows]
    mx.eval(made)  # reserved now, not at the first token
    return made

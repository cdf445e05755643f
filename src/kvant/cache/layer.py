"""The interface between a model's layer and its cache."""

from typing import Protocol, runtime_checkable

import mlx.core as mx

from kvant.operators.bias_split import BiasSplit
from kvant.threads import Turn


class AttentionCache(Protocol):
    """What a model's layer sees of its cache. B batch, S new tokens, H query heads, K kv heads, D head_dim."""

    @property
    def bias_split(self) -> BiasSplit | None:
        """The biases that keys and values are to be given without; None: they are given whole."""

    def attend(self, query: mx.array, key: mx.array, value: mx.array, mask: mx.array | None = None) -> mx.array:
        """Append (B, K, S, D) keys and values, and attend (B, H, S, D) queries to every row so far, causally.

        ``mask`` is added to the scores (boolean: True keeps): (S, T), (H, S, T) or (B, H, S, T) with T = offset + S,
        where H and B may be 1; a sequence shorter than the longest reads its own first columns. Returns (B, H, S, D).
        """


@runtime_checkable
class KVCache(AttentionCache, Protocol):
    """One layer's keys and values, and how many they are."""

    @property
    def turn(self) -> Turn:
        """Held while a thread computes through the cache; that of a model's first layer counts for all of them."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence in the cache; the position of its next one."""

    @property
    def offset(self) -> int:
        """Tokens of the longest sequence."""

    @property
    def max_seq_len(self) -> int | None:
        """Tokens the cache can hold; None: it grows."""

    @property
    def nbytes(self) -> int:
        """Bytes the cache holds now."""

    def check_shape(self, batch: int, num_kv_heads: int, head_dim: int) -> None:
        """Raise a ValueError unless the cache can hold keys and values (batch, num_kv_heads, S, head_dim)."""

    def trim(self, num_tokens: int) -> int:
        """Forget the last ``num_tokens`` tokens, or all there are; return how many were forgotten."""

    def reset(self) -> None:
        """Forget every token."""

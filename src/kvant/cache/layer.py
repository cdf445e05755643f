"""The interface between a model's layer and its cache."""

from typing import Protocol

import mlx.core as mx

from kvant.operators.front import Front


class AttentionCache(Protocol):
    """What a model's layer sees of its cache. B batch, S new tokens, H query heads, K kv heads, D head_dim."""

    @property
    def front(self) -> Front:
        """What queries and keys go through before they are given, and the biases that they come without."""

    def attend(
        self,
        query: mx.array,
        key: mx.array,
        value: mx.array,
        mask: mx.array | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Append (B, K, S, D) keys and values, and attend (B, H, S, D) queries to every token so far, causally.

        A cache with a window lets a query see the last tokens only. ``mask``, of one sequence, is added to the scores
        (boolean: True keeps): (S, T), (H, S, T) or (B, H, S, T) with T = offset + S, where H and B may be 1. ``sinks``
        (H,) are learned scores that take their share of the softmax and add nothing. Returns (B, H, S, D).
        """

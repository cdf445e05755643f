"""The interface between a model's layer and its cache."""

from typing import Protocol

import mlx.core as mx

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

        A cache with a window lets a query see the last tokens only. ``mask``, of one sequence, is added to the scores
        (boolean: True keeps): (S, T), (H, S, T) or (B, H, S, T) with T = offset + S, where H and B may be 1. ``sinks``
        (H,) are learned scores that take their share of the softmax and add nothing. Returns (B, H, S, D).
        """

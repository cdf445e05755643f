"""Batches of sequences that have different lengths."""

from collections.abc import Sequence

import mlx.core as mx

from kvant.cache import QuantizedKVCache


def normal(seed: int, *shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def poison(cache: Sequence[QuantizedKVCache]) -> None:
    """NaN in every sequence's rows past its own length."""
    for layer in cache:
        for b, length in enumerate(layer.lengths):
            layer.arrays[-1][0, b, :, :, length:] = float("nan")
        mx.eval(layer.arrays)

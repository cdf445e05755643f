"""Whether a cache is one for a decoder."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from kvant.cache import KVCache, ModelCache, QuantizedKVCache
from kvant.cache.identity import Identity
from kvant.models.config import ModelConfig


def check_cache(
    cache: Sequence[KVCache],
    batch: int | None,
    config: ModelConfig,
    identity: Identity | None,
    make_cache: Callable[..., ModelCache],
) -> ModelCache:
    """The cache, or one made of a list of layers.

    Args:
        cache: from ``make_cache``.
        batch: the sequences it is to be for; None: any number, and the shapes of its layers are not looked at.
        config, identity, make_cache: the decoder's.

    Raises:
        ValueError: a cache of another model, or of another number of sequences.
        SnapshotError: a snapshot of another model, which was loaded without one.
    """
    if len(cache) != config.num_hidden_layers:
        raise ValueError(f"the cache has {len(cache)} layers; expected {config.num_hidden_layers}")
    checked = ModelCache.of(cache)
    if checked.unchecked is not None:
        checked.check_source(identity, _reference(checked, make_cache))
    if batch is not None:
        checked.check_shape(batch, config.num_key_value_heads, config.head_dim)
    for number, (window, layer) in enumerate(zip(config.windows, checked, strict=True)):
        shorter = layer.window is None and (layer.max_seq_len or math.inf) <= (window or 0)
        if layer.window != window and not shorter:
            raise ValueError(f"layer {number} of the cache has a window of {layer.window}; the model's has {window}")
    return checked


def _reference(cache: ModelCache, make_cache: Callable[..., ModelCache]) -> ModelCache:
    """A cache for one token in the format of another, to compare that with."""
    layer = cache[0]
    options: dict[str, Any] = {"kernels": "unfused", "bias_split": layer.bias_split is not None}
    if isinstance(layer, QuantizedKVCache):
        options |= {"quant_bit": layer.quant_bit, "quant_group": layer.quant_group}
    return make_cache(1, **options)

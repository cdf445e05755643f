"""Whether a cache is one for a decoder."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvant.cache import KVCache, ModelCache, QuantizedKVCache

if TYPE_CHECKING:
    from kvant.models.decoder import Decoder


def check_cache(model: "Decoder", cache: Sequence[KVCache], batch: int | None = None) -> ModelCache:
    """The cache, or one made of a list of layers.

    Args:
        model: the decoder.
        cache: from its ``make_cache``.
        batch: the sequences it is to be for; None: any number, and the shapes of its layers are not looked at.

    Raises:
        ValueError: a cache of another model, or of another number of sequences.
        SnapshotError: a snapshot of another model, which was loaded without one.
    """
    if len(cache) != len(model.layers):
        raise ValueError(f"the cache has {len(cache)} layers; expected {len(model.layers)}")
    checked = ModelCache.of(cache)
    if checked.unchecked is not None:
        checked.check_source(model.identity, _reference(model, checked))
    if batch is not None:
        checked.check_shape(batch, model.config.num_key_value_heads, model.config.head_dim)
    for number, (window, layer) in enumerate(zip(model.config.windows, checked, strict=True)):
        shorter = layer.window is None and (layer.max_seq_len or math.inf) <= (window or 0)
        if layer.window != window and not shorter:
            raise ValueError(f"layer {number} of the cache has a window of {layer.window}; the model's has {window}")
    return checked


def _reference(model: "Decoder", cache: ModelCache) -> ModelCache:
    """A cache for one token in the format of another, to compare that with."""
    layer = cache[0]
    options: dict[str, Any] = {"kernels": "unfused", "bias_split": layer.bias_split is not None}
    if isinstance(layer, QuantizedKVCache):
        options |= {"quant_bit": layer.quant_bit, "quant_group": layer.quant_group}
    return model.make_cache(1, **options)

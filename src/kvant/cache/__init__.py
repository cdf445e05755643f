"""Key/value caches of a model and of single layers.

``FullKVCache`` and ``QuantizedKVCache`` are caches of one layer with PMX's contract. The engine does not need
them, so they are imported on first use.
"""

from typing import TYPE_CHECKING, Any

from kvant.cache.identity import Identity
from kvant.cache.model import KVCache, ModelCache
from kvant.cache.options import CacheOptions
from kvant.cache.pool_batch import AttentionCache

if TYPE_CHECKING:
    from kvant.cache.full import FullKVCache
    from kvant.cache.quantized import QuantizedKVCache

__all__ = [
    "AttentionCache",
    "CacheOptions",
    "FullKVCache",
    "Identity",
    "KVCache",
    "ModelCache",
    "QuantizedKVCache",
]


def __getattr__(name: str) -> Any:
    if name == "FullKVCache":
        from kvant.cache.full import FullKVCache

        return FullKVCache
    if name == "QuantizedKVCache":
        from kvant.cache.quantized import QuantizedKVCache

        return QuantizedKVCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

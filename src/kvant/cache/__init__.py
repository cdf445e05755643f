"""Key/value caches: of a model, and of one layer each."""

from kvant.cache.full import FullKVCache
from kvant.cache.identity import Identity
from kvant.cache.model import KVCache, ModelCache
from kvant.cache.options import CacheOptions
from kvant.cache.pool_batch import AttentionCache
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

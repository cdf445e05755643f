"""What a layer attends through: key/value caches of one layer each."""

from kvant.cache.full import FullKVCache
from kvant.cache.layer import AttentionCache, KVCache
from kvant.cache.quantized import CompiledCacheView, QuantizedKVCache

__all__ = ["AttentionCache", "CompiledCacheView", "FullKVCache", "KVCache", "QuantizedKVCache"]

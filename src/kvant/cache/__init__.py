"""What a layer attends through: key/value caches of one layer each."""

from kvant.cache.full import FullKVCache
from kvant.cache.layer import Attends, KVCache
from kvant.cache.quantized import QuantizedKVCache, StaticAppend

__all__ = ["Attends", "FullKVCache", "KVCache", "QuantizedKVCache", "StaticAppend"]

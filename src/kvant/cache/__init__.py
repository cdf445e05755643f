"""What a layer attends through: key/value caches of one layer each."""

from kvant.cache.full import FullKVCache
from kvant.cache.layer import KVCache
from kvant.cache.quantized import QuantizedKVCache

__all__ = ["FullKVCache", "KVCache", "QuantizedKVCache"]

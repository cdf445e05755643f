"""Any mlx-lm model through kvant's cache."""

from kvant.bridge.cache import BridgedCache, CacheBytes, cache_bytes, make_model_cache, make_prompt_cache

__all__ = ["BridgedCache", "CacheBytes", "cache_bytes", "make_model_cache", "make_prompt_cache"]

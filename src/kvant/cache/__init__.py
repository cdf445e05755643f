"""Key/value caches: of a model, and of one layer each."""

from importlib import import_module
from typing import Any

from kvant.cache.compiled import CompiledCacheView
from kvant.cache.full import FullKVCache
from kvant.cache.identity import Identity
from kvant.cache.layer import AttentionCache, KVCache
from kvant.cache.model import ModelCache
from kvant.cache.prompt_cache import can_trim_prompt_cache, save_prompt_cache, trim_prompt_cache
from kvant.cache.quantized import QuantizedKVCache
from kvant.cache.window import WindowKVCache

__all__ = [
    "AttentionCache",
    "CompiledCacheView",
    "FullKVCache",
    "Identity",
    "KVCache",
    "ModelCache",
    "QuantizedKVCache",
    "WindowKVCache",
    "can_trim_prompt_cache",
    "make_prompt_cache",
    "save_prompt_cache",
    "trim_prompt_cache",
]


def __getattr__(name: str) -> Any:
    """mlx-lm has ``make_prompt_cache`` beside the others. It knows models, which are above, and is imported late."""
    if name != "make_prompt_cache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("kvant.engine").make_prompt_cache

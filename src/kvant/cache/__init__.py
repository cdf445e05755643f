"""Key/value caches: of a model, and of one layer each."""

from importlib import import_module
from typing import Any

from kvant.cache.compiled import CompiledCacheView
from kvant.cache.full import FullKVCache
from kvant.cache.identity import Identity
from kvant.cache.layer import AttentionCache, KVCache
from kvant.cache.model import ModelCache
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
    "load_prompt_cache",
    "make_prompt_cache",
    "save_prompt_cache",
    "trim_prompt_cache",
]


def __getattr__(name: str) -> Any:
    """mlx-lm's functions of a prompt cache, where mlx-lm has them. They know models, which are above: imported late."""
    if not name.endswith("_prompt_cache"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("kvant.engine.prompt_cache"), name)

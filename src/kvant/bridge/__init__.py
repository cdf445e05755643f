"""Any mlx-lm model through kvant's cache."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvant.bridge.cache import BridgedCache, CacheBytes, cache_bytes, make_model_cache
    from kvant.bridge.prompt_cache import make_prompt_cache

__all__ = ["BridgedCache", "CacheBytes", "cache_bytes", "make_model_cache", "make_prompt_cache"]


def __getattr__(name: str) -> Any:
    """Imported when it is first asked for, because mlx-lm comes with it: a decoder of kvant's own does without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "prompt_cache" if name == "make_prompt_cache" else "cache"
    return getattr(import_module(f"kvant.bridge.{module}"), name)

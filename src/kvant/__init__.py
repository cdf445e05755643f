"""Run Qwen, Llama, Mistral, SmolLM3 and OLMo 2 on Apple MLX with a preallocated, quantized KV cache.

>>> from kvant import load, generate
>>> model, tokenizer = load("pocket")
>>> print(generate(model, tokenizer, "Once upon a time"))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvant.blas import import_mlx, load_blas

if TYPE_CHECKING:
    from kvant import sample_utils
    from kvant.engine.batch_generate import batch_generate
    from kvant.engine.embed import embed
    from kvant.engine.generate import generate, stream_generate
    from kvant.engine.load import load
    from kvant.engine.prompt_cache import (
        can_trim_prompt_cache,
        load_prompt_cache,
        make_prompt_cache,
        save_prompt_cache,
        trim_prompt_cache,
    )
    from kvant.engine.stream import GenerationResponse


load_blas()  # before anything imports MLX
import_mlx()

__version__ = "0.1.0"

__all__ = [
    "GenerationResponse",
    "__version__",
    "batch_generate",
    "can_trim_prompt_cache",
    "embed",
    "generate",
    "load",
    "load_prompt_cache",
    "make_prompt_cache",
    "sample_utils",
    "save_prompt_cache",
    "stream_generate",
    "trim_prompt_cache",
]


def __getattr__(name: str) -> Any:
    """Import the engine only when it is used, because the command imports it in another way."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "sample_utils":
        return import_module("kvant.sample_utils")
    modules = (
        import_module(f"kvant.engine.{module}")
        for module in ("load", "generate", "prompt_cache", "batch_generate", "embed")
    )
    return next(getattr(module, name) for module in modules if hasattr(module, name))

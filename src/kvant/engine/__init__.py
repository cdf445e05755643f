"""The way from a prompt to text, one file a stage."""

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

__all__ = [
    "GenerationResponse",
    "can_trim_prompt_cache",
    "generate",
    "load",
    "load_prompt_cache",
    "make_prompt_cache",
    "save_prompt_cache",
    "stream_generate",
    "trim_prompt_cache",
]

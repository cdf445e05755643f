"""The way from a prompt to text, one file a stage."""

from kvant.engine.generate import GenerationResponse, generate, stream_generate
from kvant.engine.load import load
from kvant.engine.prompt_cache import make_prompt_cache

__all__ = [
    "GenerationResponse",
    "generate",
    "load",
    "make_prompt_cache",
    "stream_generate",
]

"""The way from a prompt to text, one file a stage."""

from kvant.engine.generate import GenerationResponse, generate, stream_generate
from kvant.engine.load import load

__all__ = ["GenerationResponse", "generate", "load", "stream_generate"]

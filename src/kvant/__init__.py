"""kvant: Qwen2- and Qwen3-style language models on Apple MLX with a preallocated, quantized key/value cache.

from kvant import load, generate
model, tokenizer = load("pocket")
print(generate(model, tokenizer, "Once upon a time"))
"""

from kvant.engine import GenerationResponse, generate, load, stream_generate

__version__ = "0.1.0"

__all__ = ["GenerationResponse", "__version__", "generate", "load", "stream_generate"]

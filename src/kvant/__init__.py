"""kvant: Qwen, Llama and Mistral language models on Apple MLX with a preallocated, quantized key/value cache.

from kvant import load, generate
model, tokenizer = load("pocket")
print(generate(model, tokenizer, "Once upon a time"))
"""

from kvant.blas import import_mlx, load_blas

load_blas()  # before anything imports MLX
import_mlx()

from kvant.engine import GenerationResponse, generate, load, stream_generate  # noqa: E402

__version__ = "0.1.0"

__all__ = ["GenerationResponse", "__version__", "generate", "load", "stream_generate"]

"""Qwen2: q, k and v have a bias. An enabled window applies to layers from max_window_layers on."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvant.errors import ModelError
from kvant.fields import flag, shown, size
from kvant.models.architectures.table import MLP, NORMS_BEFORE, OUTPUT, QKV, Architecture, sliding

WINDOW = 4096
MAX_WINDOW_LAYERS = 28


def windows(raw: Mapping[str, Any], layers: int, types: Sequence[str]) -> tuple[int | None, ...]:
    if not flag(raw, "use_sliding_window") or raw.get("sliding_window", WINDOW) is None:
        return (None,) * layers
    if not types:
        first = raw.get("max_window_layers", MAX_WINDOW_LAYERS)
        if isinstance(first, bool) or not isinstance(first, int):
            raise ModelError(f"config.json: max_window_layers is {shown(first)}; expected an int")
        types = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    if "sliding_attention" not in types:
        return (None,) * layers
    return sliding(size(raw, "sliding_window", default=WINDOW), types)


ARCHITECTURE = Architecture(
    name="Qwen2ForCausalLM",
    model_type="qwen2",
    layer=(*QKV, OUTPUT, *MLP, *NORMS_BEFORE),
    max_position_embeddings=32768,
    context_default=True,
    num_key_value_heads=32,
    biases=("attention_bias",),
    windows=windows,
)

"""Qwen2: q, k and v have a bias. A window, if it is on, is for the layers from max_window_layers on."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvant.errors import ModelError
from kvant.fields import flag, shown, size
from kvant.models.architectures.table import MLP, NORMS_BEFORE, OUTPUT, QKV, Architecture

WINDOW = 4096
MAX_WINDOW_LAYERS = 28


def window(raw: Mapping[str, Any], layers: int, types: Sequence[str]) -> int | None:
    """As :attr:`Architecture.window`."""
    if not flag(raw, "use_sliding_window") or raw.get("sliding_window", WINDOW) is None:
        return None
    if "sliding_attention" not in types:
        first = raw.get("max_window_layers", MAX_WINDOW_LAYERS)
        if isinstance(first, bool) or not isinstance(first, int):
            raise ModelError(f"config.json: max_window_layers is {shown(first)}; expected an int")
        if types or first >= layers:
            return None
    return size(raw, "sliding_window", default=WINDOW)


ARCHITECTURE = Architecture(
    name="Qwen2ForCausalLM",
    model_type="qwen2",
    layer=(*QKV, OUTPUT, *MLP, *NORMS_BEFORE),
    max_position_embeddings=32768,
    num_key_value_heads=32,
    biases=("attention_bias",),
    window=window,
)

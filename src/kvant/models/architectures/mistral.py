"""Mistral: a Llama without biases. Every layer has a window unless sliding_window is null."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvant.fields import size
from kvant.models.architectures.table import MLP, NORMS_BEFORE, OUTPUT, QKV, Architecture

WINDOW = 4096


def windows(raw: Mapping[str, Any], layers: int, types: Sequence[str]) -> tuple[int | None, ...]:
    none = raw.get("sliding_window", WINDOW) is None
    return (None if none else size(raw, "sliding_window", default=WINDOW),) * layers


ARCHITECTURE = Architecture(
    name="MistralForCausalLM",
    model_type="mistral",
    layer=(*QKV, OUTPUT, *MLP, *NORMS_BEFORE),
    max_position_embeddings=131072,
    num_key_value_heads=8,
    windows=windows,
)

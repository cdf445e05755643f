"""config.json as transformers 5 writes it, in the older words that mlx-lm's classes read.

A class that finds no such key takes a default of its own without a word, or says that it is missing. What
cannot be said in its words is refused: the model would be another.
"""

from collections.abc import Mapping
from typing import Any

from kvant.errors import ModelError
from kvant.fields import shown

# These go by a period, every nth layer sees all tokens, and not by layer_types.
PERIODIC = ("cohere2", "gemma3", "gemma3_text", "qwen3_5", "qwen3_5_moe", "qwen3_next")
FULL, SLIDING = "full_attention", "sliding_attention"
# Gemma 4's sizes of the layers that see all tokens: by layer in transformers 5, by name in mlx-lm.
GLOBAL_SIZES = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}


def translated(raw: Mapping[str, Any], module: str) -> dict[str, Any]:
    """A config.json, or its part for text, with the keys that mlx-lm's ``module`` reads and it lacks."""
    result = dict(raw)
    for key, value in (*_rope(raw), *_experts(raw), *_period(raw, module), *_global_sizes(raw, module)):
        if result.get(key) is None:
            result[key] = value
    if isinstance(raw.get("text_config"), dict):
        result["text_config"] = translated(raw["text_config"], module)
    return result


def _rope(raw: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """rope_theta, partial_rotary_factor and rope_scaling of rope_parameters, or of those of each kind of
    layer.
    """
    rope = raw.get("rope_parameters")
    if not isinstance(rope, dict) or not rope:
        return []
    found: list[tuple[str, Any]] = []
    if all(isinstance(own, dict) for own in rope.values()):
        if "rope_theta" in rope.get(SLIDING, {}):
            found.append(("rope_local_base_freq", rope[SLIDING]["rope_theta"]))
        rope = rope.get(FULL) or {}
    found += [(key, rope[key]) for key in ("rope_theta", "partial_rotary_factor") if key in rope]
    kind = rope.get("rope_type", rope.get("type", "default"))
    found.append(("rope_scaling", None if kind == "default" else dict(rope)))
    return found


def _experts(raw: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The number of experts, which goes by two names."""
    names = ("num_experts", "num_local_experts")
    said = next((raw[name] for name in names if raw.get(name) is not None), None)
    return [] if said is None else [(name, said) for name in names]


def _period(raw: Mapping[str, Any], module: str) -> list[tuple[str, Any]]:
    types = raw.get("layer_types")
    if module not in PERIODIC or not isinstance(types, list):
        return []
    period = types.index(FULL) + 1 if FULL in types else len(types) + 1
    if any((kind == FULL) != (layer % period == 0) for layer, kind in enumerate(types, start=1)):
        raise ModelError(
            f"config.json: layer_types is {shown(types)}; mlx-lm's {module} takes every nth layer for full"
        )
    return [("full_attention_interval", period), ("sliding_window_pattern", period)]


def _global_sizes(raw: Mapping[str, Any], module: str) -> list[tuple[str, Any]]:
    layers, types = raw.get("per_layer_config"), raw.get("layer_types")
    if not layers:
        return []
    entries = list(layers.values()) if isinstance(layers, dict) else []
    full = [str(number) for number, kind in enumerate(types or ()) if kind == FULL]
    same = bool(entries) and isinstance(entries[0], dict) and all(entry == entries[0] for entry in entries)
    if (
        not module.startswith("gemma4")
        or not same
        or sorted(layers) != sorted(full)
        or entries[0].keys() - GLOBAL_SIZES
    ):
        raise ModelError(
            f"config.json: per_layer_config is {shown(layers)}; mlx-lm's {module} has no such layers"
        )
    return [(GLOBAL_SIZES[key], value) for key, value in entries[0].items()]

"""Translate a config.json of transformers 5 to the older keys that mlx-lm's classes read.

Without its key, a class silently uses a default or complains. A value that has no older equivalent is
refused, because the model would be computed wrongly.
"""

from collections.abc import Mapping
from typing import Any

from kvant.errors import ModelError
from kvant.fields import shown

# These classes read a period (every nth layer has full attention) instead of layer_types.
PERIODIC = ("cohere2", "gemma3", "gemma3_text", "qwen3_5", "qwen3_5_moe", "qwen3_next")
FULL = "full_attention"
SLIDING = "sliding_attention"
# Gemma 4's sizes of layers with full attention: per layer in transformers 5, separate names in mlx-lm.
GLOBAL_SIZES = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}


def translated(raw: Mapping[str, Any], module: str) -> dict[str, Any]:
    """Return a config.json or text_config plus the keys that it lacks and mlx-lm's ``module`` reads."""
    result = dict(raw)
    for key, value in (*_rope(raw), *_experts(raw), *_period(raw, module), *_global_sizes(raw, module)):
        if result.get(key) is None:
            result[key] = value
    if isinstance(raw.get("text_config"), dict):
        result["text_config"] = translated(raw["text_config"], module)
    return result


def _rope(raw: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the older rope keys from rope_parameters, which may have an object per kind of layer."""
    rope = raw.get("rope_parameters")
    if not isinstance(rope, dict) or not rope:
        return []
    pairs: list[tuple[str, Any]] = []
    if all(isinstance(each, dict) for each in rope.values()):
        if "rope_theta" in rope.get(SLIDING, {}):
            pairs.append(("rope_local_base_freq", rope[SLIDING]["rope_theta"]))
        rope = rope.get(FULL) or {}
    pairs += [(key, rope[key]) for key in ("rope_theta", "partial_rotary_factor") if key in rope]
    kind = rope.get("rope_type", rope.get("type", "default"))
    pairs.append(("rope_scaling", None if kind == "default" else dict(rope)))
    return pairs


def _experts(raw: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the number of experts under both of its names."""
    names = ("num_experts", "num_local_experts")
    number = next((raw[name] for name in names if raw.get(name) is not None), None)
    return [] if number is None else [(name, number) for name in names]


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
    layers = raw.get("per_layer_config")
    types = raw.get("layer_types")
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

"""Checkpoints with heads for multi-token prediction, under the names of the published ones."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from support.bridged import BRIDGED, write_config, write_words
from support.tiny_models import build

WIDTH = {
    **dict.fromkeys(("deepseek_v3", "qwen3_5", "qwen3_next"), 32),
    **dict.fromkeys(("glm4_moe", "mimo", "qwen2", "qwen3_5_moe"), 128),
}
KINDS = sorted(WIDTH)
RECORDED = {"deepseek_v3": "deepseek-v3", "qwen3_5": "qwen3.5", "qwen3_next": "qwen3-next"}
NEXTN = ("eh_proj", "hnorm", "enorm", "shared_head.norm")
MIMO = ("input_proj", "hidden_layernorm", "token_layernorm", "final_layernorm")
QWEN = ("fc", "pre_fc_norm_hidden", "pre_fc_norm_embedding", "norm")
# by model_type: the layer of the model whose shapes the head's layer has, the names of the head's layer and of
# what is beside it
NAMES: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "deepseek_v3": ("model.layers.1.", "model.layers.2.", "model.layers.2.", NEXTN),
    "glm4_moe": ("model.layers.2.", "model.layers.3.", "model.layers.3.", NEXTN),
    "mimo": ("model.layers.1.", "model.mtp_layers.0.", "model.mtp_layers.0.", MIMO),
    "qwen2": ("model.layers.1.", "model.mtp_layers.0.", "model.mtp_layers.0.", MIMO),
    "qwen3_5": ("model.language_model.layers.1.", "mtp.layers.0.", "mtp.", QWEN),
    "qwen3_5_moe": ("model.language_model.layers.1.", "mtp.layers.0.", "mtp.", QWEN),
    "qwen3_next": ("model.layers.1.", "mtp.layers.0.", "mtp.", QWEN),
}


def write_head(kind: str, folder: Path, *, tokenizer: bool = False) -> Path:
    """A tiny model of an architecture with a random head, in float32."""
    folder.mkdir()
    if kind in RECORDED:
        shutil.copyfile(BRIDGED / RECORDED[kind] / "config.json", folder / "config.json")
        tensors = {
            name: array.astype(mx.float32)
            for file in sorted((BRIDGED / RECORDED[kind]).glob("*.safetensors"))
            for name, array in mx.load(str(file)).items()  # type: ignore[union-attr]
        }
    else:
        model, config = build(kind)
        write_config(folder, config)
        tensors = _published(dict(tree_flatten(model.parameters())))
    mx.random.seed(5)
    tensors |= _head(kind, tensors)
    if kind == "qwen3_5_moe":
        tensors = _joined(tensors)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    if tokenizer:
        write_words(folder, 64)
    return folder


def read_head(folder: Path) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """The tensors and the config.json, or its part for text."""
    config = json.loads((folder / "config.json").read_text())
    tensors: Any = mx.load(str(folder / "model.safetensors"))
    for name in [name for name in tensors if name.endswith("gate_up_proj")]:
        path = name.removesuffix("gate_up_proj")
        joined, down = tensors.pop(name), tensors.pop(f"{path}down_proj")
        for number, (gate, up) in enumerate(mx.split(each, 2) for each in joined):
            found = {"gate_proj": gate, "up_proj": up, "down_proj": down[number]}
            tensors |= {f"{path}{number}.{part}.weight": array for part, array in found.items()}
    return tensors, config.get("text_config", config)


def _published(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """mlx-lm's tensors with a matrix for each expert, and Qwen3.5's as transformers has them."""
    found = {}
    for name, array in tensors.items():
        if name.startswith("language_model."):
            name = name.removeprefix("language_model.").replace("model.", "model.language_model.", 1)
            if "conv1d" in name:
                array = array.moveaxis(2, 1)
            elif name.endswith("norm.weight") and "linear_attn" not in name:
                array = array - 1
        if ".switch_mlp." not in name:
            found[name] = array
            continue
        for number in range(len(array)):
            found[name.replace("switch_mlp", f"experts.{number}")] = array[number]
    return found


def _joined(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """With all experts' matrices of a layer in two tensors."""
    found = {name: array for name, array in tensors.items() if ".experts." not in name}
    for name in [name for name in tensors if name.endswith(".experts.0.gate_proj.weight")]:
        path = name.removesuffix("0.gate_proj.weight")
        numbers = range(sum(other.startswith(path) for other in tensors) // 3)
        gate, up, down = (
            mx.stack([tensors[f"{path}{number}.{part}.weight"] for number in numbers])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        found |= {f"{path}gate_up_proj": mx.concatenate([gate, up], axis=1), f"{path}down_proj": down}
    return found


def _head(kind: str, tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    source, layer, beside, (projection, *norms) = NAMES[kind]
    width = WIDTH[kind]
    shapes = {
        layer + name.removeprefix(source): array.shape
        for name, array in tensors.items()
        if name.startswith(source)
    }
    shapes |= {f"{beside}{projection}.weight": (width, 2 * width)}
    shapes |= {f"{beside}{norm}.weight": (width,) for norm in norms}
    made = {}
    for name, shape in shapes.items():
        noise = mx.random.normal(shape)
        if len(shape) > 1:
            made[name] = 2 * noise * shape[-1] ** -0.5
        elif name.endswith("norm.weight") and not kind.startswith("qwen3"):
            made[name] = 1 + 0.2 * noise
        else:  # Qwen's norms multiply by 1 and their weight; biases
            made[name] = 0.2 * noise
    if norms[0] == "hnorm":  # copies of the model's own ends, as the published checkpoints have them
        made[f"{beside}embed_tokens.weight"] = tensors["model.embed_tokens.weight"] + 0
        made[f"{beside}shared_head.head.weight"] = tensors["lm_head.weight"] + 0
    return made

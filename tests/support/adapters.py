"""Random adapters on disk as mlx-lm's trainer writes them, and its model with the adapter beside the
weights.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

RANK, SCALE = 4, 10.0
PROJECTIONS = [f"self_attn.{name}_proj" for name in "qkvo"] + [
    f"mlp.{name}_proj" for name in ("gate", "up", "down")
]


def adapter_config(keys: list[str] | None = None, num_layers: int = -1, kind: str = "lora") -> dict[str, Any]:
    """What decides of an adapter_config.json; the trainer writes its other arguments beside it."""
    parameters: dict[str, Any] = {"rank": RANK, "scale": SCALE, "dropout": 0.1}
    if keys is not None:
        parameters["keys"] = keys
    return {"fine_tune_type": kind, "num_layers": num_layers, "lora_parameters": parameters, "iters": 100}


def save_adapter(folder: Path, config: dict[str, Any], model: nn.Module, size: float = 0.3) -> Path:
    """Give mlx-lm's ``model`` adapter layers in place, random ones of ``size`` beside the weights, and
    save them.
    """
    dora = config["fine_tune_type"] == "dora"
    model.freeze()
    linear_to_lora_layers(
        model, config["num_layers"], config["lora_parameters"] | {"dropout": 0.0}, use_dora=dora
    )
    mx.random.seed(3)
    weights = {}
    for name, array in tree_flatten(model.trainable_parameters()):
        noise = mx.random.normal(array.shape)
        if name.endswith("lora_a"):
            weights[name] = noise / array.shape[0] ** 0.5
        elif name.endswith("lora_b"):
            weights[name] = size * noise / (SCALE * RANK**0.5)
        else:
            weights[name] = array * (1 + 0.2 * noise)
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def adapted_reference(model: nn.Module, folder: Path) -> nn.Module:
    """mlx-lm's ``model`` with the saved adapter loaded as mlx-lm loads it: beside the weights, not fused."""
    load_adapters(model, str(folder))
    model.eval()
    return model

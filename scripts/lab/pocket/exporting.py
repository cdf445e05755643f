"""Exporting: a trained network as a folder in the Hugging Face form."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from network import Network
from safetensors.torch import save_file


def export(network: Network, tokenizer: Path, folder: Path) -> None:
    """Write the configuration, the weights in bfloat16 and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().bfloat16().contiguous() for name, tensor in network.named_parameters()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(network.shape.config(), indent=2) + "\n")
    generation = {
        "eos_token_id": [2, 0],
        "pad_token_id": 0,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.95,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, folder / name)
    for path in folder.iterdir():
        path.chmod(0o644)


def parameters(network: Network) -> int:
    """Count the parameters."""
    return sum(tensor.numel() for tensor in network.parameters() if isinstance(tensor, torch.Tensor))

"""Write tests/data/bridged: tiny random models of architectures that kvant bridges, as transformers saves
them.

Run: python scripts/golden_bridged.py (needs the extra ``train`` for torch)

    NAME/config.json, NAME/model.safetensors   as save_pretrained writes them, weights in bfloat16; gpt-oss'
                                               experts in mxfp4, as they are published
    NAME/logits.npy                            (tokens, vocab) of one pass over the ids, in float32, without a
    cache ids.json                                   the ids, and the versions that computed all this
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

BRIDGED = Path(__file__).parents[1] / "tests" / "data" / "bridged"
TOKENS, VOCAB = 24, 64
IDS = [(5 + 17 * i + i * i) % VOCAB for i in range(TOKENS)]
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
WINDOW = 8
PLAIN = {"rope_type": "default", "rope_theta": 150000.0}  # mlx-lm does not look at gpt-oss' yarn "truncate"
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_conv_kernel_dim": 4,
}
VISION: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 1,
}
# Name -> model_type, and settings of the part for text.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss": (
        "gpt_oss",
        TWO_KINDS | {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": PLAIN},
    ),
    "gemma3": (  # mlx-lm takes every sixth layer for one that sees all
        "gemma3_text",
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "sliding_window": WINDOW,
            "hidden_size": 64,  # its root, by which embeddings are multiplied, is exact in any dtype
            "query_pre_attn_scalar": 32,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4": (
        "gemma4_text",
        TWO_KINDS
        | {
            "tie_word_embeddings": True,
            "hidden_size": 64,
            "global_head_dim": 64,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 32,
            "num_kv_shared_layers": 0,
        },
    ),
    "qwen3-moe": ("qwen3_moe", EXPERTS | {"num_experts": 4}),
    "qwen3-next": (
        "qwen3_next",
        EXPERTS
        | LINEAR
        | {"num_experts": 4, "shared_expert_intermediate_size": 32, "partial_rotary_factor": 0.25},
    ),
    "qwen3.5": ("qwen3_5", LINEAR),
    "deepseek-v3": (
        "deepseek_v3",
        EXPERTS
        | {
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "kv_lora_rank": 32,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
        },
    ),
    "llama4": (
        "llama4",
        {
            "num_hidden_layers": 4,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 32,
            "attention_chunk_size": WINDOW,
        },
    ),
}
# Settings of the part that sees, if the folder has one.
SEEING: dict[str, dict[str, Any]] = {
    "qwen3.5": VISION | {"out_hidden_size": 32, "depth": 1, "num_heads": 1},
    "llama4": VISION
    | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16, "image_size": 28},
}


def randomize(model: torch.nn.Module) -> None:
    """Give a model random weights, always the same ones."""
    torch.manual_seed(1)
    with torch.no_grad():
        for path, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape)
            if tensor.ndim == 1:
                tensor += 0.2 * noise
            else:
                tensor.copy_(noise * (1.0 if "embed" in path else tensor.shape[-1] ** -0.5))
        for path, tensor in model.named_buffers():
            if path.endswith("e_score_correction_bias"):
                tensor += 0.1 * torch.randn(tensor.shape)


def write(name: str) -> None:
    """One model's folder."""
    (kind, settings), vision = MODELS[name], SEEING.get(name)
    text = SIZES | settings
    if vision is None:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **text))
    else:
        config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, tie_word_embeddings=False)
        model = AutoModelForImageTextToText.from_config(config)
    randomize(model)
    folder = BRIDGED / name
    shutil.rmtree(folder, ignore_errors=True)
    model = model.to(torch.bfloat16).eval()
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    # From the file: what is not in it is not in the logits.
    loader = AutoModelForCausalLM if vision is None else AutoModelForImageTextToText
    model = loader.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    if name == "gpt-oss":
        pack_experts(folder, model)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]
    np.save(folder / "logits.npy", logits.numpy().astype(np.float32))


def pack_experts(folder: Path, model: torch.nn.Module) -> None:
    """Give a gpt-oss random experts in mxfp4, as it is published: blocks of 32 with a scale of a power of 2.

    In the file they are packed, (experts, outputs, blocks, 16) and (experts, outputs, blocks). In the model
    they are the numbers that the OCP microscaling specification says, (experts, inputs, outputs).
    """
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = torch.tensor([*magnitudes, *(-x for x in magnitudes)])
    tensors = load_file(folder / "model.safetensors")
    parameters = dict(model.named_parameters())
    for path in [path for path in tensors if path.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(path).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(121, 125, (experts, outputs, inputs // 32), dtype=torch.uint8)
        tensors |= {f"{path}_blocks": blocks, f"{path}_scales": scales}
        numbers = torch.stack([values[blocks.long() % 16], values[blocks.long() // 16]], dim=-1).flatten(-2)
        numbers = numbers * 2.0 ** (scales.float()[..., None] - 127)
        parameters[path].data = numbers.flatten(-2).transpose(1, 2).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """All of them."""
    BRIDGED.mkdir(parents=True, exist_ok=True)
    for name in MODELS:
        write(name)
        print(name, sum(file.stat().st_size for file in (BRIDGED / name).iterdir()))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    (BRIDGED / "ids.json").write_text(json.dumps({"ids": IDS, "versions": versions}) + "\n")


if __name__ == "__main__":
    main()

"""Translate a GGUF file's metadata to config.json, and its tensor names to parameter names.

Names: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py (Keys, TENSOR_NAMES). A
metadata key that would change the computation and is not read here is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvant.errors import ConvertError
from kvant.models.architectures import ARCHITECTURES
from kvant.models.config import ModelConfig
from kvant.tools.gguf.reader import GGUFFile, GGUFTensor

Json = dict[str, Any]

# general.architecture -> model_type. Files of the first one store the rows of q and k in another order.
MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
INTERLEAVED = ("llama",)
# A parameter's path in the architecture table -> its stem in the file; layers' stems follow "blk.N.".
STEMS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.switch_mlp.gate_proj": "ffn_gate_exps",
    "mlp.switch_mlp.up_proj": "ffn_up_exps",
    "mlp.switch_mlp.down_proj": "ffn_down_exps",
}
ROPE_FACTORS = "rope_freqs.weight"  # divisors of the frequency of each pair in a head
LLAMA3_FACTORS = (8.0, 32.0)  # Llama 3.1's and 3.2's; their other settings are the same
ORIGINAL_CONTEXT = "original_max_position_embeddings"
LLAMA3_REST = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL_CONTEXT: 8192}

# Metadata keys, without the architecture's prefix, and their names in config.json.
HIDDEN = "embedding_length"
HEADS = "attention.head_count"
SIZES = {
    HIDDEN: "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    HEADS: "num_attention_heads",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
EXPERT_SIZES = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
KV_HEADS = "attention.head_count_kv"
HEAD_DIM = "attention.key_length"
THETA = "rope.freq_base"
# must equal HEAD_DIM
WIDTHS = ("attention.value_length", "rope.dimension_count")
SCALING = "rope.scaling.type"
FACTOR = "rope.scaling.factor"
ORIGINAL = "rope.scaling.original_context_length"
# Read if present, or without effect on the computation.
OPTIONAL = (
    KV_HEADS,
    HEAD_DIM,
    THETA,
    *WIDTHS,
    SCALING,
    FACTOR,
    ORIGINAL,
    "vocab_size",
    "rope.scaling.finetuned",
)


@dataclass(frozen=True, slots=True)
class Place:
    """The parameter that a tensor of the file becomes."""

    tensor: GGUFTensor
    module: str  # the module's path in the checkpoint, such as model.layers.0.self_attn.q_proj
    suffix: str  # "weight" or "bias"
    interleaved_heads: int  # heads whose rows are interleaved in the file; 0: the rows are in order


def read_config(file: GGUFFile) -> Json:
    """Return the model's config.json, without the quantization.

    Raises:
        ConvertError: the file has an architecture, setting or rope type that kvant does not import.
    """
    metadata = file.metadata
    kind = metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        raise ConvertError(f"general.architecture is {str(kind)[:40]!r}; expected {', '.join(MODEL_TYPES)}")
    if metadata.get("split.count", 1) != 1:
        raise ConvertError(
            f"split.count is {metadata['split.count']}; expected one file (llama-gguf-split --merge)"
        )
    table = ARCHITECTURES[MODEL_TYPES[kind]]
    prefix = f"{kind}."
    settings = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    sizes = SIZES | (EXPERT_SIZES if table.experts else {})
    for key, value in settings.items():
        if key not in sizes and key not in OPTIONAL:
            raise ConvertError(f"{kind}.{key} is {str(value)[:40]}, a setting that kvant does not import")
    for key in sizes:
        if key not in settings:
            raise ConvertError(f"{kind}.{key} is missing")
    heads = settings[HEADS]
    hidden = settings[HIDDEN]
    if not all(type(size) is int and size > 0 for size in (heads, hidden)):
        raise ConvertError(f"{kind}.{HEADS} is {str(heads)[:40]}; expected one number for every layer")
    head_dim = settings.get(HEAD_DIM, hidden // heads)
    for key in WIDTHS:
        if settings.get(key, head_dim) != head_dim:
            raise ConvertError(
                f"{kind}.{key} is {str(settings[key])[:40]}; expected the width of a key, {head_dim}"
            )
    config = {
        "model_type": table.model_type,
        "architectures": [table.name],
        **{name: _shortest(settings[key]) for key, name in sizes.items()},
        "num_key_value_heads": settings.get(KV_HEADS, heads),
        "head_dim": head_dim,
        "rope_theta": _shortest(settings.get(THETA, 10000.0)),
        "vocab_size": _tensor(file, f"{STEMS['model.embed_tokens']}.weight").shape[0],
        "tie_word_embeddings": f"{STEMS['lm_head']}.weight" not in file.tensors,
        "hidden_act": "silu",
    }
    if table.experts:
        config["norm_topk_prob"] = True  # llama.cpp always normalizes
    for row in table.layer:
        if row.bias in table.optional_biases and f"blk.0.{STEMS[row.path]}.bias" in file.tensors:
            config[row.bias] = True
    if scaling := _rope_scaling(file, settings, kind, config):
        config["rope_scaling"] = scaling
    return config


def places(file: GGUFFile, config: ModelConfig) -> list[Place]:
    """Map every tensor of the file to a parameter, and check that every parameter has a tensor.

    Raises:
        ConvertError: a tensor is missing, has another shape or type, or belongs to no parameter.
    """
    mapped: list[Place] = []
    left = {*file.tensors}
    if config.rope.kind == "llama3":
        left.discard(ROPE_FACTORS)
    heads = {}
    if file.metadata["general.architecture"] in INTERLEAVED:
        heads = {
            "self_attn.q_proj": config.num_attention_heads,
            "self_attn.k_proj": config.num_key_value_heads,
        }
    for module, layer, row in config.parameters():
        if row is config.architecture.head and config.tie_word_embeddings:
            continue
        stem = STEMS[row.path] if layer is None else f"blk.{layer}.{STEMS[row.path]}"
        shape = config.shape(row)
        shapes = {"weight": shape}
        if row.bias in config.biases:
            shapes["bias"] = shape[:1]
        for suffix, expected in shapes.items():
            name = f"{stem}.{suffix}"
            tensor = _tensor(file, name)
            if tensor.shape != expected:
                raise ConvertError(f"tensor {name} is {tensor.shape}; expected {expected}")
            if len(expected) == 1 and tensor.kind.quantization is not None:
                raise ConvertError(
                    f"tensor {name} is {tensor.kind.name}; expected floats for a bias or a norm"
                )
            left.discard(name)
            mapped.append(Place(tensor, module, suffix, heads.get(row.path, 0)))
    if left:
        raise ConvertError(f"tensor {min(left)[:80]!r} does not belong to a {config.model_type} model")
    return mapped


def _tensor(file: GGUFFile, name: str) -> GGUFTensor:
    if name not in file.tensors:
        raise ConvertError(f"tensor {name} is missing")
    return file.tensors[name]


def _shortest(value: Any) -> Any:
    """Return the shortest float that rounds to the same float32: 1e-05 rather than 9.99999974738e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _rope_scaling(file: GGUFFile, options: Mapping[str, Any], kind: str, config: Json) -> Json | None:
    scaling = options.get(SCALING, "none")
    if scaling == "none":
        return _llama3_scaling(file, config) if ROPE_FACTORS in file.tensors else None
    settings = {"rope_type": scaling, "factor": _shortest(options.get(FACTOR))}
    if scaling == "linear":
        return settings
    if scaling == "yarn":
        return settings | {ORIGINAL_CONTEXT: options.get(ORIGINAL, config["max_position_embeddings"])}
    raise ConvertError(f"{kind}.{SCALING} is {str(scaling)[:40]!r}; expected none, linear or yarn")


def _llama3_scaling(file: GGUFFile, config: Json) -> Json:
    """Find the settings of Llama 3's rope scaling that give the frequency divisors the file lists."""
    tensor = file.tensors[ROPE_FACTORS]
    plain = ModelConfig.from_dict(config)
    head_dim = plain.head_dim
    if tensor.kind.name != "F32" or tensor.shape != (head_dim // 2,):
        raise ConvertError(
            f"tensor {ROPE_FACTORS} is {tensor.kind.name} {tensor.shape}; expected one float32 per pair"
        )
    listed = file.blocks(tensor).reshape(-1).view(np.float32)
    frequencies = np.array(plain.rope.frequencies(head_dim))
    for factor in LLAMA3_FACTORS:
        settings = {"rope_type": "llama3", "factor": factor, **LLAMA3_REST}
        scaled = ModelConfig.from_dict({**config, "rope_scaling": settings}).rope.frequencies(head_dim)
        if np.allclose(frequencies / np.array(scaled), listed, rtol=1e-4):
            return settings
    raise ConvertError(
        f"tensor {ROPE_FACTORS} matches no known scaling of Llama 3; kvant knows factors 8 and 32"
    )

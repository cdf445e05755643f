"""What a GGUF file's metadata and tensor names mean: a config.json, and the parameter of each tensor.

Names: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py (Keys, TENSOR_NAMES). A key
that would change the computation and that nothing here reads is refused.
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

# general.architecture -> model_type. The files of the first have the rows of q and k in another order.
MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
INTERLEAVED = ("llama",)
# A parameter's path in the table -> its stem in the file; of a layer's parameters behind "blk.N.".
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
ROPE_FACTORS = "rope_freqs.weight"  # of each pair of a head, what its frequency is divided by
LLAMA3_FACTORS = (8.0, 32.0)  # of Llama 3.1 and 3.2; their other numbers are the same
ORIGINAL_CONTEXT = "original_max_position_embeddings"
LLAMA3_REST = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL_CONTEXT: 8192}

# Keys behind the architecture's name, and what they are called in config.json.
HIDDEN, HEADS = "embedding_length", "attention.head_count"
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
KV_HEADS, HEAD_DIM, THETA = "attention.head_count_kv", "attention.key_length", "rope.freq_base"
# equal to HEAD_DIM in the models that are imported
WIDTHS = ("attention.value_length", "rope.dimension_count")
SCALING, FACTOR, ORIGINAL = "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"
# Read if they are there, or without effect on what is computed.
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
    """Where a tensor of the file goes."""

    tensor: GGUFTensor
    module: str  # its path in the checkpoint, such as model.layers.0.self_attn.q_proj
    part: str  # "weight" or "bias"
    interleaved_heads: int  # whose rows lie interleaved in the file; 0: the rows are in order


def read_config(file: GGUFFile) -> Json:
    """Return the model's config.json, without its quantization.

    Raises:
        ConvertError: an architecture, a setting or a kind of rope that is not imported, by name.
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
    own = {
        key.removeprefix(f"{kind}."): value for key, value in metadata.items() if key.startswith(f"{kind}.")
    }
    sizes = SIZES | (EXPERT_SIZES if table.experts else {})
    for key, value in own.items():
        if key not in sizes and key not in OPTIONAL:
            raise ConvertError(f"{kind}.{key} is {str(value)[:40]}, a setting that kvant does not import")
    for key in sizes:
        if key not in own:
            raise ConvertError(f"{kind}.{key} is missing")
    heads, hidden = own[HEADS], own[HIDDEN]
    if not all(type(size) is int and size > 0 for size in (heads, hidden)):
        raise ConvertError(f"{kind}.{HEADS} is {str(heads)[:40]}; expected one number for every layer")
    head_dim = own.get(HEAD_DIM, hidden // heads)
    for key in WIDTHS:
        if own.get(key, head_dim) != head_dim:
            raise ConvertError(
                f"{kind}.{key} is {str(own[key])[:40]}; expected the width of a key, {head_dim}"
            )
    config = {
        "model_type": table.model_type,
        "architectures": [table.name],
        **{name: _shortest(own[key]) for key, name in sizes.items()},
        "num_key_value_heads": own.get(KV_HEADS, heads),
        "head_dim": head_dim,
        "rope_theta": _shortest(own.get(THETA, 10000.0)),
        "vocab_size": _tensor(file, f"{STEMS['model.embed_tokens']}.weight").shape[0],
        "tie_word_embeddings": f"{STEMS['lm_head']}.weight" not in file.tensors,
        "hidden_act": "silu",
    }
    if table.experts:
        config["norm_topk_prob"] = True  # llama.cpp always does
    for row in table.layer:
        if row.bias in table.optional_biases and f"blk.0.{STEMS[row.path]}.bias" in file.tensors:
            config[row.bias] = True
    if scaling := _rope_scaling(file, own, kind, config):
        config["rope_scaling"] = scaling
    return config


def places(file: GGUFFile, config: ModelConfig) -> list[Place]:
    """Find the place of every tensor of the file, and a tensor for every parameter of the architecture.

    Raises:
        ConvertError: a tensor that is missing, has another shape or type, or has no place.
    """
    found: list[Place] = []
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
        parts = {"weight": shape}
        if row.bias in config.biases:
            parts["bias"] = shape[:1]
        for part, expected in parts.items():
            name = f"{stem}.{part}"
            tensor = _tensor(file, name)
            if tensor.shape != expected:
                raise ConvertError(f"tensor {name} is {tensor.shape}; expected {expected}")
            if len(expected) == 1 and tensor.kind.quantization is not None:
                raise ConvertError(
                    f"tensor {name} is {tensor.kind.name}; expected floats for a bias or a norm"
                )
            left.discard(name)
            found.append(Place(tensor, module, part, heads.get(row.path, 0)))
    if left:
        raise ConvertError(f"tensor {min(left)[:80]!r} is none of a {config.model_type} model's")
    return found


def _tensor(file: GGUFFile, name: str) -> GGUFTensor:
    if name not in file.tensors:
        raise ConvertError(f"tensor {name} is missing")
    return file.tensors[name]


def _shortest(value: Any) -> Any:
    """Return the shortest number that is the same float32: 1e-05 rather than 9.99999974738e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _rope_scaling(file: GGUFFile, own: Mapping[str, Any], kind: str, config: Json) -> Json | None:
    scaling = own.get(SCALING, "none")
    if scaling == "none":
        return _llama3_scaling(file, config) if ROPE_FACTORS in file.tensors else None
    settings = {"rope_type": scaling, "factor": _shortest(own.get(FACTOR))}
    if scaling == "linear":
        return settings
    if scaling == "yarn":
        return settings | {ORIGINAL_CONTEXT: own.get(ORIGINAL, config["max_position_embeddings"])}
    raise ConvertError(f"{kind}.{SCALING} is {str(scaling)[:40]!r}; expected none, linear or yarn")


def _llama3_scaling(file: GGUFFile, config: Json) -> Json:
    """Find the settings of Llama 3's kind whose divisors of frequencies are those that the file lists."""
    tensor = file.tensors[ROPE_FACTORS]
    plain = ModelConfig.from_dict(config)
    head_dim = plain.head_dim
    if tensor.kind.name != "F32" or tensor.shape != (head_dim // 2,):
        raise ConvertError(
            f"tensor {ROPE_FACTORS} is {tensor.kind.name} {tensor.shape}; expected a float32 a pair"
        )
    listed = file.blocks(tensor).reshape(-1).view(np.float32)
    frequencies = np.array(plain.rope.frequencies(head_dim))
    for factor in LLAMA3_FACTORS:
        settings = {"rope_type": "llama3", "factor": factor, **LLAMA3_REST}
        scaled = ModelConfig.from_dict({**config, "rope_scaling": settings}).rope.frequencies(head_dim)
        if np.allclose(frequencies / np.array(scaled), listed, rtol=1e-4):
            return settings
    raise ConvertError(
        f"tensor {ROPE_FACTORS} is no scaling of Llama 3's that kvant knows; factors 8 and 32 are"
    )

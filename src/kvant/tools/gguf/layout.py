"""What a GGUF file's metadata and tensor names mean: a config.json, and the parameter of each tensor.

Names: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py (Keys, TENSOR_NAMES). A key that
would change the computation and that nothing here reads is refused.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvant.errors import ConvertError
from kvant.models.architectures import ARCHITECTURES
from kvant.models.config import ModelConfig
from kvant.models.rope import Rope, read_rope
from kvant.tools.gguf.blocks import BlockType
from kvant.tools.gguf.reader import GGUFFile

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
LLAMA3_REST = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

# Keys behind the architecture's name that are read, and those that describe without changing the computation.
SIZES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "context_length": "max_position_embeddings",
}
EXPERT_SIZES = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
EPSILON, THETA, HEAD_DIM = "attention.layer_norm_rms_epsilon", "rope.freq_base", "attention.key_length"
READ = {
    *(*SIZES, EPSILON, THETA, HEAD_DIM, "attention.value_length", "rope.dimension_count", "vocab_size"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
}
DESCRIPTIVE = {"rope.scaling.finetuned"}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of the file goes.

    Attributes:
        source: its name in the file.
        module: the path of its module in the checkpoint, such as ``model.layers.0.self_attn.q_proj``.
        part: ``weight`` or ``bias``.
        interleaved_heads: the heads whose rows lie interleaved in the file; 0: the rows are in order.
    """

    source: str
    module: str
    part: str
    interleaved_heads: int


def read_config(file: GGUFFile) -> dict[str, Any]:
    """Return the model's config.json, without its quantization.

    Raises:
        ConvertError: an architecture, a setting or a kind of rope that is not imported, by name.
    """
    metadata = file.metadata
    kind = metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        raise ConvertError(f"general.architecture is {str(kind)[:40]!r}; expected {', '.join(MODEL_TYPES)}")
    own = {key.removeprefix(f"{kind}."): value for key, value in metadata.items() if key.startswith(f"{kind}.")}
    table = ARCHITECTURES[MODEL_TYPES[kind]]
    expert_keys = EXPERT_SIZES if table.experts else {}
    for key in own:
        if key not in READ and key not in DESCRIPTIVE and key not in expert_keys:
            raise ConvertError(f"{kind}.{key} is {str(own[key])[:40]}, a setting that kvant does not import")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise ConvertError("tokenizer.ggml.tokens is missing; expected the vocabulary")
    config: dict[str, Any] = {"model_type": table.model_type, "architectures": [table.name]}
    for key, name in {**SIZES, **expert_keys}.items():
        if key not in own:
            if key == "attention.head_count_kv":
                continue
            raise ConvertError(f"{kind}.{key} is missing")
        config[name] = own[key]
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if not all(type(size) is int and size > 0 for size in (heads, hidden)):
        raise ConvertError(f"{kind}.attention.head_count is {str(heads)[:40]}; expected one number for every layer")
    head_dim = own.get(HEAD_DIM, hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            raise ConvertError(f"{kind}.{key} is {str(own[key])[:40]}; expected the width of a key, {head_dim}")
    config |= {
        "head_dim": head_dim,
        "rms_norm_eps": _shortest(own.get(EPSILON, table.rms_norm_eps)),
        "rope_theta": _shortest(own.get(THETA, table.rope_theta)),
        "vocab_size": _rows(file, STEMS["model.embed_tokens"]),
        "tie_word_embeddings": f"{STEMS['lm_head']}.weight" not in file.tensors,
        "hidden_act": "silu",
    }
    if len(tokens) > config["vocab_size"]:
        raise ConvertError(f"{len(tokens)} tokens; the embedding has {config['vocab_size']} rows")
    if table.experts:
        config["norm_topk_prob"] = True  # llama.cpp always does
    biased = f"blk.0.{STEMS['self_attn.q_proj']}.bias" in file.tensors
    if biased and "attention_bias" in table.optional_biases:
        config["attention_bias"] = True
    if scaling := _rope_scaling(file, own, kind, config):
        config["rope_scaling"] = scaling
    return config


def places(file: GGUFFile, config: ModelConfig) -> Iterator[Place]:
    """Walk the architecture's parameters; every tensor of the file has one place, and every parameter a
    tensor.

    Raises:
        ConvertError: a tensor that is missing, has another shape, or has no place.
    """
    left = {*file.tensors} - {ROPE_FACTORS}
    permuted = file.metadata["general.architecture"] in INTERLEAVED
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    for module, layer, row in config.parameters():
        if row is config.architecture.head and config.tie_word_embeddings:
            continue
        stem = STEMS[row.path] if layer is None else f"blk.{layer}.{STEMS[row.path]}"
        shape = config.shape(row)
        parts = {"weight": shape}
        if row.bias in config.biases:
            parts["bias"] = shape[:1]
        for part, expected in parts.items():
            source = f"{stem}.{part}"
            if source not in file.tensors:
                raise ConvertError(f"tensor {source} is missing")
            if file.tensors[source].shape != expected:
                raise ConvertError(f"tensor {source} is {file.tensors[source].shape}; expected {expected}")
            left.discard(source)
            yield Place(source, module, part, heads.get(row.path, 0) if permuted else 0)
    if left:
        raise ConvertError(f"tensor {min(left)[:80]!r} is none of a {config.model_type} model's")


def kind_of(file: GGUFFile, place: Place) -> BlockType:
    return file.tensors[place.source].kind


def _rows(file: GGUFFile, stem: str) -> int:
    if f"{stem}.weight" not in file.tensors:
        raise ConvertError(f"tensor {stem}.weight is missing")
    return file.tensors[f"{stem}.weight"].shape[0]


def _shortest(value: Any) -> Any:
    """Return the shortest number that is the same float32: 1e-05 rather than 9.99999974738e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _rope_scaling(
    file: GGUFFile, own: Mapping[str, Any], kind: str, config: Mapping[str, Any]
) -> dict[str, Any] | None:
    scaling = own.get("rope.scaling.type", "none")
    if ROPE_FACTORS in file.tensors:
        if scaling != "none":
            raise ConvertError(f"{ROPE_FACTORS} beside {kind}.rope.scaling.type {str(scaling)[:40]!r}; expected one")
        return _llama3_scaling(file, config)
    if scaling == "none":
        return None
    factor = own.get("rope.scaling.factor")
    original = own.get("rope.scaling.original_context_length")
    if scaling == "linear":
        return {"rope_type": "linear", "factor": _shortest(factor)}
    if scaling == "yarn":
        return {
            "rope_type": "yarn",
            "factor": _shortest(factor),
            "original_max_position_embeddings": original or config["max_position_embeddings"],
        }
    raise ConvertError(f"{kind}.rope.scaling.type is {str(scaling)[:40]!r}; expected none, linear or yarn")


def _llama3_scaling(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """Find the settings of Llama 3's kind whose divisors of frequencies are those that the file lists."""
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.kind.name != "F32" or tensor.shape != (config["head_dim"] // 2,):
        raise ConvertError(f"tensor {ROPE_FACTORS} is {tensor.kind.name} {tensor.shape}; expected a float32 a pair")
    listed = file.blocks(ROPE_FACTORS).reshape(-1).view(np.float32)
    theta, head_dim = config["rope_theta"], config["head_dim"]
    plain = np.array(Rope(theta=theta).frequencies(head_dim))
    for factor in LLAMA3_FACTORS:
        settings = {"rope_type": "llama3", "factor": factor, **LLAMA3_REST}
        rope = read_rope({"rope_theta": theta, "rope_scaling": settings}, head_dim, config["max_position_embeddings"])
        if np.allclose(plain / np.array(rope.frequencies(head_dim)), listed, rtol=1e-4):
            return settings
    raise ConvertError(f"tensor {ROPE_FACTORS} is no scaling of Llama 3's that kvant knows; factors 8 and 32 are")

"""GGUF files of random tiny models, written by the ``gguf`` package: with llama.cpp's names, order of rows
and keys.

The names of tensors and keys, the quantizers and the writer are that package's. The order of rows of q and k
is llama.cpp's, from its convert_hf_to_gguf.py. The package has no quantizers of K types: those here are plain
ones.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, Keys, quants
from mlx.utils import tree_flatten

from support.checkpoints import reference_model
from support.tokenizers_made import made

Array = np.ndarray[Any, Any]
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
}
# Family of tokenizers_made -> tokenizer.ggml.pre; None: SentencePiece.
PRE = {"smollm2": "smollm", "llama3": "llama-bpe", "qwen2": "qwen2", "llama2-legacy": None}
K_BLOCK = 256


@dataclass
class Content:
    """What a GGUF file is to say: keys with their values, and tensors as float32 with the type to store
    them in.
    """

    architecture: str  # as the file writes it
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[Array, str]] = field(default_factory=dict)

    def key(self, name: str) -> str:
        """Return a key of the gguf package, such as ``Keys.LLM.BLOCK_COUNT``, for this architecture."""
        return name.format(arch=self.architecture)

    def write(self, path: Path) -> Path:
        writer = GGUFWriter(path, self.architecture)
        for key, value in self.metadata.items():
            _add_value(writer, key, value)
        for name, (values, kind) in self.tensors.items():
            writer.add_tensor(name, encode(values, kind), raw_dtype=GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def _add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)


def export(
    config: Mapping[str, Any], weights: Mapping[str, Array], kind_of: Callable[[str, Array], str], family: str
) -> Content:
    """Return the file of a model of mlx-lm's names, with the tokenizer of a family.

    kind_of: (name in the file, values) -> the type of a matrix; vectors are float32, as llama.cpp writes
        them.
    """
    kind = ARCHITECTURES[config["model_type"]]
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    content = Content(gguf.MODEL_ARCH_NAMES[kind])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for path, values in weights.items():
        name = names.get_name(path.replace("switch_mlp", "experts"), try_suffixes=(".weight", ".bias"))
        assert name is not None, path
        module = path.split(".")[-2]
        if kind == gguf.MODEL_ARCH.LLAMA and module in heads:
            values = permute(values, heads[module])
        content.tensors[name] = (values, "F32" if values.ndim == 1 else kind_of(name, values))
    content.metadata |= _sizes(content, config)
    content.metadata |= tokenizer_metadata(family)
    return content


def permute(values: Array, heads: int) -> Array:
    """Return rows of q or k as llama.cpp's converter writes them: the two of a rotated pair beside each
    other.
    """
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _sizes(content: Content, config: Mapping[str, Any]) -> dict[str, Any]:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    found = {
        Keys.LLM.BLOCK_COUNT: config["num_hidden_layers"],
        Keys.LLM.CONTEXT_LENGTH: config["max_position_embeddings"],
        Keys.LLM.EMBEDDING_LENGTH: config["hidden_size"],
        Keys.LLM.FEED_FORWARD_LENGTH: config["intermediate_size"],
        Keys.LLM.VOCAB_SIZE: config["vocab_size"],
        Keys.Attention.HEAD_COUNT: config["num_attention_heads"],
        Keys.Attention.HEAD_COUNT_KV: config["num_key_value_heads"],
        Keys.Attention.KEY_LENGTH: head_dim,
        Keys.Attention.VALUE_LENGTH: head_dim,
        Keys.Attention.LAYERNORM_RMS_EPS: config["rms_norm_eps"],
        Keys.Rope.DIMENSION_COUNT: head_dim,
        Keys.Rope.FREQ_BASE: config["rope_theta"],
    }
    if "num_experts" in config:
        found |= {
            Keys.LLM.EXPERT_COUNT: config["num_experts"],
            Keys.LLM.EXPERT_USED_COUNT: config["num_experts_per_tok"],
            Keys.LLM.EXPERT_FEED_FORWARD_LENGTH: config["moe_intermediate_size"],
        }
    return {content.key(key): value for key, value in found.items()}


def tokenizer_metadata(family: str, pre: str | None = None) -> dict[str, Any]:
    """Return the keys of a family's tokenizer as the converter has them, with another ``pre`` if one is
    given.
    """
    tokenizer, settings = made(family)

    raw = json.loads(tokenizer.to_str())
    pre = PRE[family] if pre is None else pre
    vocabulary = {**raw["model"]["vocab"], **{token["content"]: token["id"] for token in raw["added_tokens"]}}
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    assert [vocabulary[token] for token in tokens] == [*range(len(tokens))]
    is_byte = [re.fullmatch(r"<0x[0-9A-F]{2}>", token) is not None for token in tokens]
    types = [int(gguf.TokenType.BYTE if byte else gguf.TokenType.NORMAL) for byte in is_byte]
    for token in raw["added_tokens"]:
        kind = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
        types[token["id"]] = int(gguf.TokenType.UNKNOWN if token["content"] == "<unk>" else kind)
    found: dict[str, Any] = {Keys.Tokenizer.LIST: tokens, Keys.Tokenizer.TOKEN_TYPE: types}
    if pre is not None:
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in raw["model"]["merges"]]
        found |= {Keys.Tokenizer.MODEL: "gpt2", Keys.Tokenizer.PRE: pre, Keys.Tokenizer.MERGES: merges}
    else:
        found |= {Keys.Tokenizer.MODEL: "llama", Keys.Tokenizer.SCORES: _scores(raw["model"], tokens)}
    ids = {
        "bos_token": Keys.Tokenizer.BOS_ID,
        "eos_token": Keys.Tokenizer.EOS_ID,
        "unk_token": Keys.Tokenizer.UNK_ID,
    }
    for name, key in (ids | {"pad_token": Keys.Tokenizer.PAD_ID}).items():
        if settings.get(name) is not None:
            found[key] = vocabulary[settings[name]]
    return found


def _scores(model: Mapping[str, Any], tokens: Sequence[str]) -> list[float]:
    """SentencePiece's: 0 for what is not merged, then falling in the order in which pieces were found."""
    pieces = dict.fromkeys("".join(pair) for pair in model["merges"])
    found = {piece: float(-number) for number, piece in enumerate(pieces, start=1)}
    last = float(-len(found) - 1)
    return [
        0.0 if token.startswith("<") and token.endswith(">") else found.get(token, last) for token in tokens
    ]


def encode(values: Array, kind: str) -> Array:
    """Return the blocks of a tensor; an array of uint8 is blocks already."""
    if values.dtype == np.uint8:
        return values
    if kind in ENCODERS:
        blocks = ENCODERS[kind](np.ascontiguousarray(values, np.float32).reshape(-1, K_BLOCK))
        return blocks.reshape(*values.shape[:-1], -1)
    return quants.quantize(np.ascontiguousarray(values, np.float32), GGMLQuantizationType[kind])


def decode(values: Array, kind: str) -> Array:
    """Return the values a tensor has in the file, by the gguf package."""
    return quants.dequantize(encode(values, kind), GGMLQuantizationType[kind]).reshape(values.shape)


def _half(values: Array) -> Array:
    return values.astype(np.float16)


def _ratio(values: Array, divisor: Array) -> Array:
    """Divide; what is divided by 0 becomes 0."""
    return np.divide(
        values, divisor, out=np.zeros(np.broadcast_shapes(values.shape, divisor.shape)), where=divisor != 0
    )


def _k_numbers(values: Array, most: int) -> tuple[Array, Array]:
    """Quantize to numbers from 0 to ``most`` in groups of 32, with 6-bit scales and offsets for each group.

    Returns the numbers (n, 8, 32) and the 16 bytes that blocks of these types begin with.
    """
    groups = values.reshape(-1, 8, 32)
    low = np.minimum(groups.min(-1), 0)
    width = (groups.max(-1) - low) / most
    d, dmin = _half(width.max(-1, keepdims=True) / 63), _half(-low.min(-1, keepdims=True) / 63)
    scales = np.clip(np.rint(_ratio(width, d)), 0, 63).astype(np.uint8)
    offsets = np.clip(np.rint(_ratio(-low, dmin)), 0, 63).astype(np.uint8)
    lifted = groups + (dmin * offsets.astype(np.float32))[..., None]
    numbers = np.clip(np.rint(_ratio(lifted, (d * scales.astype(np.float32))[..., None])), 0, most).astype(
        np.uint8
    )
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = offsets[:, :4] | (offsets[:, 4:] >> 4) << 6
    rest = (scales[:, 4:] & 15) | (offsets[:, 4:] & 15) << 4
    return numbers, np.concatenate([d.view(np.uint8), dmin.view(np.uint8), first, second, rest], axis=1)


def _nibbles(numbers: Array) -> Array:
    """Pack groups (n, 8, 32) in pairs: the even one in the low halves of 32 bytes, the odd one in the high
    halves.
    """
    return ((numbers[:, 0::2] & 15) | (numbers[:, 1::2] & 15) << 4).reshape(len(numbers), -1)


def encode_q4_k(values: Array) -> Array:
    numbers, head = _k_numbers(values, 15)
    return np.concatenate([head, _nibbles(numbers)], axis=1)


def encode_q5_k(values: Array) -> Array:
    numbers, head = _k_numbers(values, 31)
    # bit g of 32 bytes: group g
    fifth = np.packbits(numbers >> 4, axis=1, bitorder="little").reshape(len(numbers), -1)
    return np.concatenate([head, fifth, _nibbles(numbers)], axis=1)


def encode_q6_k(values: Array) -> Array:
    groups = values.reshape(-1, 16, 16)
    width = np.abs(groups).max(-1) / 31
    d = _half(width.max(-1, keepdims=True) / 127)
    scales = np.clip(np.rint(_ratio(width, d)), 0, 127).astype(np.int8)
    numbers = np.rint(_ratio(groups, (d * scales.astype(np.float32))[..., None]))
    numbers = (np.clip(numbers, -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (numbers[:, :, :2] & 15) | (numbers[:, :, 2:] & 15) << 4
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = np.bitwise_or.reduce(numbers >> 4 << shifts, axis=2)
    parts = (low, high, scales.view(np.uint8), d.view(np.uint8))
    return np.concatenate([part.reshape(len(groups), -1) for part in parts], axis=1)


ENCODERS = {"Q4_K": encode_q4_k, "Q5_K": encode_q5_k, "Q6_K": encode_q6_k}


def as_numpy(weights: Mapping[str, mx.array]) -> dict[str, Array]:
    return {name: np.array(array.astype(mx.float32)) for name, array in weights.items()}


def random_weights(config: dict[str, Any]) -> dict[str, Array]:
    """Return the weights of :func:`reference_model`, with norms and biases that float16 holds."""
    weights = as_numpy(dict(tree_flatten(reference_model(config).parameters())))
    return {
        name: values.astype(np.float16).astype(np.float32) if values.ndim == 1 else values
        for name, values in weights.items()
    }

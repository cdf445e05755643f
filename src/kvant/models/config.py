"""config.json as a frozen, validated dataclass."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvant.errors import ModelError
from kvant.models.files import read_json, refuse_code

ARCHITECTURES = {"Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
# Far above any published model, far below what would exhaust memory before a tensor is read.
MAX_SIZE = 2**24


@dataclass(frozen=True, slots=True)
class Quantization:
    """How MLX quantized a checkpoint's matrices: affine, ``bits`` a value, one scale and bias a group."""

    bits: int
    group_size: int

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4, 5, 6, 8):
            raise ModelError(f"config.json: quantization bits is {self.bits!r}; expected 2, 3, 4, 5, 6 or 8")
        if self.group_size not in (32, 64, 128):
            raise ModelError(f"config.json: quantization group_size is {self.group_size!r}; expected 32, 64 or 128")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Qwen2- or Qwen3-style decoder. Sizes are counts of elements.

    Attributes:
        max_position_embeddings: the context in tokens.
        attention_bias: q, k and v are projected with a bias (Qwen2).
        query_key_norm: RMSNorm of each query and key head before its rotation (Qwen3).
    """

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool | None  # None: not said; tied exactly where there is no lm_head
    attention_bias: bool = True
    query_key_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    quantization: Quantization | None = None
    # Module path -> its own quantization, or None where it was left in floating point.
    quantization_overrides: Mapping[str, Quantization | None] = field(default_factory=dict)

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Read ``config.json``, and the end-of-text tokens of ``generation_config.json``, which win.

        Raises:
            ModelError: a file that is missing or malformed, or a model kvant does not support.
        """
        raw = read_json(folder / "config.json")
        try:
            config = cls.from_dict(raw)
        except ModelError as error:
            raise ModelError(f"{folder / str(error)}") from error
        generation_file = folder / "generation_config.json"
        if not os.path.lexists(generation_file):
            return config
        eos = _token_ids(read_json(generation_file), generation_file.name)
        return replace(config, eos_token_ids=eos) if eos else config

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Validate a config.json already parsed.

        Raises:
            ModelError: a key that is missing or malformed, or a setting kvant does not implement.
        """
        _refuse_unsupported(raw)
        heads = _size(raw, "num_attention_heads")
        hidden = _size(raw, "hidden_size")
        kv_heads = _size(raw, "num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise ModelError(
                f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        qwen3 = raw["model_type"] == "qwen3"
        if raw.get("head_dim") is None and hidden % heads and not qwen3:
            raise ModelError(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        head_dim = _size(raw, "head_dim", default=None if qwen3 else hidden // heads)  # Qwen3's is a size of its own
        if head_dim % 2:
            raise ModelError(f"config.json: head_dim is {head_dim}; rotary positions need an even one")
        default, overrides = _quantization(raw)
        return cls(
            model_type=str(raw["model_type"]),
            hidden_size=hidden,
            num_hidden_layers=_size(raw, "num_hidden_layers", limit=4096),
            intermediate_size=_size(raw, "intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=_size(raw, "vocab_size"),
            max_position_embeddings=_size(raw, "max_position_embeddings", default=32768),
            rms_norm_eps=_positive(raw, "rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(raw),
            tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
            attention_bias=not qwen3,
            query_key_norm=qwen3,
            eos_token_ids=_token_ids(raw, "config.json"),
            quantization=default,
            quantization_overrides=overrides,
        )

    def quantization_of(self, path: str) -> Quantization | None:
        """The quantization of the module at ``path``, such as ``model.layers.0.mlp.up_proj``; None: floating point."""
        return self.quantization_overrides.get(path, self.quantization)


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """Refuse what would change the computation and is not implemented; nothing is ignored silently."""
    refuse_code(raw, "config.json")
    names = _strings(raw, "architectures")
    supported = ", ".join(ARCHITECTURES)
    kind = raw.get("model_type")
    if kind not in ARCHITECTURES.values() or any(name not in ARCHITECTURES for name in names):
        given = ", ".join(map(str, names)) or f"model_type {kind!r}"
        raise ModelError(f"config.json: architecture {given} is not supported; supported: {supported}")
    for name in names:
        if ARCHITECTURES[name] != kind:
            raise ModelError(
                f"config.json: architecture {name} with model_type {kind!r}; expected {ARCHITECTURES[name]!r}"
            )
    if kind == "qwen3" and _flag(raw, "attention_bias"):
        raise ModelError("config.json: attention_bias is true; supported for qwen3: false")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"config.json: hidden_act is {raw['hidden_act']!r}; expected 'silu'")
    if _flag(raw, "use_sliding_window"):
        raise ModelError("config.json: use_sliding_window is true; sliding-window attention is not supported")
    for layer_type in _strings(raw, "layer_types"):
        if layer_type != "full_attention":
            raise ModelError(f"config.json: layer_types has {layer_type!r}; only 'full_attention' is supported")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"config.json: partial_rotary_factor is {raw['partial_rotary_factor']!r}; expected 1.0")
    foreign = raw.get("quantization_config")
    if isinstance(foreign, dict) and not raw.get("quantization") and "quant_method" in foreign:
        raise ModelError(
            f"config.json: quantization method {foreign['quant_method']!r} is not supported; "
            "supported: float weights and MLX's affine quantization"
        )


def _rope_theta(raw: Mapping[str, Any]) -> float:
    """The rotary base, where transformers 5 writes it or where older files do; other kinds of RoPE are refused."""
    theta = raw
    for key in ("rope_scaling", "rope_parameters"):
        rope = raw.get(key) or {}
        if not isinstance(rope, dict):
            raise ModelError(f"config.json: {key} is {rope!r}; expected an object")
        for name in ("rope_type", "type"):
            if rope.get(name, "default") != "default":
                raise ModelError(f"config.json: rope type {rope[name]!r} is not supported; supported: 'default'")
        for name, value in rope.items():
            if name not in ("rope_type", "type", "rope_theta") and (name, value) != ("partial_rotary_factor", 1.0):
                raise ModelError(f"config.json: {key} has {name} {value!r}, which is not supported")
        theta = rope if "rope_theta" in rope else theta
    base = _positive(theta, "rope_theta", 10000.0)
    if base < 1:
        raise ModelError(f"config.json: rope_theta is {base}; expected at least 1")
    return base


def _quantization(raw: Mapping[str, Any]) -> tuple[Quantization | None, dict[str, Quantization | None]]:
    settings = raw.get("quantization") or raw.get("quantization_config")
    if not settings:
        return None, {}
    if not isinstance(settings, dict):
        raise ModelError(f"config.json: quantization is {settings!r}; expected an object")

    def read(entry: Mapping[str, Any]) -> Quantization:
        mode = entry.get("mode", "affine")
        if mode != "affine":
            raise ModelError(f"config.json: quantization mode {mode!r} is not supported; supported: 'affine'")
        return Quantization(bits=_size(entry, "bits"), group_size=_size(entry, "group_size"))

    overrides: dict[str, Quantization | None] = {}
    for path, entry in settings.items():
        if isinstance(entry, dict):
            overrides[path] = read(entry)
        elif entry is False and path not in ("bits", "group_size"):
            overrides[path] = None
        elif path not in ("bits", "group_size", "mode", "quant_method") and entry is not True:
            raise ModelError(f"config.json: quantization has {path} {entry!r}; expected an object or false")
    return read(settings), overrides


def _size(raw: Mapping[str, Any], key: str, *, default: int | None = None, limit: int = MAX_SIZE) -> int:
    value = raw.get(key)
    if value is None:
        if default is None:
            raise ModelError(f"config.json: {key} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
        raise ModelError(f"config.json: {key} is {value!r}; expected an int from 1 to {limit}")
    return value


def _positive(raw: Mapping[str, Any], key: str, default: float) -> float:
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise ModelError(f"config.json: {key} is {str(value)[:40]}; expected a positive number below 1e30")
    return float(value)


def _flag(raw: Mapping[str, Any], key: str) -> bool | None:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"config.json: {key} is {value!r}; expected true or false")
    return value


def _strings(raw: Mapping[str, Any], key: str) -> list[str]:
    value = raw.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ModelError(f"config.json: {key} is {str(value)[:80]}; expected a list of strings")
    return value


def _token_ids(raw: Mapping[str, Any], file: str) -> tuple[int, ...]:
    value = raw.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
        raise ModelError(f"{file}: eos_token_id is {value!r}; expected a token id or a list of them")
    return tuple(ids)

"""config.json as a frozen, validated dataclass."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvant.errors import ModelError
from kvant.files import read_json, refuse_code
from kvant.models.fields import MAX_SIZE, flag, number, shown, size, strings, token_ids
from kvant.models.quantization import Quantization, read_quantization
from kvant.models.rope import Rope, read_rope

ARCHITECTURES = {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
}
# What a config.json leaves out is what transformers 5.23 takes for its architecture; None: made from other sizes.
_DEFAULTS: dict[str, dict[str, int | None]] = {
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": None},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
    "llama": {"max_position_embeddings": 2048, "num_key_value_heads": None, "head_dim": None},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": None},
}
_SLIDING_WINDOW = 4096  # in transformers, of qwen2, qwen3 and mistral
_MAX_WINDOW_LAYERS = 28
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Qwen2, Qwen3, Llama or Mistral decoder: one block, whose differences are fields. Sizes count elements.

    Attributes:
        max_position_embeddings: the context in tokens. Where layers see only the last tokens, it is no longer than
            their window: within it such a model is computed exactly, for every token is still seen.
        attention_bias: q, k and v are projected with a bias (Qwen2, Llama with attention_bias).
        output_bias: so is the output of the attention (Llama with attention_bias).
        mlp_bias: so are gate, up and down (Llama with mlp_bias).
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
    rope: Rope
    tie_word_embeddings: bool | None  # None: not said; tied exactly where there is no lm_head
    attention_bias: bool = True
    output_bias: bool = False
    mlp_bias: bool = False
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
        eos = token_ids(read_json(generation_file), generation_file.name)
        return replace(config, eos_token_ids=eos) if eos else config

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Validate a config.json already parsed.

        Raises:
            ModelError: a key that is missing or malformed, or a setting kvant does not implement.
        """
        _refuse_unsupported(raw)
        kind = str(raw["model_type"])
        heads = size(raw, "num_attention_heads")
        hidden = size(raw, "hidden_size")
        layers = size(raw, "num_hidden_layers", limit=4096)
        kv_heads = size(raw, "num_key_value_heads", default=_default(raw, kind, "num_key_value_heads") or heads)
        if heads % kv_heads:
            raise ModelError(
                f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        head_dim = _head_dim(raw, kind, hidden, heads)
        positions = size(raw, "max_position_embeddings", default=_default(raw, kind, "max_position_embeddings"))
        rope = read_rope(raw, head_dim, positions)
        default, overrides = read_quantization(raw)
        biased = kind == "llama" and bool(raw.get("attention_bias"))
        return cls(
            model_type=kind,
            hidden_size=hidden,
            num_hidden_layers=layers,
            intermediate_size=size(raw, "intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=size(raw, "vocab_size"),
            max_position_embeddings=min(rope.context(positions), _window(raw, kind, layers) or MAX_SIZE),
            rms_norm_eps=number(raw, "rms_norm_eps", default=1e-6),
            rope=rope,
            tie_word_embeddings=flag(raw, "tie_word_embeddings"),
            attention_bias=kind == "qwen2" or biased,
            output_bias=biased,
            mlp_bias=kind == "llama" and bool(raw.get("mlp_bias")),
            query_key_norm=kind == "qwen3",
            eos_token_ids=token_ids(raw, "config.json"),
            quantization=default,
            quantization_overrides=overrides,
        )

    def quantization_of(self, path: str) -> Quantization | None:
        """The quantization of the module at ``path``, such as ``model.layers.0.mlp.up_proj``; None: floating point."""
        return self.quantization_overrides.get(path, self.quantization)


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """Refuse what would change the computation and is not implemented; nothing is ignored silently."""
    refuse_code(raw, "config.json")
    names = strings(raw, "architectures")
    supported = ", ".join(ARCHITECTURES)
    kind = raw.get("model_type")
    if kind not in ARCHITECTURES.values() or any(name not in ARCHITECTURES for name in names):
        given = ", ".join(names)[:80] or f"model_type {shown(kind)}"
        raise ModelError(f"config.json: architecture {given} is not supported; supported: {supported}")
    for name in names:
        if ARCHITECTURES[name] != kind:
            raise ModelError(
                f"config.json: architecture {name} with model_type {kind!r}; expected {ARCHITECTURES[name]!r}"
            )
    # A bias of Qwen3's keys would be normalized with them. transformers' Qwen2 and Mistral don't look at these keys.
    for key, kinds in (("attention_bias", ("llama", "qwen2")), ("mlp_bias", ("llama",))):
        if flag(raw, key) and kind not in kinds:
            raise ModelError(f"config.json: {key} is true; supported for {kind}: false")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"config.json: hidden_act is {shown(raw['hidden_act'])}; expected 'silu'")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"config.json: partial_rotary_factor is {shown(raw['partial_rotary_factor'])}; expected 1.0")
    if flag(raw, "rope_traditional"):
        raise ModelError("config.json: rope_traditional is true; supported: false, pairs of p and p + head_dim / 2")
    for key in _EXPERTS:
        if raw.get(key):
            raise ModelError(f"config.json: {key} is {shown(raw[key])}; mixtures of experts are not supported")


def _default(raw: Mapping[str, Any], kind: str, key: str) -> int | None:
    """The architecture's own, for a key that is not there; null says that there is none."""
    return None if key in raw else _DEFAULTS[kind][key]


def _head_dim(raw: Mapping[str, Any], kind: str, hidden: int, heads: int) -> int:
    default = _default(raw, kind, "head_dim")
    if raw.get("head_dim") is None and default is None and kind != "qwen3":  # Qwen3's is a size of its own
        if hidden % heads:
            raise ModelError(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        default = hidden // heads
    head_dim = size(raw, "head_dim", default=default)
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim is {head_dim}; rotary positions need an even one")
    return head_dim


def _window(raw: Mapping[str, Any], kind: str, layers: int) -> int | None:
    """The last tokens that some layer sees, itself included; None: every layer sees all."""
    types = strings(raw, "layer_types")
    for layer_type in types:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise ModelError(
                f"config.json: layer_types has {layer_type!r}; expected 'full_attention' or 'sliding_attention'"
            )
    if types and len(types) != layers:
        raise ModelError(f"config.json: layer_types has {len(types)} layers; num_hidden_layers is {layers}")
    slides = "sliding_attention" in types
    if kind == "mistral":
        on = "sliding_window" not in raw or raw["sliding_window"] is not None
    elif kind == "llama":
        on = slides  # transformers looks at neither; mlx-lm at both
    else:
        on = bool(flag(raw, "use_sliding_window")) and raw.get("sliding_window", _SLIDING_WINDOW) is not None
    if slides and not on:
        raise ModelError("config.json: layer_types has 'sliding_attention', but there is no sliding window")
    if not on:
        return None
    if kind in ("qwen2", "qwen3") and not slides:
        first = raw.get("max_window_layers", _MAX_WINDOW_LAYERS)
        if isinstance(first, bool) or not isinstance(first, int):
            raise ModelError(f"config.json: max_window_layers is {shown(first)}; expected an int")
        if types or first >= layers:
            return None
    return size(raw, "sliding_window", default=None if kind == "llama" else _SLIDING_WINDOW)

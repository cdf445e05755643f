"""config.json as a frozen, validated dataclass."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvant.errors import ModelError
from kvant.fields import check_lengths, flag, number, shown, size, strings, token_ids
from kvant.files import read_json, read_optional, refuse_code
from kvant.models.architectures import ARCHITECTURES
from kvant.models.architectures.table import HEAD, Architecture, ExpertSettings, Parameter
from kvant.models.quantization import Quantization, read_quantization
from kvant.models.rope import Rope, read_rope

# The keys of experts, and whether an architecture with experts reads them.
_EXPERTS = {
    "num_experts": True,
    "num_local_experts": True,
    "num_experts_per_tok": True,
    "n_routed_experts": False,
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's config.json. Sizes count elements."""

    architecture: Architecture  # the table of parameters, and defaults
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    # the context limit in tokens; None: only a cache's reservation limits it
    max_position_embeddings: int | None
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool | None  # None: not set; tied if no lm_head is stored
    biases: frozenset[str]  # flags that are on, such as "attention_bias"
    rotates: tuple[bool, ...]  # whether each layer rotates queries and keys (RoPE)
    # each layer's window: the number of last tokens a query sees, including its own; None: all
    windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...] = ()
    quantization: Quantization | None = None  # the default of all matrices; None: floating point
    # module path -> its quantization if it differs; None: floating point
    quantization_overrides: Mapping[str, Quantization | None] = field(default_factory=dict)
    experts: ExpertSettings | None = None  # None: the model is dense
    has_head: bool = False  # whether the last layer belongs to a head for drafts

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Read ``config.json``; end-of-text tokens of ``generation_config.json`` override its own."""
        raw = read_json(folder / "config.json")
        try:
            config = cls.from_dict(raw)
        except ModelError as error:
            raise ModelError(f"{folder / str(error)}") from error
        eos = token_ids(read_optional(folder / "generation_config.json"), "generation_config.json")
        return replace(config, eos_token_ids=eos) if eos else config

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Validate a parsed config.json."""
        check_lengths(raw)
        architecture = _architecture(raw)
        _refuse_unsupported(raw, architecture)
        heads = size(raw, "num_attention_heads")
        hidden = size(raw, "hidden_size")
        layers = size(raw, "num_hidden_layers", limit=4096)
        # If the key is null, there are as many kv heads as heads; the architecture's default is only for a
        # missing key.
        default_kv_heads = None if "num_key_value_heads" in raw else architecture.num_key_value_heads
        kv_heads = size(raw, "num_key_value_heads", default=default_kv_heads or heads)
        if heads % kv_heads:
            raise ModelError(
                f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads "
                f"{kv_heads}"
            )
        head_dim = _head_dim(raw, architecture, hidden, heads)
        positions = size(raw, "max_position_embeddings", default=architecture.max_position_embeddings)
        rope = read_rope(raw, head_dim, positions, architecture.rope_theta)
        is_set = raw.get("max_position_embeddings") is not None
        has_limit = is_set or architecture.context_default or rope.kind == "dynamic"
        biases = _biases(raw, architecture)
        rotates = architecture.rotates(raw, layers)
        if "attention_bias" in biases and not all(rotates):
            raise ModelError(
                "config.json: attention_bias is true; supported with layers that do not rotate: false"
            )
        quantization, overrides = read_quantization(raw)
        return cls(
            architecture=architecture,
            hidden_size=hidden,
            num_hidden_layers=layers,
            intermediate_size=size(raw, "intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=size(raw, "vocab_size"),
            max_position_embeddings=rope.context(positions) if has_limit else None,
            rms_norm_eps=number(raw, "rms_norm_eps", default=architecture.rms_norm_eps),
            rope=rope,
            tie_word_embeddings=flag(raw, "tie_word_embeddings"),
            biases=biases,
            rotates=rotates,
            windows=_windows(raw, architecture, layers),
            eos_token_ids=token_ids(raw, "config.json"),
            quantization=quantization,
            quantization_overrides=overrides,
            experts=architecture.expert_settings(raw, layers),
        )

    @property
    def model_type(self) -> str:
        return self.architecture.model_type

    @property
    def attention_bias(self) -> bool:
        """Return whether q, k and v are projected with a bias."""
        return "attention_bias" in self.biases

    def has_experts(self, layer: int) -> bool:
        """Return whether the layer has experts instead of one MLP."""
        return self.experts is not None and self.experts.layers[layer]

    def shape(self, parameter: Parameter) -> tuple[int, ...]:
        """Return the shape of one of the architecture's parameters in this model."""
        sizes = {
            "hidden": self.hidden_size,
            "hidden_twice": 2 * self.hidden_size,
            "inner": self.intermediate_size,
            "queries": self.num_attention_heads * self.head_dim,
            "keys": self.num_key_value_heads * self.head_dim,
            "head": self.head_dim,
            "vocabulary": self.vocab_size,
        }
        if self.experts is not None:
            sizes |= {"experts": self.experts.count, "expert_inner": self.experts.inner_size}
        return tuple(sizes[name] for name in parameter.shape)

    def parameters(self) -> Iterator[tuple[str, int | None, Parameter]]:
        """Yield each parameter's path, layer (None: not in a layer) and table row, in the model's order."""
        table = self.architecture
        yield table.embedding.path, None, table.embedding
        for layer in range(self.num_hidden_layers):
            prefix = table.layers.format(layer)
            yield from ((prefix + row.path, layer, row) for row in table.of_layer(self.has_experts(layer)))
        if self.has_head:
            yield from ((row.path, self.num_hidden_layers - 1, row) for row in HEAD)
        yield table.final_norm.path, None, table.final_norm
        yield table.head.path, None, table.head

    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Return the (outputs, inputs) of each matrix by its module path, stored as ``path.weight``.

        Experts' matrices have (experts, outputs, inputs); :mod:`kvant.models.stacking` handles other storage.
        The output head is included even if it is tied, because a tied checkpoint may still contain it.
        """
        shapes = ((path, self.shape(row)) for path, _, row in self.parameters())
        return {path: shape for path, shape in shapes if len(shape) > 1}

    @property
    def head_paths(self) -> frozenset[str]:
        """Return the module paths of the head for drafts; empty if there is none."""
        last = self.num_hidden_layers - 1
        if not self.has_head:
            return frozenset()
        return frozenset(path for path, layer, _ in self.parameters() if layer == last)

    def quantization_of(self, path: str) -> Quantization | None:
        """Return the quantization of a module, such as ``model.layers.0.mlp.up_proj``; None: floats."""
        return self.quantization_overrides.get(path, self.quantization)


def _architecture(raw: Mapping[str, Any]) -> Architecture:
    refuse_code(raw, "config.json")
    names = strings(raw, "architectures")
    types = {architecture.name: kind for kind, architecture in ARCHITECTURES.items()}
    supported = ", ".join(types)
    # Transformers saves embedding models without the output head under these names.
    types |= {name.replace("ForCausalLM", "Model"): kind for name, kind in types.items()}
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES or any(name not in types for name in names):
        shown_name = ", ".join(names)[:80] or f"model_type {shown(kind)}"
        raise ModelError(f"config.json: architecture {shown_name} is not supported; supported: {supported}")
    for name in names:
        if types[name] != kind:
            raise ModelError(
                f"config.json: architecture {name} with model_type {kind!r}; expected {types[name]!r}"
            )
    return ARCHITECTURES[kind]


def _refuse_unsupported(raw: Mapping[str, Any], architecture: Architecture) -> None:
    """Raise an error for settings that would change the computation and are not implemented."""
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"config.json: hidden_act is {shown(raw['hidden_act'])}; expected 'silu'")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(
            f"config.json: partial_rotary_factor is {shown(raw['partial_rotary_factor'])}; expected 1.0"
        )
    if flag(raw, "rope_traditional"):
        raise ModelError(
            "config.json: rope_traditional is true; supported: false, pairs of p and p + head_dim / 2"
        )
    for key, known in _EXPERTS.items():
        if raw.get(key) and not (known and architecture.experts):
            raise ModelError(
                f"config.json: {key} is {shown(raw[key])}; {architecture.model_type} has no such experts"
            )


def _biases(raw: Mapping[str, Any], architecture: Architecture) -> frozenset[str]:
    """Return the bias flags that are on. config.json cannot turn off those of the architecture."""
    enabled = {key for key in ("attention_bias", "mlp_bias") if flag(raw, key)}
    for key in sorted(enabled - {*architecture.biases, *architecture.optional_biases}):
        raise ModelError(f"config.json: {key} is true; supported for {architecture.model_type}: false")
    return frozenset(enabled.union(architecture.biases))


def _head_dim(raw: Mapping[str, Any], architecture: Architecture, hidden: int, heads: int) -> int:
    default = None if "head_dim" in raw else architecture.head_dim
    if raw.get("head_dim") is None and architecture.head_dim is None:
        if hidden % heads:
            raise ModelError(
                f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}"
            )
        default = hidden // heads
    head_dim = size(raw, "head_dim", default=default)
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim is {head_dim}; rotary positions need an even one")
    return head_dim


def _windows(raw: Mapping[str, Any], architecture: Architecture, layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer."""
    types = strings(raw, "layer_types")
    for layer_type in types:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise ModelError(
                f"config.json: layer_types has {layer_type!r}; expected 'full_attention' or "
                f"'sliding_attention'"
            )
    if types and len(types) != layers:
        raise ModelError(f"config.json: layer_types has {len(types)} layers; num_hidden_layers is {layers}")
    windows = architecture.windows(raw, layers, types)
    if not any(windows) and "sliding_attention" in types:
        raise ModelError("config.json: layer_types has 'sliding_attention', but there is no sliding window")
    return windows

"""The table of an architecture: its checkpoints' parameters, and its config.json's defaults and flags.

Loading, checks, plan, adapters, random weights and convert read the table. Nothing else knows a parameter's
name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvant.fields import size


@dataclass(frozen=True, slots=True)
class Parameter:
    """A projection, with its bias if the model has one, or the weight of a norm.

    Projections of one role share their input. They are concatenated to one matrix in the order of the table.
    A bias is divided like the outputs. If ranks divide the inputs, one of them adds it.
    """

    path: str  # the module in the checkpoint, or in each layer
    role: str  # the use in the decoder
    # (outputs, inputs) of a projection, (experts, outputs, inputs) of experts, (size,) of a norm, with the
    # names in :meth:`ModelConfig.shape`
    shape: tuple[str, ...]
    # the weight's axis that ranks divide, in whole heads; None: each rank has all of it
    shard: int | None = None
    # the flag that enables a bias (outputs,), the same for all of a role; None: never
    bias: str | None = None
    # the path of one expert's matrix, with its number for "{}", in checkpoints that do not stack them
    each: str | None = None
    # the tensor of all experts' matrices of the role, in checkpoints that join outputs
    joined: str | None = None
    converted: tuple[int, int] | None = None  # (bits, group size) that mlx-lm's converter always uses


QKV = (
    Parameter("self_attn.q_proj", "qkv", ("queries", "hidden"), shard=0, bias="attention_bias"),
    Parameter("self_attn.k_proj", "qkv", ("keys", "hidden"), shard=0, bias="attention_bias"),
    Parameter("self_attn.v_proj", "qkv", ("keys", "hidden"), shard=0, bias="attention_bias"),
)
OUTPUT = Parameter("self_attn.o_proj", "output", ("hidden", "queries"), shard=1)
OUTPUT_WITH_BIAS = Parameter(
    "self_attn.o_proj", "output", ("hidden", "queries"), shard=1, bias="attention_bias"
)
MLP = (
    Parameter("mlp.gate_proj", "gate_up", ("inner", "hidden"), shard=0, bias="mlp_bias"),
    Parameter("mlp.up_proj", "gate_up", ("inner", "hidden"), shard=0, bias="mlp_bias"),
    Parameter("mlp.down_proj", "down", ("hidden", "inner"), shard=1, bias="mlp_bias"),
)
NORMS_BEFORE = (
    Parameter("input_layernorm", "before_attention", ("hidden",)),
    Parameter("post_attention_layernorm", "before_mlp", ("hidden",)),
)

# Beside the layer of a head for drafts, as MiMo's checkpoints have it.
HEAD_PREFIX = "model.mtp_layers.0."
HEAD = (
    Parameter(f"{HEAD_PREFIX}input_proj", "head_input", ("hidden", "hidden_twice")),
    Parameter(f"{HEAD_PREFIX}hidden_layernorm", "head_hidden_norm", ("hidden",)),
    Parameter(f"{HEAD_PREFIX}token_layernorm", "head_token_norm", ("hidden",)),
    Parameter(f"{HEAD_PREFIX}final_layernorm", "head_final_norm", ("hidden",)),
)


def sliding(window: int, types: Sequence[str]) -> tuple[int | None, ...]:
    """Return the window of each layer from config.json's ``layer_types``."""
    return tuple(window if kind == "sliding_attention" else None for kind in types)


@dataclass(frozen=True, slots=True)
class ExpertSettings:
    """The experts of a model: MLPs, a few of which each token uses."""

    count: int  # in a layer
    per_token: int
    inner_size: int  # of one expert's MLP
    # the shares of a token's experts add up to 1; else they come from a softmax over all experts
    normalized: bool
    layers: tuple[bool, ...]  # whether each layer has experts; the others have one MLP

    def as_config(self) -> dict[str, Any]:
        """Return the keys of config.json, all of which mlx-lm requires."""
        return {
            "num_experts": self.count,
            "num_experts_per_tok": self.per_token,
            "moe_intermediate_size": self.inner_size,
            "norm_topk_prob": self.normalized,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [layer for layer, sparse in enumerate(self.layers) if not sparse],
        }


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder, dense or with experts. Defaults are transformers' for keys missing in config.json."""

    name: str  # in config.json's ``architectures``
    model_type: str  # in config.json; also the name of mlx-lm's module unless mlx-lm remaps it
    layer: tuple[Parameter, ...]  # the parameters of one layer
    max_position_embeddings: int  # the default for positions that depend on it
    context_default: bool = False  # the default also limits the context, as mlx-lm's class has it too
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    num_key_value_heads: int | None = None  # None: num_attention_heads
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    biases: tuple[str, ...] = ()  # flags of parameters that are always on
    # Flags that config.json may set; others are refused. An architecture that normalizes keys after adding
    # their bias does not list ``attention_bias``, because that bias could not be split off.
    optional_biases: tuple[str, ...] = ()
    # From config.json, the number of layers and the checked ``layer_types``: for each layer the number of
    # last tokens that a query sees, including itself; None: all.
    windows: Callable[[Mapping[str, Any], int, Sequence[str]], tuple[int | None, ...]] = (
        lambda raw, layers, types: (
            sliding(size(raw, "sliding_window"), types) if "sliding_attention" in types else (None,) * layers
        )
    )
    # from config.json and the number of layers: whether each layer rotates its queries and keys
    rotates: Callable[[Mapping[str, Any], int], tuple[bool, ...]] = lambda raw, layers: (True,) * layers
    # of a layer with experts, instead of :data:`MLP`; empty: the model is dense
    experts: tuple[Parameter, ...] = ()
    expert_settings: Callable[[Mapping[str, Any], int], ExpertSettings | None] = lambda raw, layers: None
    embedding: Parameter = Parameter("model.embed_tokens", "embedding", ("vocabulary", "hidden"))
    # prefix of the path of each parameter of a layer, with its number for "{}"
    layers: str = "model.layers.{}."
    final_norm: Parameter = Parameter("model.norm", "final_norm", ("hidden",))
    head: Parameter = Parameter("lm_head", "head", ("vocabulary", "hidden"), shard=0)

    def of_role(self, role: str) -> list[Parameter]:
        """Return a layer's parameters with this role, if any."""
        return [parameter for parameter in (*self.layer, *self.experts) if parameter.role == role]

    def of_layer(self, has_experts: bool) -> tuple[Parameter, ...]:
        """Return the parameters of a layer with experts, or of one with an MLP."""
        if not has_experts:
            return self.layer
        in_mlp = {parameter.role for parameter in MLP}
        return (*(parameter for parameter in self.layer if parameter.role not in in_mlp), *self.experts)

"""One table an architecture: the parameters of its checkpoints, and the defaults and flags of its
config.json.

Loading, refusing, plan, adapters, random weights and convert read the table. Nothing else knows a parameter's
name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvant.fields import size


@dataclass(frozen=True, slots=True)
class Parameter:
    """A projection, with its bias if the model has one, or the weight of a norm.

    Projections of one role share their input. They are held as one matrix, their outputs side by side in the
    order of the table. A bias goes with the outputs. Where ranks divide the inputs, one of them adds it.
    """

    path: str  # its module in the checkpoint, or in each layer
    role: str  # its place in the decoder
    # (outputs, inputs) of a projection, (experts, outputs, inputs) of one for each expert, (size,) of a norm,
    # by the names in :meth:`ModelConfig.shape`
    shape: tuple[str, ...]
    # the axis of the weight that ranks divide, whole heads to each; None: each holds all
    shard: int | None = None
    # the flag under which it has a bias (outputs,), the same for all of a role; None: never
    bias: str | None = None
    # the path of one expert's matrix, "{}" its number, in checkpoints that do not stack them
    each: str | None = None
    # the tensor of all experts' matrices of the role, in checkpoints that join outputs
    joined: str | None = None
    converted: tuple[int, int] | None = None  # (bits, group size) that mlx-lm's converter always takes for it


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


def sliding(window: int, types: Sequence[str]) -> tuple[int | None, ...]:
    """The window for the layers that slide, by config.json's ``layer_types``."""
    return tuple(window if kind == "sliding_attention" else None for kind in types)


@dataclass(frozen=True, slots=True)
class ExpertSettings:
    """The experts of a model: MLPs of which each token takes a few."""

    count: int  # in a layer
    per_token: int
    inner_size: int  # of one expert's MLP
    # a token's shares of its experts add up to 1; otherwise they are parts of a softmax over all
    normalized: bool
    layers: tuple[bool, ...]  # whether each layer has experts; the others have one MLP

    def as_config(self) -> dict[str, Any]:
        """The keys of config.json that say so, each of which mlx-lm asks for."""
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
    """A decoder, dense or with experts. Defaults are those that transformers takes if config.json says
    nothing.
    """

    name: str  # in config.json's ``architectures``
    model_type: str  # in config.json; also the name of mlx-lm's module, if mlx-lm has no other for it
    layer: tuple[Parameter, ...]  # the parameters of one layer
    max_position_embeddings: int  # what positions that depend on it take if config.json says nothing
    context_default: bool = False  # it is the context limit then, too: mlx-lm's class has it as its default
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    num_key_value_heads: int | None = None  # None: num_attention_heads
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    biases: tuple[str, ...] = ()  # flags of parameters that are always on
    # Flags that config.json may set. Any other that it sets is refused. A bias of keys that are normalized
    # after it could not be split off: such an architecture does not list ``attention_bias``.
    optional_biases: tuple[str, ...] = ()
    # Of config.json, the number of layers and its checked ``layer_types``: of each layer, the number of last
    # tokens that a query sees, itself included; None: it sees all.
    windows: Callable[[Mapping[str, Any], int, Sequence[str]], tuple[int | None, ...]] = (
        lambda raw, layers, types: (
            sliding(size(raw, "sliding_window"), types) if "sliding_attention" in types else (None,) * layers
        )
    )
    # of config.json and the number of layers: whether each layer turns its queries and keys
    rotates: Callable[[Mapping[str, Any], int], tuple[bool, ...]] = lambda raw, layers: (True,) * layers
    # of a layer with experts in place of those of :data:`MLP`; none: it is dense
    experts: tuple[Parameter, ...] = ()
    expert_settings: Callable[[Mapping[str, Any], int], ExpertSettings | None] = lambda raw, layers: None
    embedding: Parameter = Parameter("model.embed_tokens", "embedding", ("vocabulary", "hidden"))
    # stands before the path of each parameter of a layer; "{}" is its number
    layers: str = "model.layers.{}."
    final_norm: Parameter = Parameter("model.norm", "final_norm", ("hidden",))
    head: Parameter = Parameter("lm_head", "head", ("vocabulary", "hidden"), shard=0)

    def of_role(self, role: str) -> list[Parameter]:
        """A layer's parameters with this role; none if the architecture has no such part."""
        return [parameter for parameter in (*self.layer, *self.experts) if parameter.role == role]

    def of_layer(self, has_experts: bool) -> tuple[Parameter, ...]:
        """The parameters of a layer that has experts, or of one that has an MLP."""
        if not has_experts:
            return self.layer
        in_mlp = {parameter.role for parameter in MLP}
        return (*(parameter for parameter in self.layer if parameter.role not in in_mlp), *self.experts)

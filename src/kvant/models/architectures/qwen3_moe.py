"""Qwen3-MoE: a Qwen3 with experts, except in layers of mlp_only_layers or off decoder_sparse_step."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvant.errors import ModelError
from kvant.fields import flag, shown, size
from kvant.models.architectures.qwen3 import ARCHITECTURE as QWEN3
from kvant.models.architectures.table import Architecture, ExpertSettings, Parameter

MAX_EXPERTS = 4096
EXPERTS = 128  # like the following, the default of config.json
PER_TOKEN = 8
INNER_SIZE = 768
WINDOW = 4096


# Paths are those of mlx-lm's stacks. Published files store experts one by one; transformers can join them.
def _experts(name: str, joined: str, shape: tuple[str, ...]) -> Parameter:
    """Return a projection of all experts. Ranks divide its inner features."""
    each = f"mlp.experts.{{}}.{name}"
    inner = shape.index("expert_inner")
    whole = f"mlp.experts.{joined}_proj"
    return Parameter(
        f"mlp.switch_mlp.{name}", f"experts_{joined}", shape, shard=inner, each=each, joined=whole
    )


ROUTER_AND_EXPERTS = (
    Parameter("mlp.gate", "router", ("experts", "hidden"), converted=(8, 64)),
    _experts("gate_proj", "gate_up", ("experts", "expert_inner", "hidden")),
    _experts("up_proj", "gate_up", ("experts", "expert_inner", "hidden")),
    _experts("down_proj", "down", ("experts", "hidden", "expert_inner")),
)


def expert_settings(raw: Mapping[str, Any], layers: int) -> ExpertSettings:
    """See :attr:`Architecture.expert_settings`. transformers 5 writes num_local_experts for num_experts."""
    names = [name for name in ("num_experts", "num_local_experts") if raw.get(name) is not None]
    counts = {name: size(raw, name, limit=MAX_EXPERTS) for name in names}
    if len({*counts.values()}) > 1:
        values = " and ".join(f"{name} {count}" for name, count in counts.items())
        raise ModelError(f"config.json: {values}; expected one number of experts")
    count = next(iter(counts.values()), EXPERTS)
    per_token = size(raw, "num_experts_per_tok", default=PER_TOKEN)
    if per_token > count:
        raise ModelError(
            f"config.json: num_experts_per_tok is {per_token}; expected at most num_experts, {count}"
        )
    step = size(raw, "decoder_sparse_step", default=1)
    dense = _dense_layers(raw, layers)
    return ExpertSettings(
        count=count,
        per_token=per_token,
        inner_size=size(raw, "moe_intermediate_size", default=INNER_SIZE),
        normalized=bool(flag(raw, "norm_topk_prob")),
        layers=tuple((layer + 1) % step == 0 and layer not in dense for layer in range(layers)),
    )


def _dense_layers(raw: Mapping[str, Any], layers: int) -> list[int]:
    dense = raw.get("mlp_only_layers")
    if dense is None:
        return []
    if not isinstance(dense, list) or any(
        type(layer) is not int or not 0 <= layer < layers for layer in dense
    ):
        raise ModelError(
            f"config.json: mlp_only_layers is {shown(dense)}; expected a list of layers from 0 to "
            f"{layers - 1}"
        )
    return dense


def windows(raw: Mapping[str, Any], layers: int, types: Sequence[str]) -> tuple[int | None, ...]:
    """See :attr:`Architecture.windows`. An enabled window applies to all layers despite max_window_layers."""
    if not flag(raw, "use_sliding_window") or raw.get("sliding_window", WINDOW) is None:
        return (None,) * layers
    return (size(raw, "sliding_window", default=WINDOW),) * layers


ARCHITECTURE = Architecture(
    name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    layer=QWEN3.layer,
    max_position_embeddings=32768,
    context_default=True,
    num_key_value_heads=4,
    windows=windows,
    experts=ROUTER_AND_EXPERTS,
    expert_settings=expert_settings,
)

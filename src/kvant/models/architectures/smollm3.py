"""SmolLM3: a Llama with layers that do not rotate (NoPE): by default every fourth.

An enabled window applies to those layers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvant.errors import ModelError
from kvant.fields import flag, shown, size
from kvant.models.architectures.table import MLP, NORMS_BEFORE, OUTPUT_WITH_BIAS, QKV, Architecture, sliding


def rotates(raw: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """See :attr:`Architecture.rotates`. Despite its name, ``no_rope_layers`` is 1 for layers that rotate."""
    flags = raw.get("no_rope_layers")
    if flags is None:
        interval = size(raw, "no_rope_layer_interval", default=4)
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if (
        not isinstance(flags, list)
        or len(flags) != layers
        or any(type(one) is not int or one not in (0, 1) for one in flags)
    ):
        raise ModelError(
            f"config.json: no_rope_layers is {shown(flags)}; expected {layers} times 0 or 1, one per layer"
        )
    return tuple(one == 1 for one in flags)


def windows(raw: Mapping[str, Any], layers: int, types: Sequence[str]) -> tuple[int | None, ...]:
    if not flag(raw, "use_sliding_window") or raw.get("sliding_window") is None:
        return (None,) * layers
    types = types or [
        "full_attention" if rotated else "sliding_attention" for rotated in rotates(raw, layers)
    ]
    return sliding(size(raw, "sliding_window"), types)


ARCHITECTURE = Architecture(
    name="SmolLM3ForCausalLM",
    model_type="smollm3",
    layer=(*QKV, OUTPUT_WITH_BIAS, *MLP, *NORMS_BEFORE),
    max_position_embeddings=32768,
    num_key_value_heads=4,
    rope_theta=2000000.0,
    optional_biases=("attention_bias", "mlp_bias"),
    windows=windows,
    rotates=rotates,
)

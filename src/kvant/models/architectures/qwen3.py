"""Qwen3: no bias, an independent head_dim, and a norm of each query and key head before its rotation."""

from kvant.models.architectures.qwen2 import windows
from kvant.models.architectures.table import MLP, NORMS_BEFORE, OUTPUT, QKV, Architecture, Parameter

ARCHITECTURE = Architecture(
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    layer=(
        *QKV,
        OUTPUT,
        *MLP,
        *NORMS_BEFORE,
        Parameter("self_attn.q_norm", "query_norm", ("head",)),
        Parameter("self_attn.k_norm", "key_norm", ("head",)),
    ),
    max_position_embeddings=32768,
    context_default=True,
    head_dim=128,
    num_key_value_heads=32,
    windows=windows,
)

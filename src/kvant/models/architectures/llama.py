"""Llama: biases where config.json says so. transformers looks at no window; mlx-lm at that of layer_types."""

from kvant.models.table import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    MLP,
    NORMS_BEFORE,
    OUTPUT_WITH_BIAS,
    QKV,
    Architecture,
)

ARCHITECTURE = Architecture(
    name="LlamaForCausalLM",
    model_type="llama",
    parameters=(EMBEDDING, *QKV, OUTPUT_WITH_BIAS, *MLP, *NORMS_BEFORE, FINAL_NORM, HEAD),
    max_position_embeddings=2048,
    optional_biases=("attention_bias", "mlp_bias"),
)

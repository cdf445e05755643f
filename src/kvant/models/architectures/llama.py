"""Llama: optional biases. Only layer_types gives windows: mlx-lm reads it, transformers does not."""

from kvant.models.architectures.table import MLP, NORMS_BEFORE, OUTPUT_WITH_BIAS, QKV, Architecture

ARCHITECTURE = Architecture(
    name="LlamaForCausalLM",
    model_type="llama",
    layer=(*QKV, OUTPUT_WITH_BIAS, *MLP, *NORMS_BEFORE),
    max_position_embeddings=2048,
    optional_biases=("attention_bias", "mlp_bias"),
)

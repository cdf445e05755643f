"""Llama: biases if config.json says so. A window only with layer_types: mlx-lm reads them, transformers
does not.
"""

from kvant.models.architectures.table import MLP, NORMS_BEFORE, OUTPUT_WITH_BIAS, QKV, Architecture

ARCHITECTURE = Architecture(
    name="LlamaForCausalLM",
    model_type="llama",
    layer=(*QKV, OUTPUT_WITH_BIAS, *MLP, *NORMS_BEFORE),
    max_position_embeddings=2048,
    optional_biases=("attention_bias", "mlp_bias"),
)

"""The parameters a config.json describes, by their names in a checkpoint."""

from kvant.models.config import ModelConfig


def matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Each matrix's module path and (outputs, inputs): those stored as ``path.weight``, quantized or not.

    The output head is among them even where it is tied: a tied checkpoint may still carry it.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    layer = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    blocks = {f"model.layers.{i}.{path}": size for i in range(config.num_hidden_layers) for path, size in layer.items()}
    return {"model.embed_tokens": (config.vocab_size, hidden), **blocks, "lm_head": (config.vocab_size, hidden)}


def vectors(config: ModelConfig) -> dict[str, int]:
    """Each norm's and bias's tensor name and size."""
    hidden, D = config.hidden_size, config.head_dim
    layer = {"input_layernorm.weight": hidden, "post_attention_layernorm.weight": hidden}
    if config.attention_bias:
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
        layer |= {f"self_attn.{name}_proj.bias": count * D for name, count in heads.items()}
    if config.output_bias:
        layer["self_attn.o_proj.bias"] = hidden
    if config.mlp_bias:
        inner = config.intermediate_size
        layer |= {"mlp.gate_proj.bias": inner, "mlp.up_proj.bias": inner, "mlp.down_proj.bias": hidden}
    if config.query_key_norm:
        layer |= {f"self_attn.{name}_norm.weight": D for name in "qk"}
    blocks = {f"model.layers.{i}.{name}": size for i in range(config.num_hidden_layers) for name, size in layer.items()}
    return {**blocks, "model.norm.weight": hidden}

"""OLMo 2: norms follow attention and MLP. All queries of a token are normalized together, as are all keys."""

from kvant.models.architectures.table import MLP, OUTPUT, QKV, Architecture, Parameter

ARCHITECTURE = Architecture(
    name="Olmo2ForCausalLM",
    model_type="olmo2",
    layer=(
        *QKV,
        OUTPUT,
        *MLP,
        # Ranks that divide the heads add up their sums of squares.
        Parameter("self_attn.q_norm", "query_norm", ("queries",), shard=0),
        Parameter("self_attn.k_norm", "key_norm", ("keys",), shard=0),
        Parameter("post_attention_layernorm", "after_attention", ("hidden",)),
        Parameter("post_feedforward_layernorm", "after_mlp", ("hidden",)),
    ),
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
)

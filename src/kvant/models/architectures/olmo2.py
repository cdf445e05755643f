"""OLMo 2: norms after the attention and the MLP, not before; all queries of a token normalized as one, and all keys."""

from kvant.models.table import EMBEDDING, FINAL_NORM, HEAD, LAYER, MLP, OUTPUT, QKV, Architecture, Parameter

ARCHITECTURE = Architecture(
    name="Olmo2ForCausalLM",
    model_type="olmo2",
    parameters=(
        EMBEDDING,
        *QKV,
        OUTPUT,
        *MLP,
        # Ranks with a part of the heads would add up their sums of squares.
        Parameter(LAYER + "self_attn.q_norm", "query_norm", ("queries",), shard=0),
        Parameter(LAYER + "self_attn.k_norm", "key_norm", ("keys",), shard=0),
        Parameter(LAYER + "post_attention_layernorm", "after_attention", ("hidden",)),
        Parameter(LAYER + "post_feedforward_layernorm", "after_mlp", ("hidden",)),
        FINAL_NORM,
        HEAD,
    ),
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
)

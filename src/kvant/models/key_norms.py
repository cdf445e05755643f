"""Move large weights of the key RMSNorm to the query RMSNorm, at no cost.

A channel of a key is about as large as the weight of its norm. An outlier uses up the range of a quantized
group. Dividing it in keys and multiplying it in queries leaves the scores unchanged, exactly so with powers
of two.
"""

import mlx.core as mx

OUTLIER = 2.0  # times the median of a head's rotary pairs: larger weights are moved


def balance_norms(query: mx.array, key: mx.array, head_dim: int) -> tuple[mx.array, mx.array, bool]:
    """Return both weights, and whether they were changed.

    They are (head_dim,) for norms of each head, or (H D,) and (K D,) for norms of all heads together. Rotary
    pair p has the elements p and p + D/2 of a head, which get the same factor so that it commutes with RoPE.
    """
    rows = key.astype(mx.float32).reshape(-1, 2, head_dim // 2)
    size = mx.abs(rows).max(axis=1)  # (rows, D/2)
    typical = mx.maximum(mx.median(size, axis=-1, keepdims=True), 1e-6)
    factor = mx.power(2.0, mx.where(size > OUTLIER * typical, mx.round(mx.log2(size / typical)), 0.0))
    if not (factor > 1).any().item():
        return query, key, False
    both = mx.tile(factor, (1, 2)).astype(key.dtype)
    of_queries = mx.repeat(both, query.size // key.size, axis=0)
    return query * of_queries.reshape(query.shape), key / both.reshape(key.shape), True

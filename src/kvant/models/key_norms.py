"""The weights of the RMSNorms of queries and keys, with what is large in keys moved to queries, which is
free.

A key's channel has about the size of its norm's weight. One far above the others takes the range of a
quantized group. Scores are the same if it is divided in keys and multiplied in queries: by powers of two, in
the same bits.
"""

import mlx.core as mx

OUTLIER = 2.0  # times the median of a head's rotary pairs: what is larger is moved


def balance_norms(query: mx.array, key: mx.array, head_dim: int) -> tuple[mx.array, mx.array, bool]:
    """Both weights, and whether they are others than those given.

    They are (head_dim,), of each head by itself, or (H D,) and (K D,), of all heads together. Rotary pair p
    is the elements p and p + D/2 of a head: both are divided alike, so that they can turn.
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

"""Scaled dot-product attention over floating-point keys and values: the unfused path of every cache."""

import math

import mlx.core as mx

from kvant.operators.bias_split import MAX_SCORE_QUERIES, BiasSplit, rotated_bias, score_bias, value_bias_of
from kvant.operators.cpu_attention import attend_block, attend_few, queries_at_once
from kvant.operators.masks import score_terms
from kvant.operators.streams import FEW_ROWS

# head_dim for which MLX's GPU attention accumulates in float32 without making scores.
GPU_FUSED_HEAD_DIMS = (64, 80, 96, 128, 256)


def attend_tokens(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    *,
    is_causal: bool = True,
    is_alibi: bool = False,
    mask: mx.array | None = None,
    bias_split: BiasSplit | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of S queries over T tokens. The last query belongs to the last token. Unchecked.

    On a CPU queries are taken in blocks of scores, or one by one (:mod:`kvant.operators.cpu_attention`). MLX's fused
    GPU attention makes no scores. A query with every key masked gives zeros.

    Args:
        query: (B, H, S, D).
        key, value: (B, K, T, D), H a multiple of K, T >= S.
        is_causal: query i sees token j only if j <= T - S + i.
        is_alibi: add slope_h * (j - (T - S + i)). It implies causal.
        mask: broadcastable to (B, H, S, T). A boolean mask keeps True; another is added to the scores.
        bias_split: the biases that keys and values lack. Token j is at column j of its rotation.
        sinks: (H,) a learned score of each head that takes its share of the softmax and adds nothing.

    Returns:
        (B, H, S, D) in the query's dtype.

    Source: PMX MultiHeadCacheAttention; ALiBi from Press et al., arXiv 2108.12409; learned sinks from gpt-oss.
    """
    B, H, S, D = query.shape
    T = key.shape[2]
    dtype = query.dtype
    on_cpu = mx.default_device().type == mx.cpu
    if on_cpu and S <= FEW_ROWS and not is_alibi:
        return attend_few(query, key, value, is_causal, mask, bias_split, sinks)
    if on_cpu or is_alibi or mask is not None or bias_split is not None or D not in GPU_FUSED_HEAD_DIMS:
        # Elsewhere MLX's attention rounds scores and biases to half precision, where large ones overflow.
        query, key, value = (x.astype(mx.float32) for x in (query, key, value))
    causal = (is_causal or is_alibi) and S > 1
    key_bias_scores = None
    if bias_split is not None and bias_split.pairs:
        if S <= MAX_SCORE_QUERIES:
            key_bias_scores = score_bias(query, bias_split, T)
        else:
            key = key + rotated_bias(bias_split, D, T)
    if sinks is not None:
        sinks = sinks.astype(query.dtype)
        if bias_split is not None:  # the weights of the values sum to less than 1: each takes its bias along
            value = value + bias_split.value_bias[:, None]
    terms = score_terms(H, S, T, causal, is_alibi, mask, key_bias_scores)
    block = queries_at_once(B, H, S, T) if on_cpu else S
    attend = attend_block if on_cpu else mx.fast.scaled_dot_product_attention
    outputs: list[mx.array] = []
    for first in range(0, S, block):
        last = min(first + block, S)
        keys = T - S + last if causal else T  # later keys follow every query of this block
        block_mask: mx.array | str | None = "causal" if causal else None
        alive = None
        if terms is not None:
            block_mask = terms(first, last, keys)
            if mask is not None:
                alive = (block_mask > -math.inf).any(axis=-1, keepdims=True)
                block_mask = mx.where(alive, block_mask, 0.0)
        block_query = query[:, :, first:last]
        if outputs:  # without this dependency MLX makes the scores of many blocks before it uses the first
            block_query = mx.depends([block_query], [outputs[-1]])[0]
        output = attend(
            block_query, key[:, :, :keys], value[:, :, :keys], scale=1 / math.sqrt(D), mask=block_mask, sinks=sinks
        )
        if bias_split is not None and sinks is None:
            output = output + value_bias_of(bias_split, H)
        outputs.append(output if alive is None else mx.where(alive, output, 0.0))
    joined = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)
    return joined.astype(dtype)

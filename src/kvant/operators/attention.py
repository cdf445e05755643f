"""Scaled dot-product attention over floating-point keys and values: the unfused path of every cache."""

import math
from collections.abc import Sequence

import mlx.core as mx

from kvant.operators.bias_split import (
    MAX_SCORE_QUERIES,
    BiasSplit,
    bias_weights,
    rotated_bias,
    score_bias,
    value_bias_of,
)
from kvant.operators.exponential import softmax_parts
from kvant.operators.masks import mask_by_kv_head, score_terms
from kvant.operators.streams import FEW_ROWS

# Bytes of scores that one block of queries may make on a CPU, whose attention makes a score matrix. MLX queues ahead:
# what 7 blocks take was alive at once, 10 MiB in all; blocks of half the size take longer. (Both measured.)
BLOCK_SCORE_BYTES = 3 * 512 * 1024
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

    On a CPU queries are taken in blocks whose scores stay under ``BLOCK_SCORE_BYTES``. MLX's fused GPU attention makes
    no scores. A query with every key masked gives zeros.

    Args:
        query: (B, H, S, D).
        key, value: (B, K, T, D), H a multiple of K, T >= S.
        is_causal: query i sees token j only where j <= T - S + i.
        is_alibi: add slope_h * (j - (T - S + i)). It implies causal.
        mask: broadcastable to (B, H, S, T). A boolean mask keeps where True; another is added to the scores.
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
        return _attend_few(query, key, value, is_causal, mask, bias_split, sinks)
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
    block = S
    if on_cpu:
        block = max(1, min(S, BLOCK_SCORE_BYTES // (B * H * T * 4)))
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
        attend = _attend_block if on_cpu else mx.fast.scaled_dot_product_attention
        output = attend(
            block_query, key[:, :, :keys], value[:, :, :keys], scale=1 / math.sqrt(D), mask=block_mask, sinks=sinks
        )
        if bias_split is not None and sinks is None:
            output = output + value_bias_of(bias_split, H)
        outputs.append(output if alive is None else mx.where(alive, output, 0.0))
    joined = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)
    return joined.astype(dtype)


def _attend_block(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    """As ``mx.fast.scaled_dot_product_attention``, whose ``exp`` takes most of its time on a CPU; masks are added."""
    (B, H, S, D), (K, T) = query.shape, key.shape[1:3]
    scores = (query * scale).reshape(B, K, -1, D) @ key.swapaxes(-1, -2)  # (B, K, H/K * S, T)
    if mask is not None:
        each = scores.reshape(B, K, -1, S, T)
        if isinstance(mask, mx.array):
            each = each + mask_by_kv_head(mask, K)
        else:
            each = mx.where(mx.arange(T) <= mx.arange(T - S, T)[:, None], each, -math.inf)
        scores = each.reshape(scores.shape)
    column = None if sinks is None else mx.repeat(sinks, S).reshape(1, K, -1, 1)
    return _weighted(scores, value, column).reshape(B, H, S, -1)


def _weighted(scores: mx.array, value: mx.array, sinks: mx.array | None) -> mx.array:
    """Values (B, K, T, Dv) weighted by the softmax of scores (B, K, N, T), with sinks (1, K, N, 1) beside them."""
    if sinks is not None:
        scores = mx.concatenate([scores, mx.broadcast_to(sinks, (*scores.shape[:-1], 1))], axis=-1)
    weights, sums = softmax_parts(scores)
    if sinks is not None:
        weights = weights[..., :-1]
    return weights @ value if sums is None else weights @ value / sums


def _attend_few(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    is_causal: bool,
    mask: mx.array | None,
    bias_split: BiasSplit | None,
    sinks: mx.array | None,
) -> mx.array:
    """:func:`attend_tokens` of a few queries on a CPU."""
    (B, H, S, _), T = query.shape, key.shape[2]
    dtype = query.dtype
    query, key, value = (x.astype(mx.float32) for x in (query, key, value))
    queries = query.transpose(2, 0, 1, 3)
    block = max(1, min(S, BLOCK_SCORE_BYTES // (B * H * T * 4)))
    outputs: list[mx.array] = []
    for start in range(0, S, block):
        own = queries[start : start + block]
        if outputs:  # as in attend_tokens
            own = mx.depends([own], outputs[-1:])[0]
        seen = [T - S + 1 + i if is_causal else T for i in range(start, start + len(own))]
        tokens = [(key[:, :, :end], value[:, :, :end]) for end in seen]
        masks = None
        if mask is not None:
            masks = [mask[..., i : i + 1, :end] for i, end in enumerate(seen, start)]
        outputs.append(attend_singly(own, tokens, masks=masks, bias_split=bias_split, sinks=sinks))
    joined = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
    return joined.transpose(1, 2, 0, 3).astype(dtype)


def attend_singly(
    query: mx.array,
    tokens: Sequence[tuple[mx.array, mx.array]],
    *,
    masks: Sequence[mx.array] | None = None,
    bias_split: BiasSplit | None = None,
    first: Sequence[int] | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of N queries, each to tokens of its own, in float32, on a CPU. Unchecked.

    Each has the numbers it has alone: a product of several, or with more keys, would be summed in another order. So it
    takes two products and a softmax, for all query heads of a kv head (MLX's attention takes one for each query head).
    Everything else is done for all at once.

    Args:
        query: (N, B, H, D).
        tokens: key and value, (B, K, T, D) and (B, K, T, Dv), of each query; T may differ.
        masks: of each query, broadcastable to (B, H, 1, T).
        bias_split: as in :func:`attend_tokens`.
        first: the column of its rotation for each query's first token; None: 0.
        sinks: as in ``attend_tokens``.

    Returns:
        (N, B, H, Dv).
    """
    N, B, H, D = query.shape
    K = tokens[0][0].shape[1]
    bias = None if bias_split is None else bias_split.value_bias[:, None]  # (K, 1, Dv)
    if bias is not None and sinks is not None:  # as in attend_tokens
        tokens, bias = [(key, value + bias) for key, value in tokens], None
    queries = mx.split((query * (1 / math.sqrt(D))).reshape(N * B, K, H // K, D), N)
    scores = [own @ key.swapaxes(-1, -2) for own, (key, _) in zip(queries, tokens, strict=True)]  # (B, K, H/K, T)
    if bias_split is not None and bias_split.pairs:
        factors = mx.split(bias_weights(query.reshape(N * B, H, 1, D), bias_split).squeeze(3), N)  # (B, K, H/K, 2P)
        table = bias_split.rotation.flatten(0, 1)  # (2P, positions)
        of_each = zip(scores, factors, first or [0] * N, strict=True)
        scores = [score + own @ table[:, at : at + score.shape[-1]] for score, own, at in of_each]
    alive = None
    if masks is not None:
        by_kv_head = [mask_by_kv_head(mask, K).squeeze(3) for mask in masks]
        scores = [
            mx.where(mask, score, -math.inf) if mask.dtype == mx.bool_ else score + mask
            for score, mask in zip(scores, by_kv_head, strict=True)
        ]
        living = [(score != -math.inf).any(axis=-1, keepdims=True) for score in scores]
        scores = [mx.where(own, score, 0.0) for score, own in zip(scores, living, strict=True)]
        alive = mx.concatenate(living)  # (N * B, K, H/K, 1)
    column = None if sinks is None else sinks.astype(mx.float32).reshape(1, K, H // K, 1)
    output = mx.concatenate([_weighted(score, value, column) for score, (_, value) in zip(scores, tokens, strict=True)])
    if bias is not None:
        output = output + bias
    if alive is not None:
        output = mx.where(alive, output, 0.0)
    return output.reshape(N, B, H, -1)

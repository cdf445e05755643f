"""Attention on a CPU: many queries in blocks of scores, a few queries one at a time. Unchecked."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from kvant.operators.bias_split import BiasSplit, bias_weights
from kvant.operators.exponential import softmax_parts
from kvant.operators.masks import mask_by_kv_head
from kvant.operators.score_blocks import in_blocks

# Bytes of scores that one block of queries may take on a CPU, where attention materializes a score matrix.
# MLX queues ahead: up to 7 blocks were alive at once, 10 MiB in all; blocks of half the size take longer.
# (Both measured.)
BLOCK_SCORE_BYTES = 3 * 512 * 1024


def queries_at_once(B: int, H: int, S: int, T: int, scores: int = BLOCK_SCORE_BYTES // 4) -> int:
    """Return how many of S queries to T tokens a block may hold to stay within ``scores``; at least one."""
    return max(1, min(S, scores // (B * H * T)))


def attend_block(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    """Replace ``mx.fast.scaled_dot_product_attention``, whose ``exp`` is slow on a CPU. Masks are added."""
    B, H, S, D = query.shape
    K, T = key.shape[1:3]
    scores = (query * scale).reshape(B, K, -1, D) @ key.swapaxes(-1, -2)  # (B, K, H/K * S, T)
    if mask is not None:
        each = scores.reshape(B, K, -1, S, T)
        if isinstance(mask, mx.array):
            each = each + mask_by_kv_head(mask, K)
        else:
            each = mx.where(mx.arange(T) <= mx.arange(T - S, T)[:, None], each, -math.inf)
        scores = each.reshape(scores.shape)
    column = None if sinks is None else mx.repeat(sinks, S).reshape(1, K, -1, 1)
    return weighted(scores, value, column).reshape(B, H, S, -1)


def weighted(scores: mx.array, value: mx.array, sinks: mx.array | None) -> mx.array:
    """Return values (B, K, T, Dv) weighted by the softmax of scores (B, K, N, T) and sinks (1, K, N, 1)."""
    if sinks is not None:
        scores = mx.concatenate([scores, mx.broadcast_to(sinks, (*scores.shape[:-1], 1))], axis=-1)
    weights, sums = softmax_parts(scores)
    if sinks is not None:
        weights = weights[..., :-1]
    output = weights @ value
    return output if sums is None else output / sums


def attend_few(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    is_causal: bool,
    mask: mx.array | None,
    bias_split: BiasSplit | None,
    sinks: mx.array | None,
) -> mx.array:
    """Compute :func:`kvant.operators.attention.attend_tokens` for a few queries on a CPU."""
    B, H, S, _ = query.shape
    T = key.shape[2]
    dtype = query.dtype
    query, key, value = (x.astype(mx.float32) for x in (query, key, value))

    def attend_some(queries: mx.array, first: int, _: int) -> mx.array:
        seen = [T - S + 1 + i if is_causal else T for i in range(first, first + queries.shape[2])]
        tokens = [(key[:, :, :end], value[:, :, :end]) for end in seen]
        masks = None if mask is None else [mask[..., i : i + 1, :end] for i, end in enumerate(seen, first)]
        singles = queries.transpose(2, 0, 1, 3)
        return attend_singly(singles, tokens, masks=masks, bias_split=bias_split, sinks=sinks).transpose(
            1, 2, 0, 3
        )

    block = queries_at_once(B, H, S, T)
    return in_blocks(attend_some, query, T, block=block, causal=is_causal).astype(dtype)


class SingleQueries(NamedTuple):
    """N float32 queries of B sequences that attend one at a time on a CPU. Unchecked.

    Each query gets the same numbers as in a step of its own. A product of several queries, or with more keys,
    would sum in another order, so every query has its own product with its keys, for all query heads of a kv
    head (MLX's attention has one per query head). Everything else is done for all queries at once.

    Attributes:
        scaled: (N * B, K, H/K, D), multiplied by 1 / sqrt(D).
        each: the same, split into N arrays.
        weights: (N * B, K, H/K, 2P) from :func:`kvant.operators.bias_split.bias_weights`; None if no key bias
            is split off.
        each_weights: the same, split into N arrays.
        rotation: (2P, positions), present with ``weights``.
    """

    scaled: mx.array
    each: Sequence[mx.array]
    weights: mx.array | None = None
    each_weights: Sequence[mx.array] = ()
    rotation: mx.array | None = None


def single_queries(query: mx.array, num_kv_heads: int, bias_split: BiasSplit | None) -> SingleQueries:
    """Prepare queries (N, B, H, D)."""
    N, B, H, D = query.shape
    scaled = (query * (1 / math.sqrt(D))).reshape(N * B, num_kv_heads, H // num_kv_heads, D)
    each = [*mx.split(scaled, N)]
    if bias_split is None or not bias_split.pairs:
        return SingleQueries(scaled, each)
    weights = bias_weights(query.reshape(N * B, H, 1, D), bias_split).squeeze(3)
    rotation = bias_split.rotation.flatten(0, 1)
    return SingleQueries(scaled, each, weights, [*mx.split(weights, N)], rotation)


def single_scores(queries: SingleQueries, number: int, key: mx.array, first: int) -> mx.array:
    """Return the scores (B, K, H/K, T) of one query with keys (B, K, T, D) from position ``first`` on."""
    scores = queries.each[number] @ key.swapaxes(-1, -2)
    if queries.rotation is not None:
        scores = scores + queries.each_weights[number] @ queries.rotation[:, first : first + key.shape[2]]
    return scores


def attend_singly(
    query: mx.array,
    tokens: Sequence[tuple[mx.array, mx.array]],
    *,
    masks: Sequence[mx.array] | None = None,
    bias_split: BiasSplit | None = None,
    first: Sequence[int] | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend N queries, each to its own tokens, as :class:`SingleQueries` explains.

    Args:
        query: (N, B, H, D).
        tokens: keys (B, K, T, D) and values (B, K, T, Dv) for each query; T may differ.
        masks: one per query, broadcastable to (B, H, 1, T).
        bias_split, sinks: as in :func:`kvant.operators.attention.attend_tokens`.
        first: the rotation's column of each query's first token; None: 0.

    Returns:
        (N, B, H, Dv).
    """
    N, B, H, _ = query.shape
    K = tokens[0][0].shape[1]
    bias = None if bias_split is None else bias_split.value_bias[:, None]  # (K, 1, Dv)
    if bias is not None and sinks is not None:  # as in attend_tokens
        tokens = [(key, value + bias) for key, value in tokens]
        bias = None
    queries = single_queries(query, K, bias_split)
    scores = [single_scores(queries, n, key, first[n] if first else 0) for n, (key, _) in enumerate(tokens)]
    alive = None
    if masks is not None:
        by_kv_head = [mask_by_kv_head(mask, K).squeeze(3) for mask in masks]
        scores = [
            mx.where(mask, score, -math.inf) if mask.dtype == mx.bool_ else score + mask
            for score, mask in zip(scores, by_kv_head, strict=True)
        ]
        living = [(score != -math.inf).any(axis=-1, keepdims=True) for score in scores]
        scores = [mx.where(sees_any, score, 0.0) for score, sees_any in zip(scores, living, strict=True)]
        alive = mx.concatenate(living)  # (N * B, K, H/K, 1)
    column = None if sinks is None else sinks.astype(mx.float32).reshape(1, K, H // K, 1)
    outputs = [weighted(score, value, column) for score, (_, value) in zip(scores, tokens, strict=True)]
    output = mx.concatenate(outputs)
    if bias is not None:
        output = output + bias
    if alive is not None:
        output = mx.where(alive, output, 0.0)
    return output.reshape(N, B, H, -1)

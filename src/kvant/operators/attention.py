"""Scaled dot-product attention over floating-point keys and values: the unfused path of every cache."""

import math
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from kvant.operators.bias_split import MAX_SCORE_QUERIES, BiasSplit, rotated_bias, score_bias, value_bias_of
from kvant.operators.cpu_attention import attend_block, attend_few, queries_at_once
from kvant.operators.masks import both_masks, score_terms, window_mask
from kvant.operators.score_blocks import GPU_BLOCK_SCORES, Mask, device_kind, in_blocks, makes_scores
from kvant.operators.streams import FEW_ROWS


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
    """Compute attention of S queries to T tokens. The last query belongs to the last token. Unchecked.

    Where MLX materializes scores, queries attend in blocks; on a CPU a few queries attend one by one
    (:mod:`kvant.operators.cpu_attention`). A query with every key masked gives zeros.

    Args:
        query: (B, H, S, D).
        key, value: (B, K, T, D), H a multiple of K, T >= S.
        is_causal: query i sees token j only if j <= T - S + i.
        is_alibi: add slope_h * (j - (T - S + i)). It implies causal.
        mask: broadcastable to (B, H, S, T). A boolean mask keeps True; others are added to the scores.
        bias_split: the biases that keys and values lack. Token j is at column j of its rotation.
        sinks: (H,) learned scores, which take a share of each head's softmax and contribute no value.

    Returns:
        (B, H, S, D) in the query's dtype.

    Source: PMX MultiHeadCacheAttention; ALiBi: Press et al., arXiv 2108.12409; learned sinks: gpt-oss.
    """
    B, H, S, D = query.shape
    T = key.shape[2]
    dtype = query.dtype
    on_cpu = mx.default_device().type == mx.cpu
    if on_cpu and S <= FEW_ROWS and not is_alibi:
        return attend_few(query, key, value, is_causal, mask, bias_split, sinks)
    with_terms = is_alibi or mask is not None or (bias_split is not None and S <= MAX_SCORE_QUERIES)
    in_float32 = on_cpu or is_alibi or mask is not None or bias_split is not None
    scores = makes_scores(
        device_kind(on_cpu),
        (H, S, D),
        value.shape[1:],
        mask="added" if with_terms else "causal",
        dtype=mx.float32 if in_float32 else dtype,
    )
    if in_float32 or scores:
        # MLX's attention rounds materialized scores and biases to half precision, where large ones overflow.
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
        if bias_split is not None:  # the values' weights sum to less than 1, so add the bias to each value
            value = value + bias_split.value_bias[:, None]
    terms = score_terms(H, S, T, causal, is_alibi, mask, key_bias_scores)
    block = S
    if on_cpu:
        block = queries_at_once(B, H, S, T)
    elif scores or terms is not None:
        block = queries_at_once(B, H, S, T, GPU_BLOCK_SCORES)
    attend = attend_block if on_cpu else mx.fast.scaled_dot_product_attention

    def attend_some(queries: mx.array, first: int, keys: int) -> mx.array:
        own_mask: mx.array | str | None = "causal" if causal else None
        alive = None
        if terms is not None:
            own_mask = terms(first, first + queries.shape[2], keys)
            if mask is not None:
                alive = (own_mask > -math.inf).any(axis=-1, keepdims=True)
                own_mask = mx.where(alive, own_mask, 0.0)
        output = attend(
            queries, key[:, :, :keys], value[:, :, :keys], scale=1 / math.sqrt(D), mask=own_mask, sinks=sinks
        )
        if bias_split is not None and sinks is None:
            output = output + value_bias_of(bias_split, H)
        return output if alive is None else mx.where(alive, output, 0.0)

    return in_blocks(attend_some, query, T, block=block, causal=causal).astype(dtype)


def attend_each(
    query: mx.array,
    sequences: Sequence[tuple[mx.array, mx.array, int]],
    window: int | None,
    *,
    mask: mx.array | None,
    bias_split: BiasSplit | None,
    sinks: mx.array | None,
) -> list[mx.array]:
    """Attend each row of queries (B, H, S, D) causally to its own sequence: B arrays (1, H, S, Dv).

    Args:
        sequences: keys, values and the position of the first token.
        window: how many tokens a query sees, including its own; None: all.
        mask: has a column for every position from 0 on.
        bias_split, sinks: as in :func:`attend_tokens`.
    """
    S = query.shape[2]
    outputs = []
    for b, (key, value, first) in enumerate(sequences):
        T = key.shape[2]
        split = bias_split and replace(bias_split, rotation=bias_split.rotation[..., first:])
        seen = None if mask is None else mask[..., first:]
        if window is not None and window < T:
            visible = window_mask(S, T, window)
            seen = visible if seen is None else both_masks(visible, seen)
        outputs.append(attend_tokens(query[b : b + 1], key, value, mask=seen, bias_split=split, sinks=sinks))
    return outputs


def attend_as_mlx(
    query: mx.array,
    key: mx.array,
    value: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Call ``mx.fast.scaled_dot_product_attention`` on a GPU, in blocks of queries if it makes scores."""
    B, H, S, D = query.shape
    T = key.shape[2]
    kind: Mask = "none" if mask is None else "causal"
    if isinstance(mask, mx.array):
        kind = "boolean" if mask.dtype == mx.bool_ else "added"
        mask = mx.broadcast_to(mask, (*mask.shape[:-2], S, T))
    scores = makes_scores(device_kind(on_cpu=False), (H, S, D), value.shape[1:], kind, query.dtype)

    def attend_some(queries: mx.array, first: int, keys: int) -> mx.array:
        seen = mask[..., first : first + queries.shape[2], :] if isinstance(mask, mx.array) else mask
        return mx.fast.scaled_dot_product_attention(
            queries, key[:, :, :keys], value[:, :, :keys], scale=scale, mask=seen, sinks=sinks
        )

    block = queries_at_once(B, H, S, T, GPU_BLOCK_SCORES) if scores else S
    return in_blocks(attend_some, query, T, block=block, causal=kind == "causal")

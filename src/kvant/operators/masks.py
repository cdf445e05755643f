"""Terms that attention adds to its scores: masks, windows, ALiBi."""

import math
from collections.abc import Callable

import mlx.core as mx


def window_mask(new_tokens: int, tokens: int, window: int) -> mx.array:
    """Return which of T tokens the last S see, each the last ``window`` including itself: boolean (S, T)."""
    query = mx.arange(tokens - new_tokens, tokens)[:, None]
    token = mx.arange(tokens)
    return (token <= query) & (token > query - window)


def both_masks(seen: mx.array, mask: mx.array) -> mx.array:
    """Restrict a mask, boolean or added, to the tokens that the boolean ``seen`` allows."""
    return seen & mask if mask.dtype == mx.bool_ else mx.where(seen, mask.astype(mx.float32), -math.inf)


def mask_by_kv_head(mask: mx.array, num_kv_heads: int) -> mx.array:
    """Reshape a mask broadcastable to (B, H, S, T) into one broadcastable to (B, K, H/K, S, T)."""
    mask = mask.reshape(*[1] * (4 - mask.ndim), *mask.shape)
    B, H, S, T = mask.shape
    return mask[:, :, None] if H == 1 else mask.reshape(B, num_kv_heads, H // num_kv_heads, S, T)


def score_terms(
    H: int, S: int, T: int, causal: bool, is_alibi: bool, mask: mx.array | None, scores: mx.array | None
) -> Callable[[int, int, int], mx.array] | None:
    """Return a function that gives the term to add to a block of scores, or None if causal masking suffices.

    The function takes the first query, the end of the queries, and the number of keys. It returns float32
    that broadcasts to (B, H, queries, keys) and includes ``scores``, (B, H, S, T) float32.
    """
    if mask is None and scores is None and not is_alibi:
        return None
    slopes = mx.array(alibi_slopes(H))[:, None, None] if is_alibi else None

    def of_block(first: int, last: int, keys: int) -> mx.array:
        query_position = mx.arange(T - S + first, T - S + last)[:, None]
        distance = mx.arange(keys)[None] - query_position  # (queries, keys)
        total = mx.zeros((), mx.float32) if scores is None else scores[:, :, first:last, :keys]
        if causal:
            total = mx.where(distance > 0, -math.inf, total)
        if slopes is not None:
            total = total + slopes * distance.astype(mx.float32)  # (H, queries, keys)
        if mask is not None:
            block = mask[..., first:last, :keys]
            is_boolean = block.dtype == mx.bool_
            total = total + (mx.where(block, 0.0, -math.inf) if is_boolean else block.astype(mx.float32))
        return total

    return of_block


def alibi_slopes(num_heads: int) -> list[float]:
    """Return each head's slope: 2^(-8n/c) for the first c = 2^floor(log2 H), then every other one of 2c."""
    c = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-8 * n / c) for n in range(1, c + 1)]
    return slopes + [2 ** (-4 * n / c) for n in range(1, 2 * (num_heads - c), 2)]

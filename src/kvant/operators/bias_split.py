"""The bias split: attention over keys and values that were stored without their projection's bias.

An extension of PMX. Qwen2 adds a large constant to its keys, which would take most of their quantized range.
Leaving it out is exact. For keys, rotation is linear: R_j(k + b) = R_j k + R_j b. For values, softmax weights
sum to 1: sum_j w_j (v_j + b) = sum_j w_j v_j + b.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from kvant.operators.rotary import Rotary

# Up to this many queries the key bias is added to the scores; beyond, adding it to the keys is cheaper.
MAX_SCORE_QUERIES = 8


@dataclass(frozen=True, slots=True)
class BiasSplit:
    """The biases that a layer's cache lacks. P rotary pairs: pair p is the elements p and p + D/2 of a head.

    Attributes:
        key_bias: (K, 2, P) float32: the bias at the first and second element of each pair. The bias at other
            pairs stays in the stored keys, so the split is exact for any choice of pairs.
        pairs: the P pair indices.
        rotation: (2, P, MaxS) float32: cosine and sine of each pair's angle at position j, times the factor
            of :class:`kvant.operators.rotary.Rotary`.
        value_bias: (K, D) float32.
    """

    key_bias: mx.array
    pairs: tuple[int, ...]
    rotation: mx.array
    value_bias: mx.array


def rotation_table(rotary: Rotary, pairs: Sequence[int], end: int) -> mx.array:
    """Return cosine and sine of each position's angle times the factor: (2, P, end) float32."""
    with mx.stream(mx.cpu):  # computed in float64, which no other backend has
        frequency = mx.array([rotary.frequencies[p] for p in pairs], mx.float64)
        angle = frequency[:, None] * mx.arange(end).astype(mx.float64)  # (P, end)
        table = mx.stack([mx.cos(angle), mx.sin(angle)]) * mx.array(rotary.factor, mx.float64)
        return table.astype(mx.float32)


def score_bias(query: mx.array, split: BiasSplit, tokens: int) -> mx.array:
    """Return q . R_j b / sqrt(D) for rotated queries (B, H, S, D): (B, H, S, tokens) float32."""
    B, H, S, _ = query.shape
    table = split.rotation[..., :tokens].reshape(2 * len(split.pairs), tokens)
    return (bias_weights(query, split) @ table).reshape(B, H, S, tokens)


def bias_weights(query: mx.array, split: BiasSplit) -> mx.array:
    """Return the factors of a position's cosines and sines in :func:`score_bias`: (B, K, H/K, S, 2P) float32.

    For the elements (q1, q2) and (b1, b2) of a pair, the score is the sum over pairs of
    (q1 b1 + q2 b2) cos + (q2 b1 - q1 b2) sin.
    """
    B, H, S, D = query.shape
    K = split.key_bias.shape[0]
    q = query.astype(mx.float32).reshape(B, K, H // K, S, 2, D // 2)
    q = mx.take(q, mx.array(split.pairs), axis=-1)  # one operation; indexing after an ellipsis takes eleven
    q1 = q[..., 0, :]  # (B, K, H/K, S, P)
    q2 = q[..., 1, :]
    b1, b2 = (split.key_bias[:, i, None, None] for i in (0, 1))  # (K, 1, 1, P)
    return mx.concatenate([q1 * b1 + q2 * b2, q2 * b1 - q1 * b2], axis=-1) / math.sqrt(D)


def rotated_bias(split: BiasSplit, head_dim: int, tokens: int) -> mx.array:
    """Return R_j b for every position j: (K, tokens, D) float32, zero outside the pairs."""
    table = split.rotation[..., :tokens].reshape(2 * len(split.pairs), tokens)
    return table.T @ bias_rows(split, head_dim)


def bias_rows(split: BiasSplit, head_dim: int) -> mx.array:
    """Return the factors of a position's cosines and sines in :func:`rotated_bias`: (K, 2P, D) float32."""
    P = len(split.pairs)
    half = head_dim // 2
    place = mx.zeros((P, half), mx.float32)
    place[mx.arange(P), mx.array(split.pairs)] = 1.0  # pair number -> its element in a half
    b1, b2 = (split.key_bias[:, i, :, None] * place for i in (0, 1))  # (K, P, D/2)
    return mx.concatenate([mx.concatenate([b1, b2], axis=-1), mx.concatenate([-b2, b1], axis=-1)], axis=1)


def value_bias_of(bias_split: BiasSplit, num_heads: int) -> mx.array:
    """Return the values' bias for each query head, (H, 1, D)."""
    bias = bias_split.value_bias  # (K, D)
    return mx.repeat(bias, num_heads // bias.shape[0], axis=0)[:, None]  # (H, 1, D)

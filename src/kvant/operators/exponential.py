"""Faster exponentials on x86 CPUs, where MLX's exp is not vectorized and a power of e takes a third as long.

Measured on a 2-core AMD EPYC with MLX 0.32.4: ``mx.exp`` takes 18 ns per number, ``mx.sigmoid`` 23,
``mx.power`` 6.
"""

import math
import platform
from functools import partial

import mlx.core as mx

# From this many numbers per sequence a softmax of several operations, at 3 to 4 us each, beats MLX's own.
SOFTMAX_FROM = 4096
ONE_BY_ONE = platform.machine().lower() in ("x86_64", "amd64")


def by_powers(x: mx.array) -> bool:
    """Return whether exponentials of these numbers should be computed as powers."""
    return ONE_BY_ONE and x.dtype == mx.float32 and mx.default_device().type == mx.cpu


def silu_times(gate: mx.array, up: mx.array) -> mx.array:
    """Return silu(gate) * up, in one launch on a GPU; silu(x) = x / (1 + exp(-x)). The shapes are equal."""
    if mx.default_device().type == mx.gpu:
        return _swiglu(gate, up)
    if not by_powers(gate):
        return gate * mx.sigmoid(gate) * up
    return gate / (1.0 + mx.power(math.exp(-1), gate)) * up


@partial(mx.compile, shapeless=True)
def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


def softmax_parts(scores: mx.array) -> tuple[mx.array, mx.array | None]:
    """Return softmax weights of scores (B, ..., T) and their sums (B, ..., 1), or None if they sum to 1."""
    if scores.size < len(scores) * SOFTMAX_FROM or not by_powers(scores):
        return mx.softmax(scores, axis=-1), None
    weights = mx.power(math.e, scores - scores.max(axis=-1, keepdims=True))
    return weights, weights @ mx.ones((weights.shape[-1], 1))  # takes half the time of sum


def logsumexp(x: mx.array) -> mx.array:
    """Return log(sum(exp(x))) of each row: (..., N) -> (..., 1)."""
    if x.shape[-1] < SOFTMAX_FROM or not by_powers(x):
        return mx.logsumexp(x, axis=-1, keepdims=True)
    largest = x.max(axis=-1, keepdims=True)
    return largest + mx.log(mx.power(math.e, x - largest).sum(axis=-1, keepdims=True))

"""Rotary positions: a few tokens' products with matrices, and MLX's RoPE, against a float64 oracle."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from support.numbers import normal

from kvant.operators.rotary import Rotary

Array = np.ndarray
HEADS = 3
on_a_cpu = pytest.mark.skipif(
    mx.default_device().type != mx.cpu, reason="a few tokens are turned by matrices on a CPU only"
)


def _heads(head_dim: int, new_tokens: int = 1, batch: int = 2) -> mx.array:
    return normal(head_dim, batch, HEADS, new_tokens, head_dim)


def _turned(heads: mx.array, theta: float, offset: int) -> Array:
    """In float64, pair by pair."""
    x = np.array(heads.astype(mx.float32)).astype(np.float64)
    half = x.shape[-1] // 2
    angle = (offset + np.arange(x.shape[2])[:, None]) * theta ** (-np.arange(half) / half)  # (S, D/2)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=-1
    )


def _check(output: mx.array, heads: mx.array, theta: float, offsets: Sequence[int], roundings: int) -> None:
    """Each sequence against the oracle, each element with a tolerance from the length of its pair.

    A float32 angle is off by some roundings of 2^-24, the frequency's and the product's, and an angle that is
    off turns the pair by as much; no angle is larger than the position. 4 more are for the cosine, products
    and sum.
    """
    assert (output.dtype, output.shape) == (heads.dtype, heads.shape)
    for b, offset in enumerate(offsets):
        expected = _turned(heads[b : b + 1], theta, offset)
        length = np.hypot(*np.split(expected, 2, axis=-1))
        allowed = (
            np.concatenate([length, length], axis=-1)
            * (4 + roundings * (offset + heads.shape[2] - 1))
            * 2**-24
        )
        assert (np.abs(np.array(output[b : b + 1]) - expected) <= allowed).all()


@on_a_cpu
@pytest.mark.parametrize(
    "offset", [0, 1, 37, 4095, 32767, (0, 4095), (37, 1), (9, 9), tuple(range(13))], ids=str
)
@pytest.mark.parametrize("new_tokens", [1, 5, 9])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_heads_are_turned(head_dim: int, new_tokens: int, offset: int | tuple[int, ...]) -> None:
    """One token without MLX's RoPE, whose own frequencies are rounded some more."""
    offsets = offset if isinstance(offset, tuple) else (offset,) * 2
    heads = _heads(head_dim, new_tokens, len(offsets))
    for theta in (1e4, 1e6):
        given = mx.array(offset) if isinstance(offset, tuple) else offset
        rotate = Rotary.plain(head_dim, theta).at(given, new_tokens, mx.float32)
        roundings = 2 if new_tokens == 1 else 6
        _check(rotate(heads), heads, theta, offsets, roundings)
        _check(rotate(heads[:, :1] * 2), heads[:, :1] * 2, theta, offsets, roundings)  # one for all layers


@on_a_cpu
@pytest.mark.parametrize("offset", [0, 4095, (5, 900)], ids=str)
@pytest.mark.parametrize("new_tokens", [2, 5, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_few_tokens_are_turned_as_each_alone(
    head_dim: int, new_tokens: int, offset: int | tuple[int, int]
) -> None:
    """In the same bits: steps that verify drafts give the numbers of plain ones."""
    heads, rotary = _heads(head_dim, new_tokens), Rotary.plain(head_dim, 1e6)
    offsets = mx.array(offset) if isinstance(offset, tuple) else offset
    output = rotary.at(offsets, new_tokens, mx.float32)(heads)
    for i in range(new_tokens):
        alone = rotary.at(offsets + i, 1, mx.float32)(heads[:, :, i : i + 1])
        assert mx.array_equal(output[:, :, i : i + 1], alone)


@pytest.mark.parametrize(("dtype", "bits"), [(mx.float16, 11), (mx.bfloat16, 8)])
def test_one_token_in_half_precision(dtype: mx.Dtype, bits: int) -> None:
    """Each sequence as alone. In a matrix of its dtype the cosines would be rounded as well."""
    heads = _heads(64).astype(dtype)
    output = Rotary.plain(64, 1e6).at(37, 1, dtype)(heads)
    assert output.dtype == dtype
    expected = _turned(heads, 1e6, 37)
    # The cosines, two products and their sum may be rounded to the dtype: 2^-bits each, of elements up to
    # about 4.
    assert (
        np.abs(np.array(output.astype(mx.float32)) - expected).max() < 4 * np.abs(expected).max() * 2.0**-bits
    )
    both = Rotary.plain(64, 1e6).at(mx.array([37, 1]), 1, dtype)(heads)
    assert mx.array_equal(both[:1], output[:1])

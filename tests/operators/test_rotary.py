"""Rotary positions: a few tokens' products with matrices, and MLX's RoPE, against a float64 oracle."""

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
import pytest

from kvant.operators.rotary import Rotary

Array = np.ndarray
BATCH, HEADS = 2, 3
on_a_cpu = pytest.mark.skipif(
    mx.default_device().type != mx.cpu, reason="a few tokens are turned by matrices on a CPU only"
)


def _heads(head_dim: int, new_tokens: int = 1, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal((BATCH, HEADS, new_tokens, head_dim), key=mx.random.key(head_dim)).astype(dtype)


def _turned(heads: mx.array, theta: float, offset: int) -> Array:
    """In float64, pair by pair."""
    x = np.array(heads.astype(mx.float32)).astype(np.float64)
    output = np.empty_like(x)
    head_dim = x.shape[-1]
    for token in range(x.shape[2]):
        for p in range(head_dim // 2):
            angle = (offset + token) * theta ** (-2 * p / head_dim)
            a, b = x[:, :, token, p], x[:, :, token, p + head_dim // 2]
            output[:, :, token, p] = a * np.cos(angle) - b * np.sin(angle)
            output[:, :, token, p + head_dim // 2] = a * np.sin(angle) + b * np.cos(angle)
    return output


def _tolerance(expected: Array, position: int, roundings: int) -> Array:
    """Of each element, from the length of its pair.

    A float32 angle is off by some roundings of 2^-24, the frequency's and the product's, and an angle that is off
    turns the pair by as much; no angle is larger than the position. 4 more are for the cosine, products and sum.
    """
    half = expected.shape[-1] // 2
    length = np.hypot(expected[..., :half], expected[..., half:])
    return np.concatenate([length, length], axis=-1) * (4 + roundings * position) * 2**-24


@pytest.fixture
def rope_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes that MLX's RoPE was called with."""
    calls: list[tuple[int, ...]] = []
    rope: Callable[..., mx.array] = mx.fast.rope

    def record(x: mx.array, *arguments: object, **options: object) -> mx.array:
        calls.append(tuple(x.shape))
        return rope(x, *arguments, **options)

    monkeypatch.setattr(mx.fast, "rope", record)
    return calls


def _check(output: mx.array, heads: mx.array, theta: float, offsets: Sequence[int], roundings: int) -> None:
    """Each sequence against the oracle."""
    assert (output.dtype, output.shape) == (heads.dtype, heads.shape)
    for b, offset in enumerate(offsets):
        expected = _turned(heads[b : b + 1], theta, offset)
        tolerance = _tolerance(expected, offset + heads.shape[2] - 1, roundings)
        assert (np.abs(np.array(output[b : b + 1]) - expected) <= tolerance).all()


@on_a_cpu
@pytest.mark.parametrize("offset", [0, 1, 37, 4095, 32767, (0, 4095), (37, 1), (9, 9)], ids=str)
@pytest.mark.parametrize("new_tokens", [1, 5, 9])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_heads_are_turned(
    rope_calls: list[tuple[int, ...]], head_dim: int, new_tokens: int, offset: int | tuple[int, int]
) -> None:
    """A few tokens without MLX's RoPE, whose own frequencies are rounded some more."""
    heads = _heads(head_dim, new_tokens)
    offsets = offset if isinstance(offset, tuple) else (offset,) * BATCH
    for theta in (1e4, 1e6):
        for form in [mx.array(offset), *([] if isinstance(offset, tuple) else [offset])]:
            rotate = Rotary.plain(head_dim, theta).at(form, new_tokens, mx.float32)
            roundings = 2 if new_tokens == 1 else 6
            _check(rotate(heads), heads, theta, offsets, roundings)
            _check(rotate(heads[:, :1] * 2), heads[:, :1] * 2, theta, offsets, roundings)  # one for all layers
    assert bool(rope_calls) == (new_tokens == 9)


@on_a_cpu
@pytest.mark.parametrize("offset", [0, 4095, (5, 900)], ids=str)
@pytest.mark.parametrize("new_tokens", [2, 5, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_few_tokens_are_turned_as_each_alone(head_dim: int, new_tokens: int, offset: int | tuple[int, int]) -> None:
    """In the same bits: steps that verify drafts give the numbers of plain ones."""
    heads, rotary = _heads(head_dim, new_tokens), Rotary.plain(head_dim, 1e6)
    offsets = mx.array(offset) if isinstance(offset, tuple) else offset
    output = rotary.at(offsets, new_tokens, mx.float32)(heads)
    for i in range(new_tokens):
        alone = rotary.at(offsets + i, 1, mx.float32)(heads[:, :, i : i + 1])
        assert mx.array_equal(output[:, :, i : i + 1], alone)


def test_matrices_of_many_tokens_are_not_made(rope_calls: list[tuple[int, ...]]) -> None:
    """Of 13 sequences of 5: 65 matrices."""
    heads = mx.random.normal((13, HEADS, 5, 64))
    output = Rotary.plain(64, 1e6).at(mx.arange(13), 5, mx.float32)(heads)
    assert len(rope_calls) == 1
    _check(output, heads, 1e6, range(13), 6)


@pytest.mark.parametrize(("dtype", "bits"), [(mx.float16, 11), (mx.bfloat16, 8)])
def test_one_token_in_half_precision(rope_calls: list[tuple[int, ...]], dtype: mx.Dtype, bits: int) -> None:
    """By MLX's RoPE: in a matrix of its dtype the cosines would be rounded as well. Each sequence as alone."""
    heads = _heads(64, dtype=dtype)
    output = Rotary.plain(64, 1e6).at(37, 1, dtype)(heads)
    assert output.dtype == dtype
    assert len(rope_calls) == 1
    expected = _turned(heads, 1e6, 37)
    # The cosines, two products and their sum may be rounded to the dtype: 2^-bits each, of elements up to about 4.
    assert np.abs(np.array(output.astype(mx.float32)) - expected).max() < 4 * np.abs(expected).max() * 2.0**-bits
    both = Rotary.plain(64, 1e6).at(mx.array([37, 1]), 1, dtype)(heads)
    assert mx.array_equal(both[:1], output[:1])


@on_a_cpu
def test_a_position_that_is_not_known_yet() -> None:
    """The decode step is compiled once, with tables that may be made while it is."""
    heads = _heads(64)
    step = mx.compile(lambda x, offset: Rotary.plain(64, 1e6).at(offset, 1, mx.float32)(x))
    for offset in (5, 900):
        _check(step(heads, mx.array(offset)), heads, 1e6, (offset, offset), 2)
    _check(step(heads, mx.array([3, 40])), heads, 1e6, (3, 40), 2)  # traced once more: one position a sequence
    _check(Rotary.plain(64, 1e6).at(7, 1, mx.float32)(heads), heads, 1e6, (7, 7), 2)  # the same tables, now outside

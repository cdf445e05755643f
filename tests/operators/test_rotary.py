"""Rotary positions: a few tokens' products with matrices, and MLX's RoPE, against a float64 oracle."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from kvant.operators.rotary import Rotary

Array = np.ndarray
BATCH, HEADS = 2, 3
OFFSETS = [0, 1, 37, 4095, 32767]
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
def no_rope(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's RoPE is not to be called."""

    def fail(*_: object, **__: object) -> mx.array:
        raise AssertionError("mx.fast.rope was called")

    monkeypatch.setattr(mx.fast, "rope", fail)


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


@on_a_cpu
@pytest.mark.usefixtures("no_rope")
@pytest.mark.parametrize("form", ["int", "array"])
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_one_token(head_dim: int, theta: float, offset: int, form: str) -> None:
    heads = _heads(head_dim)
    rotate = Rotary.plain(head_dim, theta).at(offset if form == "int" else mx.array(offset), 1, mx.float32)
    expected = _turned(heads, theta, offset)
    output = rotate(heads)
    assert (output.dtype, output.shape) == (mx.float32, heads.shape)
    assert (np.abs(np.array(output) - expected) <= _tolerance(expected, offset, 2)).all()
    more = rotate(heads[:, :1] * 2)  # one rotation for all layers, and for queries and keys
    assert (np.abs(np.array(more) - 2 * expected[:, :1]) <= 2 * _tolerance(expected[:, :1], offset, 2)).all()


@pytest.mark.parametrize("form", ["int", "array"])
@pytest.mark.parametrize(("head_dim", "theta", "offset"), [(64, 1e6, 0), (64, 1e4, 37), (128, 1e6, 4095)])
def test_several_tokens(rope_calls: list[tuple[int, ...]], head_dim: int, theta: float, offset: int, form: str) -> None:
    heads = _heads(head_dim, new_tokens=9)
    output = Rotary.plain(head_dim, theta).at(offset if form == "int" else mx.array(offset), 9, mx.float32)(heads)
    expected = _turned(heads, theta, offset)
    assert (np.abs(np.array(output) - expected) <= _tolerance(expected, offset + 8, 6)).all()
    assert rope_calls == [(BATCH, HEADS, 9, head_dim)]


@on_a_cpu
@pytest.mark.usefixtures("no_rope")
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
    for b in (0, 12):
        expected = _turned(heads[b : b + 1], 1e6, b)
        assert (np.abs(np.array(output[b : b + 1]) - expected) <= _tolerance(expected, b + 4, 6)).all()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
@pytest.mark.parametrize("new_tokens", [1, 5])
@pytest.mark.parametrize("offsets", [(0, 4095), (37, 1), (9, 9)])
def test_an_offset_for_each_sequence(offsets: tuple[int, int], new_tokens: int, dtype: mx.Dtype) -> None:
    """Each of the two sequences is turned as it is alone."""
    heads = _heads(64, new_tokens, dtype)
    for theta in (1e4, 1e6):
        output = Rotary.plain(64, theta).at(mx.array(offsets), new_tokens, dtype)(heads)
        assert (output.dtype, output.shape) == (dtype, heads.shape)
        for b, offset in enumerate(offsets):
            expected = _turned(heads[b : b + 1], theta, offset)
            given = np.array(output[b : b + 1].astype(mx.float32))
            if dtype == mx.float32:
                assert (np.abs(given - expected) <= _tolerance(expected, offset + new_tokens - 1, 6)).all()
            else:
                alone = Rotary.plain(64, theta).at(offset, new_tokens, dtype)(heads[b : b + 1])
                assert mx.array_equal(output[b : b + 1], alone).item()


@pytest.mark.parametrize(("dtype", "bits"), [(mx.float16, 11), (mx.bfloat16, 8)])
def test_one_token_in_half_precision(rope_calls: list[tuple[int, ...]], dtype: mx.Dtype, bits: int) -> None:
    """By MLX's RoPE: in a matrix of its dtype the cosines would be rounded as well."""
    heads = _heads(64, dtype=dtype)
    output = Rotary.plain(64, 1e6).at(37, 1, dtype)(heads)
    assert output.dtype == dtype
    assert len(rope_calls) == 1
    expected = _turned(heads, 1e6, 37)
    # The cosines, two products and their sum may be rounded to the dtype: 2^-bits each, of elements up to about 4.
    assert np.abs(np.array(output.astype(mx.float32)) - expected).max() < 4 * np.abs(expected).max() * 2.0**-bits


@on_a_cpu
def test_a_position_that_is_not_known_yet() -> None:
    """The decode step is compiled once, with tables that may be made while it is."""
    heads = _heads(64)
    step = mx.compile(lambda x, offset: Rotary.plain(64, 1e6).at(offset, 1, mx.float32)(x))
    for offset in (5, 900):
        expected = _turned(heads, 1e6, offset)
        assert (np.abs(np.array(step(heads, mx.array(offset))) - expected) <= _tolerance(expected, offset, 2)).all()
    several = step(heads, mx.array([3, 40]))  # traced once more: one position a sequence
    for b, offset in enumerate((3, 40)):
        expected = _turned(heads[b : b + 1], 1e6, offset)
        assert (np.abs(np.array(several[b : b + 1]) - expected) <= _tolerance(expected, offset, 2)).all()
    expected = _turned(heads, 1e6, 7)  # with the same tables, now outside
    output = Rotary.plain(64, 1e6).at(7, 1, mx.float32)(heads)
    assert (np.abs(np.array(output) - expected) <= _tolerance(expected, 7, 2)).all()

"""Exponentials by powers and by MLX's own operations, against float64."""

import math

import mlx.core as mx
import numpy as np
import pytest

from kvant.operators import exponential
from kvant.operators.exponential import SOFTMAX_FROM, logsumexp, silu_times, softmax_parts

Array = np.ndarray
# Powers of e are off by the rounding of e, 3e-8 of the exponent, and half a last digit; so are MLX's own.
TOLERANCE = 4e-6


@pytest.fixture(params=[True, False], ids=["one by one", "in groups"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exponential, "ONE_BY_ONE", request.param)


def _numbers(*shape: int, size: float) -> Array:
    return (np.random.default_rng(shape[-1]).standard_normal(shape) * size).astype(np.float32)


@pytest.mark.parametrize("size", [1e-3, 1.0, 8.0, 60.0])
@pytest.mark.parametrize("shape", [(7,), (3, 5, 640)])
def test_silu(shape: tuple[int, ...], size: float) -> None:
    gate, up = _numbers(*shape, size=size), _numbers(*shape, size=2.0) + 3
    output = silu_times(mx.array(gate), mx.array(up))
    wide = gate.astype(np.float64)
    # Below -87 exp(-x) is infinite in float32 and the result 0; it is less than 1e-36 then.
    np.testing.assert_allclose(
        np.array(output), wide * up / (1 + np.exp(-wide)), rtol=TOLERANCE * 5, atol=1e-35
    )


def test_silu_of_extremes() -> None:
    found = silu_times(mx.array([-1e30, -200.0, 0.0, 200.0, 1e30, math.inf, math.nan]), mx.ones(7)).tolist()
    assert found[:6] == [0.0, 0.0, 0.0, 200.0, pytest.approx(1e30), math.inf]
    assert math.isnan(found[6])


@pytest.mark.parametrize("size", [0.1, 3.0, 100.0])
@pytest.mark.parametrize("tokens", [1, 40, SOFTMAX_FROM])
def test_softmax(tokens: int, size: float) -> None:
    scores = _numbers(2, 3, tokens, size=size)
    scores[..., 1::3] = -np.inf
    weights, sums = softmax_parts(mx.array(scores))
    assert (sums is None) == (tokens < SOFTMAX_FROM / 3 or not exponential.by_powers(weights))
    powers = np.exp(scores.astype(np.float64) - scores.max(axis=-1, keepdims=True))
    expected = powers / powers.sum(axis=-1, keepdims=True)
    found = np.array(weights if sums is None else weights / sums)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE * 5, atol=1e-7)


def test_a_sequence_is_the_same_in_a_batch() -> None:
    """Its own numbers decide how they are computed."""
    for tokens in (SOFTMAX_FROM // 8, SOFTMAX_FROM // 4, SOFTMAX_FROM):
        scores = mx.array(_numbers(5, 4, tokens, size=3.0))
        (weights, sums), (own, own_sums) = softmax_parts(scores), softmax_parts(scores[2:3])
        assert (sums is None) == (own_sums is None)
        assert mx.array_equal(weights[2:3], own)
        assert mx.array_equal(logsumexp(scores)[2:3], logsumexp(scores[2:3]))


@pytest.mark.parametrize("numbers", [5, SOFTMAX_FROM, 150_000])
def test_logsumexp(numbers: int) -> None:
    x = _numbers(3, numbers, size=5.0) + np.array([[0.0], [1e4], [-1e4]], np.float32)
    x[0, 1::2] = -np.inf
    wide = x.astype(np.float64)
    largest = wide.max(axis=-1, keepdims=True)
    expected = largest + np.log(np.exp(wide - largest).sum(axis=-1, keepdims=True))
    np.testing.assert_allclose(np.array(logsumexp(mx.array(x))), expected, rtol=TOLERANCE, atol=1e-5)

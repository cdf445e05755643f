"""Root mean square normalization of one token and of many, against float64."""

import mlx.core as mx
import numpy as np
import pytest

from kvant.operators.normalization import rms_norm

Array = np.ndarray
TOLERANCE = 2e-6  # relative: the mean of up to 896 squares, a reciprocal root and two products in float32
EPS = 1e-6
on_a_cpu = pytest.mark.skipif(mx.default_device().type != mx.cpu, reason="the same bits are of a CPU only")
SHAPES = [
    (1, 1, 256),
    (3, 1, 256),
    (3, 6, 1, 64),
    (1, 1, 1),
    (1, 1, 897),
    (1, 256),
    (1, 5, 256),
    (3, 40, 896),
]
SIZES = [
    *((size, EPS) for size in (0.0, 1e-15, 1e-6, 1e-3, 1.0, 1e3, 1e15)),
    *((eps**0.5, eps) for eps in (1e-12, 0.1)),
]


def _inputs(shape: tuple[int, ...], size: float = 1.0) -> tuple[Array, Array]:
    rng = np.random.default_rng(shape[-1])
    x = rng.standard_normal(shape) * size * rng.uniform(0.5, 2, (*shape[:-1], 1))
    return x.astype(np.float32), rng.uniform(-2, 2, shape[-1]).astype(np.float32)


def _normalized(x: Array, weight: Array, eps: float) -> Array:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize(("size", "eps"), SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_any_size(shape: tuple[int, ...], size: float, eps: float) -> None:
    """Where the mean square is about eps, an output without it, or with it outside the root, would be far
    off.
    """
    x, weight = _inputs(shape, size)
    output, expected = rms_norm(mx.array(x), mx.array(weight), eps), _normalized(x, weight, eps)
    assert output.dtype == mx.float32
    np.testing.assert_allclose(np.array(output), expected, rtol=TOLERANCE, atol=0)
    assert output.shape == x.shape
    if len(shape) > 2:  # heads before they are normalized are a transposed view
        turned = rms_norm(mx.array(x.swapaxes(-3, -2).copy()).swapaxes(-3, -2), mx.array(weight), eps)
        np.testing.assert_allclose(np.array(turned), expected, rtol=TOLERANCE, atol=0)


@on_a_cpu
@pytest.mark.parametrize("shape", [(1, 8, 256), (3, 2, 897), (2, 4, 5, 64)])
def test_a_few_rows_are_as_each_alone(shape: tuple[int, ...]) -> None:
    """In the same bits: steps that verify drafts give the numbers of plain ones."""
    x, weight = (mx.array(a) for a in _inputs(shape))
    output = rms_norm(x, weight, EPS)
    for i in range(shape[-2]):
        assert mx.array_equal(output[..., i : i + 1, :], rms_norm(x[..., i : i + 1, :], weight, EPS))


@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float16, 2**-9), (mx.bfloat16, 2**-6)])
@pytest.mark.parametrize("shape", [(1, 1, 256), (1, 5, 256)])
def test_half_precision(shape: tuple[int, ...], dtype: mx.Dtype, tolerance: float) -> None:
    """Squares of 300 are past float16; they are taken in float32."""
    x, weight = (mx.array(a).astype(dtype) for a in _inputs(shape, 300.0))
    output = rms_norm(x, weight, EPS)
    assert output.dtype == dtype
    wide = [np.array(a.astype(mx.float32)) for a in (x, weight)]
    expected = _normalized(*wide, EPS)
    # 2^-24 is the least float16
    np.testing.assert_allclose(np.array(output.astype(mx.float32)), expected, rtol=tolerance, atol=2**-24)

"""The kernel that quantizes and packs new tokens, run on the host, against the operator it stands in for."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support import oracle
from support.kernel_cases import FORMATS, kernels_on_host
from support.metal_host import host_pytest_skip
from support.operator_cases import FLOATS, to_mx
from support.oracle import Array

from kvant.operators.cached_attention import stored_tokens
from kvant.operators.quantization import quantize, quantized_dtype

pytestmark = host_pytest_skip

QUANTIZED = [(bits, group) for bits, group in FORMATS if bits]


def append(
    key: mx.array, value: mx.array, *, quant_bit: int, quant_group: int, scale_dtype: str = "float16"
) -> tuple[mx.array, mx.array]:
    arrays = [mx.zeros(0, quantized_dtype(quant_bit)), mx.zeros(0, getattr(mx, scale_dtype))]
    with kernels_on_host():
        quantized, scale = stored_tokens(
            key, value, arrays, quant_bit=quant_bit, quant_group=quant_group, backend="metal"
        )
    return quantized, scale


def unfused(
    key: mx.array, value: mx.array, *, quant_bit: int, quant_group: int, scale_dtype: str = "float16"
) -> tuple[mx.array, mx.array]:
    if key.shape == value.shape:
        both = mx.stack([key, value], axis=1)  # (B, 2, K, S, D)
    else:
        both = mx.concatenate([key, value], axis=-1)[:, None]  # (B, 1, K, S, D + Dv)
    return quantize(both, quant_bit=quant_bit, quant_group=quant_group, scale_dtype=getattr(mx, scale_dtype))


def unit(rng: np.random.Generator, shape: tuple[int, ...], bits: int, group: int) -> Array:
    return rng.standard_normal(shape)


def ties(rng: np.random.Generator, shape: tuple[int, ...], bits: int, group: int) -> Array:
    """With one element at the limit the scale is 1 and every other half is a tie."""
    limit = oracle.max_quantized(bits)
    x = rng.integers(-2 * limit, 2 * limit + 1, shape) / 2
    x[..., ::group] = limit
    return x


def tiny(rng: np.random.Generator, shape: tuple[int, ...], bits: int, group: int) -> Array:
    """About the least scale, zeros among them."""
    return rng.standard_normal(shape) * 1e-3 * rng.choice([0, 1e-3, 0.1, 1.0], (*shape[:-1], 1))


def large(rng: np.random.Generator, shape: tuple[int, ...], bits: int, group: int) -> Array:
    return np.clip(rng.standard_normal(shape) * 1e4, -6e4, 6e4)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("bits", "group"), QUANTIZED)
def test_values_and_scales_are_the_operator_s_to_the_bit(bits: int, group: int, dtype: str) -> None:
    """In float32 and, MLX rounding a half-precision quotient as the kernel does, in the others too."""
    rng = np.random.default_rng(bits * group + FLOATS.index(dtype))
    data: list[Callable[..., Array]] = [unit, ties, tiny, large]
    D, Dv = (group * int(rng.integers(1, 1 + 640 // group)) for _ in range(2))
    scale_dtype = str(rng.choice(["float32", "float16"]))
    for make in data:
        B, K, S = [int(rng.integers(1, top)) for top in (4, 4, 9)]
        key, value = (
            to_mx(oracle.cast(make(rng, (B, K, S, width), bits, group), dtype), dtype)
            for width in (D, Dv if make in (ties, large) else D)
        )
        options: dict[str, Any] = {"quant_bit": bits, "quant_group": group, "scale_dtype": scale_dtype}
        quantized, scale = append(key, value, **options)
        wanted_quantized, wanted_scale = unfused(key, value, **options)
        assert (quantized.shape, quantized.dtype) == (wanted_quantized.shape, wanted_quantized.dtype), make.__name__
        assert (scale.shape, scale.dtype) == (wanted_scale.shape, wanted_scale.dtype), make.__name__
        np.testing.assert_array_equal(np.array(scale), np.array(wanted_scale), err_msg=make.__name__)
        np.testing.assert_array_equal(np.array(quantized), np.array(wanted_quantized), err_msg=make.__name__)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_not_hidden(bad: float, bits: int, dtype: str) -> None:
    """A NaN anywhere in a group makes its scale NaN, an infinity infinite, as the operator's; no other's."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((1, 2, 1, 64))
    for place in (0, 17, 63):
        given = x.copy()
        given[0, 1, 0, place] = bad
        key = to_mx(given.astype(np.float32), dtype)
        _, scale = append(key, key, quant_bit=bits, quant_group=32)
        _, wanted = unfused(key, key, quant_bit=bits, quant_group=32)
        np.testing.assert_array_equal(np.array(scale), np.array(wanted))
        assert not np.isfinite(np.array(scale)[0, :, 1, 0, place // 32]).any()

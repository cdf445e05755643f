"""The kernel that quantizes and packs new tokens, run on the host, against the operator it stands in for."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.kernel_cases import FORMATS, kernels_on_host
from support.metal_host import host_pytest_skip
from support.operator_cases import FLOATS, to_mx
from support.oracle import Array, Spec
from support.pmx_cases import draw_values

from kvant.operators.cached_attention import stored_tokens
from kvant.operators.quantization import quantize, quantized_dtype

pytestmark = host_pytest_skip


def check(key: mx.array, value: mx.array, scale_dtype: str = "float16", **options: Any) -> tuple[mx.array, mx.array]:
    """What the kernel stores is the operator's to the bit. Values beside a NaN or an infinity are anything."""
    dtype = getattr(mx, scale_dtype)
    arrays = [mx.zeros(0, quantized_dtype(options["quant_bit"])), mx.zeros(0, dtype)]
    with kernels_on_host():
        stored = stored_tokens(key, value, arrays, **options, backend="metal")
    if key.shape == value.shape:
        both = mx.stack([key, value], axis=1)  # (B, 2, K, S, D)
    else:
        both = mx.concatenate([key, value], axis=-1)[:, None]  # (B, 1, K, S, D + Dv)
    wanted = quantize(both, **options, scale_dtype=dtype)
    assert [(x.shape, x.dtype) for x in stored] == [(x.shape, x.dtype) for x in wanted]
    np.testing.assert_array_equal(np.array(stored[1]), np.array(wanted[1]))
    if np.isfinite(np.array(wanted[1])).all():
        np.testing.assert_array_equal(np.array(stored[0]), np.array(wanted[0]))
    return stored


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("bits", "group"), [own for own in FORMATS if own[0]])
def test_values_and_scales_are_the_operator_s_to_the_bit(bits: int, group: int, dtype: str) -> None:
    """In float32 and, MLX rounding a half-precision quotient as the kernel does, in the others too."""
    rng = np.random.default_rng(bits * group + FLOATS.index(dtype))
    D, Dv = (group * int(rng.integers(1, 1 + 640 // group)) for _ in range(2))
    spec, scale_dtype = Spec(dtype, quant_bit=bits, quant_group=group), str(rng.choice(["float32", "float16"]))
    for data in ("unit", "ties", "tiny", "zeros", "large"):
        shape = [int(rng.integers(1, top)) for top in (4, 4, 9)]  # B, K, S
        widths = (D, Dv if data in ("ties", "large") else D)
        key, value = (to_mx(draw_values(rng, (*shape, width), data, spec), dtype) for width in widths)
        check(key, value, scale_dtype, quant_bit=bits, quant_group=group)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_not_hidden(bad: float, bits: int, dtype: str) -> None:
    """A NaN anywhere in a group makes its scale NaN, an infinity infinite, as the operator's; no other's."""
    x: Array = np.random.default_rng(3).standard_normal((1, 2, 1, 64)).astype(np.float32)
    for place in (0, 17, 63):
        given = x.copy()
        given[0, 1, 0, place] = bad
        key = to_mx(given, dtype)
        _, scale = check(key, key, quant_bit=bits, quant_group=32)
        assert np.isfinite(np.array(scale)).sum() == 8 - 2
        assert not np.isfinite(np.array(scale)[0, :, 1, 0, place // 32]).any()

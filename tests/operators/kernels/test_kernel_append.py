"""The kernel that quantizes and packs new tokens, run on the host, against the operator it stands in for."""

import numpy as np
import pytest
from support.kernel_cases import FORMATS, check_append
from support.metal_host import host_pytest_skip
from support.operator_cases import FLOATS, to_mx
from support.oracle import Array, Spec
from support.pmx_cases import draw_values

pytestmark = host_pytest_skip


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
        check_append(key, value, scale_dtype, quant_bit=bits, quant_group=group)


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
        _, scale = check_append(key, key, quant_bit=bits, quant_group=32)
        assert np.isfinite(np.array(scale)).sum() == 8 - 2
        assert not np.isfinite(np.array(scale)[0, :, 1, 0, place // 32]).any()

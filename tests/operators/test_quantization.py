"""The quantizer against the oracle, its laws, and its limits: the largest value, and every byte."""

import mlx.core as mx
import numpy as np
import pytest
from support import oracle
from support.operator_cases import FLOATS, QuantizedTally, check_returned, to_mx, to_numpy
from support.oracle import Array, Spec
from support.pmx_cases import draw_values

from kvant.operators import dequantize, quantize
from kvant.operators.packing import PACKINGS, stored_width
from kvant.operators.quantization import quantize_fitted

BITS = (8, 4)


def _quantized(x: mx.array, quant_bit: int, quant_group: int) -> Array:
    quantized, _ = quantize(x, quant_bit=quant_bit, quant_group=quant_group)
    return oracle.unpack_nibbles(np.array(quantized)) if quant_bit == 4 else np.array(quantized)


@pytest.mark.parametrize("quant_bit", BITS)
def test_float32_needs_no_clip(quant_bit: int) -> None:
    """A value past the top would wrap. In a group of one the quotient is the top value but for rounding."""
    rng, top = np.random.default_rng(quant_bit), oracle.max_quantized(quant_bit)
    x = rng.standard_normal((100_000, 8)) * 10.0 ** rng.uniform(-8, 30, (100_000, 1))
    quantized = _quantized(mx.array(x.astype(np.float32)), quant_bit, 8)
    assert np.abs(quantized.astype(np.int16)).max() == top
    assert (np.sign(quantized) * np.sign(x) >= 0).all()
    one_to_two = np.arange(0x3F800000, 0x40000000, 128, np.uint32).view(np.float32)
    for size in (1.0, 2.0**126, 2.0**-9):
        x = one_to_two * np.float32(size)
        quantized = _quantized(mx.array(np.stack([x, -x], axis=-1)), quant_bit, 1)
        np.testing.assert_array_equal(quantized, np.broadcast_to([top, -top], quantized.shape))


@pytest.mark.parametrize("bits", PACKINGS)
def test_the_stored_width_is_the_packings(bits: int) -> None:
    assert PACKINGS[bits].pack(mx.zeros((3, 2, 32))).shape == (3, stored_width(64, bits))
    assert stored_width(64, 0) == 64


def test_bfloat16_is_clipped() -> None:
    """1.375 / 127 rounds down to bfloat16 so far that 1.375 is 128 of it, which is -128 in int8."""
    x = mx.array([[1.375, -1.375]], mx.bfloat16)
    scale = (mx.array(1.375, mx.bfloat16) / mx.array(127, mx.bfloat16)).astype(mx.float32).item()
    assert np.rint(oracle.cast(np.array(1.375 / scale), "bfloat16")) == 128  # or this test would show nothing
    assert _quantized(x, 8, 2).tolist() == [[127, -127]]
    every = mx.array(np.arange(0x3F80, 0x4000, dtype=np.uint16)).view(mx.bfloat16)[:, None]  # from 1 to 2
    assert (_quantized(every, 8, 1) >= 126).all()


@pytest.mark.parametrize("leading", [(), (3,), (2, 1, 3)])
def test_every_byte_is_two_values(leading: tuple[int, ...]) -> None:
    """-8, which no quantizer here makes, among them; also of a view that is not contiguous."""
    packed = np.broadcast_to(np.random.default_rng(0).permutation(256).astype(np.uint8), (*leading, 256))
    scale = mx.ones((*leading, 64))
    values = dequantize(mx.array(packed), scale, quant_bit=4, quant_group=8)
    np.testing.assert_array_equal(to_numpy(values), oracle.unpack_nibbles(packed).astype(np.float32))
    if leading:
        turned = mx.array(np.ascontiguousarray(packed.swapaxes(0, -1))).swapaxes(0, -1)
        np.testing.assert_array_equal(
            to_numpy(dequantize(turned, scale, quant_bit=4, quant_group=8)), to_numpy(values)
        )


@pytest.mark.parametrize("quant_bit", BITS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_against_the_oracle(dtype: str, quant_bit: int) -> None:
    """Bare quantize and dequantize; of a scale in bfloat16 too, which a cache does not have."""
    tally, rng = QuantizedTally(), np.random.default_rng(quant_bit)
    for data in ("unit", "ties", "tiny", "zeros", "large"):
        for scale_dtype, group in ((None, 8), ("float32", 3), ("float16", 16)):
            spec = Spec(dtype, "", scale_dtype or dtype, quant_bit=quant_bit, quant_group=group)
            x = draw_values(rng, (3, 5, 2 * group), data, spec)
            options = {"quant_bit": quant_bit, "quant_group": group}
            stored = quantize(
                to_mx(x, dtype),
                scale_dtype=None if scale_dtype is None else getattr(mx, scale_dtype),
                **options,
            )
            levels, scale = map(to_numpy, stored)
            expected, expected_scale = oracle.quantize(x, spec)
            both = [oracle.unpack_nibbles(a) if quant_bit == 4 else a for a in (levels, expected)]
            tally.compare(*both, dtype)
            check_returned(stored[1], expected_scale, scale_dtype or dtype, "scale")
            restored = dequantize(*stored, dtype=getattr(mx, dtype), **options)
            check_returned(restored, oracle.dequantize(levels, scale, spec), dtype, "dequantized")
    tally.check()


@pytest.mark.parametrize("dtype", FLOATS)
def test_4_bits_that_are_fitted(dtype: str) -> None:
    """They are the oracle's; NumPy's least squares finds the same scales; squared errors are a fifth less."""
    x = np.random.default_rng(5).standard_normal((400, 4, 32)).astype(np.float32)
    x[0] = 0.0
    x[1] = 1e-9
    x[2, 0, 5:] = 0.0
    given = to_mx(x.reshape(400, 128), dtype)
    x = to_numpy(given).astype(np.float32)
    levels, scale = quantize_fitted(given, 32, mx.float32)
    expected, expected_scale = oracle.quantize(
        x, Spec(quant_bit=4, quant_group=32, scale_dtype="float32"), fit=True
    )
    np.testing.assert_array_equal(np.array(levels), expected)
    oracle.check_scales(np.array(scale), expected_scale, fit=True)
    assert set(oracle.unpack_nibbles(np.array(levels)).flatten().tolist()) == set(range(-8, 8))
    half = quantize_fitted(given, 32, mx.float16)
    assert mx.array_equal(half[0], levels)
    assert mx.array_equal(half[1], scale.astype(mx.float16))
    groups = x.reshape(400, 4, 32).astype(np.float64)
    q = oracle.unpack_nibbles(np.array(levels)).astype(np.float64).reshape(groups.shape)
    best = [np.linalg.lstsq(b[:, None], a, rcond=None)[0][0] for a, b in zip(groups[2], q[2], strict=True)]
    np.testing.assert_allclose(np.array(scale)[2], best, rtol=1e-5)
    form = {"quant_bit": 4, "quant_group": 32}
    plain = quantize(mx.array(x), **form)
    restored = [to_numpy(dequantize(*found, **form)) for found in ((levels, scale), plain)]
    errors = [np.square(each - x).sum() for each in restored]
    assert errors[0] < 0.8 * errors[1]

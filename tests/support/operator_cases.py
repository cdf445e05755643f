"""Between NumPy and MLX, and the comparators that hold results of operators against the oracle."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from support import oracle
from support.oracle import Array, Spec

# Attention outputs against float64, relative to values of unit scale: a few roundings of the output's own
# dtype.
OUTPUT_TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
# A stored scale against the oracle's, relative: exact in float32, elsewhere one rounding.
SCALE_TOLERANCE = {"float32": 0.0, "float16": 2**-10, "bfloat16": 2**-7}
# The share of quantized values that may be off by one. Exact in float32.
QUANTIZED_TOLERANCE = {"float32": 0.0, "float16": 0.003, "bfloat16": 0.003}

FLOATS = ("float32", "float16", "bfloat16")
POISON_INT8 = -128  # no quantizer here makes it
POISON_BYTE = 0x88  # two values of -8, which no quantizer here makes


def to_mx(x: Array, dtype: str) -> mx.array:
    return mx.array(x).astype(getattr(mx, dtype))


def to_numpy(x: mx.array) -> Array:
    """bfloat16 becomes float32, as the oracle holds it."""
    return np.array(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x)


def dtype_name(x: mx.array) -> str:
    return str(x.dtype).rpartition(".")[2]


def random_mask(rng: np.random.Generator, shape: tuple[int, ...], kind: str, dtype: str = "float32") -> Array:
    """Most queries keep most keys and some none. kind: bool, or float, which is added to the scores."""
    keep = rng.random(shape) > 0.3
    keep[rng.random(shape[:-1]) < 0.15] = False
    return keep if kind == "bool" else oracle.cast(np.where(keep, rng.standard_normal(shape), -np.inf), dtype)


def same_bits(a: Array, b: Array) -> bool:
    """Equality in which a NaN equals the same NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def poisoned(shape: tuple[int, ...], dtype: str) -> Array:
    """An array in which every element is one that must not be read."""
    if dtype == "int8":
        return np.full(shape, POISON_INT8, np.int8)
    if dtype == "uint8":
        return np.full(shape, POISON_BYTE, np.uint8)
    return np.full(shape, np.nan, np.float16 if dtype == "float16" else np.float32)


Written = Callable[[Array], list[Array]]  # the views of a cache, or of a scale, that a call writes


class QuantizedTally:
    """Counts values that are off by one over many cases. In one small case a single flip is a large share."""

    def __init__(self) -> None:
        self.seen = dict.fromkeys(QUANTIZED_TOLERANCE, 0)
        self.off = dict.fromkeys(QUANTIZED_TOLERANCE, 0)

    def compare(self, actual: Array, expected: Array, dtype: str) -> None:
        difference = np.abs(actual.astype(np.int16) - expected.astype(np.int16))
        assert difference.max(initial=0) <= 1, f"a quantized value is off by {difference.max()}"
        self.seen[dtype] += difference.size
        self.off[dtype] += int(difference.sum())
        if QUANTIZED_TOLERANCE[dtype] == 0.0:
            assert not difference.any(), (
                f"{int(difference.sum())} of {difference.size} values differ in {dtype}"
            )

    def check(self) -> None:
        for dtype, share in QUANTIZED_TOLERANCE.items():
            off, seen = self.off[dtype], self.seen[dtype]
            assert off <= share * seen, (
                f"{off} of {seen} values from {dtype} differ by one, allowed {share:.1%}"
            )


def check_stored(
    actual: tuple[mx.array, mx.array | None],
    expected: tuple[Array, Array | None],
    spec: Spec,
    written: Written,
    tally: QuantizedTally,
) -> None:
    """The whole cache and the whole scale after a call: all but the tokens that it writes holds the bits
    it held.
    """
    assert (actual[1] is None) == (expected[1] is None)
    kinds = (spec.cache_dtype, spec.scale_dtype)
    for what, array, wanted, dtype in zip(("cache", "scale"), actual, expected, kinds, strict=True):
        if array is None or wanted is None:
            continue
        assert dtype_name(array) == dtype, f"the {what} changed its dtype"
        found, rest = to_numpy(array), wanted.copy()
        if spec.quant_bit:
            for own, theirs in zip(written(found), written(rest), strict=True):
                if what == "cache":
                    both = [oracle.unpack_nibbles(x) if spec.quant_bit == 4 else x for x in (own, theirs)]
                    tally.compare(*both, spec.dtype)
                else:
                    check_scale(own, theirs, spec.dtype)
                theirs[...] = own
        assert same_bits(found, rest), (
            f"{what}: something but the new tokens changed, or they are not the current ones"
        )


def check_scale(actual: Array, expected: Array, dtype: str) -> None:
    # 1e-5 is subnormal in float16: one rounding there is 2^-24
    least = 6e-8 if SCALE_TOLERANCE[dtype] else 0.0
    tolerance = {"rtol": SCALE_TOLERANCE[dtype], "atol": least, "equal_nan": False}
    both = (x.astype(np.float64) for x in (actual, expected))
    np.testing.assert_allclose(*both, **tolerance, err_msg="stored scale")


def check_returned(actual: mx.array, expected: Array, dtype: str, what: str) -> None:
    """Dequantized tokens: every rounding is specified, so every bit is."""
    assert dtype_name(actual) == dtype, f"{what} has dtype {dtype_name(actual)}, not {dtype}"
    np.testing.assert_array_equal(to_numpy(actual), expected, err_msg=what, strict=True)


def check_output(actual: mx.array, expected: Array, dtype: str) -> None:
    """An attention output: finite, of the query's dtype, and near float64's."""
    assert dtype_name(actual) == dtype, f"the output has dtype {dtype_name(actual)}, not {dtype}"
    output = to_numpy(actual).astype(np.float64)
    assert output.shape == expected.shape, f"the output has shape {output.shape}, not {expected.shape}"
    assert np.isfinite(output).all(), "the output is not finite: poison or an overflow came through"
    tolerance = OUTPUT_TOLERANCE[dtype]
    np.testing.assert_allclose(output, expected, rtol=tolerance, atol=tolerance, err_msg="attention output")

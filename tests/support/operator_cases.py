"""Seeded cases over the operators' whole parameter space, and the comparators that hold results against the oracle.

B batch, S new tokens, T cached tokens read, H query heads, K kv heads, D head_dim, G group size, L layers.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import mlx.core as mx
import numpy as np

from support import oracle
from support.oracle import Array, Spec

# Attention outputs against float64, relative to values of unit scale: a few roundings of the output's own dtype.
OUTPUT_TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
# A stored scale against the oracle's, relative: exact in float32, elsewhere one rounding.
SCALE_TOLERANCE = {"float32": 0.0, "float16": 2**-10, "bfloat16": 2**-7}
# The share of quantized values that may be off by one. Exact in float32.
QUANTIZED_TOLERANCE = {"float32": 0.0, "float16": 0.003, "bfloat16": 0.003}

AnyCase = TypeVar("AnyCase")
FLOATS = ("float32", "float16", "bfloat16")
POISON_INT8 = -128  # no quantizer here makes it
POISON_BYTE = 0x88  # two values of -8, which no quantizer here makes


# ---- between NumPy and MLX -------------------------------------------------------------------------------------------


def to_mx(x: Array, dtype: str) -> mx.array:
    return mx.array(x).astype(getattr(mx, dtype))


def to_numpy(x: mx.array) -> Array:
    """bfloat16 becomes float32, as the oracle holds it."""
    return np.array(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x)


def dtype_name(x: mx.array) -> str:
    return str(x.dtype).rpartition(".")[2]


def same_bits(a: Array, b: Array) -> bool:
    """Equality in which a NaN equals the same NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


# ---- cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """One call. It prints as what a failure message needs; its arrays come from its seed."""

    seed: int
    batch: int
    new_tokens: int
    start_pos: int
    start_form: str  # how start_pos is passed: "int", or a dtype and a shape
    max_batch: int
    max_seq_len: int
    num_kv_heads: int
    head_dim: int
    data: str  # what the values are like
    strided: bool  # the inputs are transposed views
    spec: Spec
    # key_value_cache only
    num_repeat: int = 1
    # attention only
    num_heads: int = 1
    is_causal: bool = False
    is_alibi: bool = False
    mask: str = "none"  # none, empty, float, bool
    mask_rank: int = 2
    mask_batch: int = 1
    mask_padding: int = 0
    mask_dtype: str = "float32"

    @property
    def num_keys(self) -> int:
        return self.start_pos + self.new_tokens

    @property
    def options(self) -> dict[str, Any]:
        """The keywords that both operators take."""
        spec = self.spec
        return {
            "num_layer": spec.num_layer,
            "layer_idx": spec.layer_idx,
            "quant_bit": spec.quant_bit,
            "quant_group": spec.quant_group,
            "cache_layout": spec.cache_layout,
        }

    @property
    def attention_options(self) -> dict[str, Any]:
        num_kv_heads = 0 if self.num_kv_heads == self.num_heads and self.seed % 2 else self.num_kv_heads
        heads = {"num_heads": self.num_heads, "num_kv_heads": num_kv_heads, "head_dim": self.head_dim}
        return {**self.options, **heads, "is_causal": self.is_causal, "is_alibi": self.is_alibi}

    def start(self, start_pos: int | None = None) -> int | mx.array:
        """start_pos in the form in which this case passes it."""
        position = self.start_pos if start_pos is None else start_pos
        if self.start_form == "int":
            return position
        dtype, rank = self.start_form.split(":")
        return mx.array(position, dtype=getattr(mx, dtype)).reshape([1] * int(rank))


def draw_spec(rng: np.random.Generator) -> tuple[Spec, int]:
    """A cache's format and the head_dim it is for."""
    quant_bit = int(rng.choice([0, 8, 4]))
    head_dim = int(rng.choice([1, 2, 3, 5, 6, 8, 12, 16, 20, 32, 64, 128]))
    if quant_bit == 4:
        head_dim += head_dim % 2
    groups = [g for g in range(1, head_dim + 1) if head_dim % g == 0]
    dtype = str(rng.choice(FLOATS))
    cache_dtype = {0: str(rng.choice(FLOATS)), 8: "int8", 4: "uint8"}[quant_bit]
    num_layer = int(rng.integers(1, 4))
    spec = Spec(
        dtype=dtype,
        cache_dtype=cache_dtype,
        scale_dtype=str(rng.choice(["float32", "float16"])),
        num_layer=num_layer,
        layer_idx=int(rng.integers(num_layer)),
        quant_bit=quant_bit,
        quant_group=int(rng.choice(groups)),
        cache_layout=int(rng.integers(2)),
    )
    return spec, head_dim


def draw_base(rng: np.random.Generator, seed: int) -> dict[str, Any]:
    spec, head_dim = draw_spec(rng)
    batch = int(rng.integers(1, 4))
    new_tokens = int(rng.choice([1, 1, 1, 2, 3, 5, 8]))
    start_pos = int(rng.choice([0, 0, 1, 2, 5, 9]))
    forms = ["int", "int", "int32:0", "int32:1", "int64:0", "uint32:1", "int8:1", "uint16:0"]
    return {
        "seed": seed,
        "batch": batch,
        "new_tokens": new_tokens,
        "start_pos": start_pos,
        "start_form": str(rng.choice(forms)),
        "max_batch": batch + int(rng.integers(3)),
        "max_seq_len": start_pos + new_tokens + int(rng.choice([0, 1, 6])),
        "num_kv_heads": int(rng.integers(1, 4)),
        "head_dim": head_dim,
        "strided": bool(rng.integers(2)),
        "spec": spec,
    }


def draw_cache_case(seed: int) -> Case:
    """A call of key_value_cache; one in sixteen of those without quantization stores int8 unchanged."""
    rng = np.random.default_rng(seed)
    base = draw_base(rng, seed)
    base["data"] = str(rng.choice(["unit", "unit", "ties", "tiny", "zeros", "large"]))
    base["num_repeat"] = int(rng.choice([1, 1, 2, 3]))
    if base["spec"].quant_bit == 0 and rng.integers(16) == 0:
        base["spec"] = base["spec"]._replace(dtype="int8", cache_dtype="int8")
        base["data"] = "int8"
    return Case(**base)


def draw_attention_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    base = draw_base(rng, seed)
    mask = str(rng.choice(["none", "none", "empty", "float", "float", "bool"]))
    return Case(
        **base,
        data=str(rng.choice(["unit", "unit", "unit", "zeros"])),
        num_heads=base["num_kv_heads"] * int(rng.integers(1, 5)),
        is_causal=bool(rng.integers(2)),
        is_alibi=bool(rng.integers(3) == 0),
        mask=mask,
        mask_rank=int(rng.integers(2, 5)),
        mask_batch=int(rng.choice([1, base["batch"]])),
        mask_padding=int(rng.choice([0, 1, 7])),
        mask_dtype="bool_" if mask == "bool" else str(rng.choice(["float32", base["spec"].dtype])),
    )


# ---- the arrays of a case --------------------------------------------------------------------------------------------


class Values(Protocol):
    """What a case says of its values."""

    @property
    def spec(self) -> Spec: ...
    @property
    def data(self) -> str: ...


def draw_values(rng: np.random.Generator, shape: tuple[int, ...], case: Values) -> Array:
    """Values as T1 holds them."""
    spec = case.spec
    if case.data == "int8":
        return rng.integers(-128, 128, shape).astype(np.int8)
    x = rng.standard_normal(shape)
    if case.data == "ties":  # with one element at the limit the scale is 1 and every other half is a tie
        limit = oracle.max_quantized(spec.quant_bit or 8)
        x = rng.integers(-2 * limit, 2 * limit + 1, shape) / 2
        x[..., :: spec.quant_group] = limit
    elif case.data == "tiny":  # about the least scale
        x = x * 1e-3 * rng.choice([1e-3, 0.1, 1.0], (*shape[:-1], 1))
    elif case.data == "zeros":  # whole groups of zeros among the others
        group = spec.quant_group
        kept = rng.integers(0, 2, (*shape[:-1], shape[-1] // group)).repeat(group, axis=-1)
        x = x * kept
    elif case.data == "large":
        x = np.clip(x * 1e4, -5e4, 5e4)
    return oracle.cast(x, spec.dtype)


def poisoned(shape: tuple[int, ...], dtype: str) -> Array:
    """An array in which every element is one that must not be read."""
    if dtype == "int8":
        return np.full(shape, POISON_INT8, np.int8)
    if dtype == "uint8":
        return np.full(shape, POISON_BYTE, np.uint8)
    return np.full(shape, np.nan, np.float16 if dtype == "float16" else np.float32)


def cache_shape(case: Case, last: int) -> tuple[int, ...]:
    if case.spec.cache_layout == 0:
        return (case.max_batch, case.spec.num_layer, 2, case.max_seq_len, case.num_kv_heads, last)
    return (case.spec.num_layer, case.max_batch, 2, case.num_kv_heads, case.max_seq_len, last)


def make_cache(case: Case, rng: np.random.Generator) -> tuple[Array, Array | None]:
    """Poison, but earlier tokens at positions 0 : start_pos of the call's own layer and sequences."""
    spec = case.spec
    width = case.head_dim // 2 if spec.quant_bit == 4 else case.head_dim
    cache = poisoned(cache_shape(case, width), spec.cache_dtype)
    scale = None
    if spec.quant_bit:
        scale = poisoned(cache_shape(case, case.head_dim // spec.quant_group), spec.scale_dtype)
    earlier = (case.batch, case.start_pos, case.num_kv_heads, case.head_dim)
    if case.start_pos == 0:
        return cache, scale
    return oracle.store(draw_values(rng, earlier, case), draw_values(rng, earlier, case), 0, cache, scale, spec)


def make_mask(case: Case, rng: np.random.Generator) -> Array | None:
    """A mask whose padding is poison, in which most queries keep most keys and some keep none."""
    if case.mask == "none":
        return None
    if case.mask == "empty":
        return np.zeros(((0,), (0, 0))[case.seed % 2], np.float32)
    columns = case.num_keys + case.mask_padding
    shape = (case.mask_batch, case.num_heads, case.new_tokens, columns)[-case.mask_rank :]
    keep = rng.random(shape) > 0.3
    keep[rng.random(shape[:-1]) < 0.15] = False
    if case.mask == "bool":
        keep[..., case.num_keys :] = True  # loud: read, it would let poison in
        return keep
    added = oracle.cast(np.where(keep, rng.standard_normal(shape), -np.inf), case.mask_dtype)
    added[..., case.num_keys :] = np.nan
    return added


def make_input(x: Array, dtype: str, strided: bool) -> mx.array:
    """(B, S, heads, D) as an array of its own, or as a transposed view of (B, heads, S, D)."""
    if strided:
        return to_mx(np.ascontiguousarray(x.swapaxes(1, 2)), dtype).swapaxes(1, 2)
    return to_mx(x, dtype)


# ---- comparators -----------------------------------------------------------------------------------------------------

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
            assert not difference.any(), f"{int(difference.sum())} of {difference.size} values differ in {dtype}"

    def check(self) -> None:
        for dtype, share in QUANTIZED_TOLERANCE.items():
            off, seen = self.off[dtype], self.seen[dtype]
            assert off <= share * seen, f"{off} of {seen} values from {dtype} differ by one, allowed {share:.1%}"


def check_unowned(actual: Array, expected: Array, written: Written, what: str) -> None:
    """Everything but the tokens that the call writes holds the bits it held."""
    actual, expected = actual.copy(), expected.copy()
    for x in (actual, expected):
        for view in written(x):
            view[...] = 0
    assert same_bits(actual, expected), f"{what}: something but the new tokens changed"


def check_stored(
    actual: tuple[mx.array, mx.array | None],
    expected: tuple[Array, Array | None],
    spec: Spec,
    written: Written,
    tally: QuantizedTally,
) -> None:
    """The whole cache and the whole scale after a call."""
    cache, scale = to_numpy(actual[0]), actual[1]
    assert dtype_name(actual[0]) == spec.cache_dtype, "the cache changed its dtype"
    assert cache.shape == expected[0].shape, "the cache changed its shape"
    check_unowned(cache, expected[0], written, "cache")
    if scale is None or expected[1] is None:
        assert scale is expected[1] is None
        assert same_bits(cache, expected[0]), "stored tokens differ from the current ones"
        return
    assert dtype_name(scale) == spec.scale_dtype, "the scale changed its dtype"
    check_unowned(to_numpy(scale), expected[1], written, "scale")
    for quantized, wanted in zip(written(cache), written(expected[0]), strict=True):
        if spec.quant_bit == 4:
            quantized, wanted = oracle.unpack_nibbles(quantized), oracle.unpack_nibbles(wanted)
        tally.compare(quantized, wanted, spec.dtype)
    tolerance = SCALE_TOLERANCE[spec.dtype]
    for given, wanted in zip(written(to_numpy(scale)), written(expected[1]), strict=True):
        np.testing.assert_allclose(
            given.astype(np.float64),
            wanted.astype(np.float64),
            rtol=tolerance,
            atol=6e-8 if tolerance else 0.0,  # 1e-5 is subnormal in float16: one rounding there is 2^-24
            equal_nan=False,
            err_msg="stored scale",
        )


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


def run_cases(cases: Iterable[AnyCase], check: Callable[[AnyCase, QuantizedTally], None]) -> None:
    """Check every case, and say which one failed: draw_..._case(seed) makes it again."""
    tally = QuantizedTally()
    for case in cases:
        try:
            check(case, tally)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} in {case}\n{error}") from error
    tally.check()

"""Every refusal of the operators: a ValueError that names the offending value, and not a bit of the cache changed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest
from support.operator_calls import (
    ANY_BIT,
    ATTENTION_ONLY,
    BOTH,
    CACHE_ONLY,
    MAX_B,
    MAX_S,
    OPERATORS,
    QUANTIZED,
    START,
    B,
    D,
    H,
    K,
    L,
    S,
    bits_of,
    good_call,
    normal,
)
from support.operator_cases import same_bits, to_numpy

from kvant.operators import dequantize, key_value_cache, multi_head_cache_attention, quantize


@dataclass(frozen=True, slots=True)
class Defect:
    """One thing wrong with a good call. A callable change is given the good value; word is a pattern, whole words."""

    name: str
    word: str
    changes: dict[str, Any] = field(default_factory=dict)
    operators: tuple[str, ...] = BOTH
    bits: tuple[int, ...] = ANY_BIT
    layouts: tuple[int, ...] = (0, 1)


def resized(axis: int, size: int) -> Callable[[mx.array], mx.array]:
    """The same kind of array with another size of one axis."""

    def change(x: mx.array) -> mx.array:
        shape = list(x.shape)
        shape[axis] = size
        return mx.zeros(shape, x.dtype)

    return change


def flattened(x: mx.array) -> mx.array:
    """One axis fewer; the message must show the shape, in which 37 is found."""
    return mx.zeros((37, *x.shape[2:]), x.dtype)


def with_axis(x: mx.array) -> mx.array:
    return mx.zeros((37, *x.shape), x.dtype)


def retyped(dtype: mx.Dtype) -> Callable[[mx.array], mx.array]:
    return lambda x: mx.zeros(x.shape, dtype)


def mask_of(*shape: int) -> dict[str, Any]:
    return {"attn_mask": mx.zeros(shape)}


T = START + S

DEFECTS = [
    # rank
    *(
        Defect(f"{name}: {how}", "37", {name: change}, operators, bits)
        for name, operators, bits in (
            ("current_key", BOTH, ANY_BIT),
            ("current_value", BOTH, ANY_BIT),
            ("query", ATTENTION_ONLY, ANY_BIT),
            ("cache", BOTH, ANY_BIT),
            ("scale", BOTH, QUANTIZED),
        )
        for how, change in (("an axis too few", flattened), ("an axis too many", with_axis))
    ),
    # shape
    *(
        Defect(f"{name}: {axis_name} differs", "37", {name: resized(axis, 37)}, operators, bits)
        for name, operators, bits, axes in (
            ("current_key", BOTH, ANY_BIT, ("B", "S", "K", "D")),
            ("current_value", BOTH, ANY_BIT, ("B", "S", "K", "D")),
            ("query", ATTENTION_ONLY, ANY_BIT, ("B", "S", "H", "D")),
        )
        for axis, axis_name in enumerate(axes)
    ),
    Defect("cache: neither key nor value", "37", {"cache": resized(2, 37)}),
    Defect("cache: K differs", "37", {"cache": resized(4, 37)}, layouts=(0,)),
    Defect("cache: K differs", "37", {"cache": resized(3, 37)}, layouts=(1,)),
    Defect("cache: D differs", "37", {"cache": resized(5, 37)}),
    Defect("cache: unpacked width at 4 bits", "8", {"cache": resized(5, D)}, bits=(4,)),
    Defect("cache: packed width at 8 bits", "4", {"cache": resized(5, D // 2)}, bits=(8,)),
    *(Defect(f"scale: axis {axis} differs", "37", {"scale": resized(axis, 37)}, bits=QUANTIZED) for axis in range(6)),
    Defect("scale: one per element", "8", {"scale": resized(5, D)}, bits=QUANTIZED),
    Defect("scale: one per head", "1", {"scale": resized(5, 1)}, bits=QUANTIZED),
    Defect("head_dim differs", "37", {"head_dim": 37}, ATTENTION_ONLY),
    Defect("num_heads differs", "36", {"num_heads": 36}, ATTENTION_ONLY),
    Defect("num_kv_heads differs", "3", {"num_kv_heads": 3}, ATTENTION_ONLY),
    Defect("num_kv_heads 0 is num_heads, of which the key has too few", "6", {"num_kv_heads": 0}, ATTENTION_ONLY),
    Defect("num_kv_heads does not divide num_heads", "4", {"num_kv_heads": 4}, ATTENTION_ONLY),
    Defect("num_kv_heads negative", "-2", {"num_kv_heads": -2}, ATTENTION_ONLY),
    Defect(
        "num_kv_heads agrees with the key and does not divide num_heads",
        "7",
        {"num_heads": 7, "query": resized(2, 7)},
        ATTENTION_ONLY,
    ),
    # batch and positions
    Defect(
        "B > MaxB",
        "37",
        {name: resized(0, 37) for name in ("current_key", "current_value")},
        CACHE_ONLY,
    ),
    Defect(
        "B > MaxB",
        "37",
        {name: resized(0, 37) for name in ("query", "current_key", "current_value")},
        ATTENTION_ONLY,
    ),
    Defect("start_pos negative", "-1", {"start_pos": -1}),
    Defect("start_pos negative, in an array", "-1", {"start_pos": mx.array([-1])}),
    Defect("one position past the end", "9|12", {"start_pos": MAX_S - S + 1}),
    Defect("one position past the end, in an array", "9|12", {"start_pos": mx.array(MAX_S - S + 1)}),
    Defect("start_pos far past the end", "2147483648", {"start_pos": 2**31}),
    Defect("start_pos past 64 bits", "18446744073709551616", {"start_pos": 2**64}),
    Defect("start_pos a float", "4.0|float", {"start_pos": 4.0}),
    Defect("start_pos a bool", "True|bool", {"start_pos": True}),
    Defect("start_pos None", "None|NoneType", {"start_pos": None}),
    Defect("start_pos text", "'4'|str", {"start_pos": "4"}),
    Defect("start_pos a list", r"\[4\]|list", {"start_pos": [4]}),
    Defect("start_pos a float array", "float32", {"start_pos": mx.array([4.0])}),
    Defect("start_pos a bool array", "bool", {"start_pos": mx.array([True])}),
    Defect("start_pos two elements", r"2|\(2,\)", {"start_pos": mx.array([4, 4])}),
    Defect("start_pos no element", r"0|\(0,\)", {"start_pos": mx.array([], mx.int32)}),
    # layers
    Defect("layer_idx negative", "-1", {"layer_idx": -1}),
    Defect("layer_idx past the end", "3", {"layer_idx": L}),
    Defect("num_layer too small", "2", {"num_layer": L - 1}),
    Defect("num_layer too large", "4", {"num_layer": L + 1}),
    Defect("num_layer too large, and a layer it alone has", "4", {"num_layer": L + 1, "layer_idx": L}),
    # quantization
    *(
        Defect(f"quant_bit {bit}", rf"(?s:(?=.*\b0\b)(?=.*\b4\b)(?=.*\b8\b).*\b{bit})", {"quant_bit": bit})
        for bit in (3, 16)
    ),
    Defect("quant_bit negative", "-8", {"quant_bit": -8}),
    Defect("quant_group does not divide D", "3", {"quant_group": 3}, bits=QUANTIZED),
    Defect("quant_group more than D", "16", {"quant_group": 16}, bits=QUANTIZED),
    Defect("quant_group 0", "0", {"quant_group": 0}, bits=QUANTIZED),
    Defect("quant_group negative", "-4", {"quant_group": -4}, bits=QUANTIZED),
    Defect("no scale", "scale", {"scale": None}, bits=QUANTIZED),
    Defect(
        "a scale without quantization", "scale", {"scale": lambda _: mx.ones((MAX_B, L, 2, MAX_S, K, 2))}, bits=(0,)
    ),
    *(
        Defect(f"cache {dtype} at {bit} bits", str(dtype).rpartition(".")[2], {"cache": retyped(dtype)}, bits=(bit,))
        for bit, dtypes in (
            (0, (mx.int8, mx.uint8, mx.int32)),
            (8, (mx.uint8, mx.int32, mx.float32, mx.float16)),
            (4, (mx.int8, mx.uint32, mx.float32)),
        )
        for dtype in dtypes
    ),
    Defect(
        "int8 inputs with quantization",
        "int8",
        {name: retyped(mx.int8) for name in ("current_key", "current_value")},
        CACHE_ONLY,
        QUANTIZED,
    ),
    # layout
    Defect("cache_layout 2", "2", {"cache_layout": 2}),
    Defect("cache_layout negative", "-1", {"cache_layout": -1}),
    # mask
    Defect("mask of rank 1", "37", mask_of(37), ATTENTION_ONLY),
    Defect("mask of rank 5", "37", mask_of(1, B, H, S, 37), ATTENTION_ONLY),
    Defect("mask of no rank", r"0|\(\)", {"attn_mask": mx.array(0.0)}, ATTENTION_ONLY),
    *(
        Defect(f"mask {shape}", str(wrong), mask_of(*shape), ATTENTION_ONLY)
        for shape, wrong in (
            ((S, T - 1), T - 1),
            ((H, S, T - 1), T - 1),
            ((B, H, S, 1), 1),
            ((13, T), 13),
            ((1, T), 1),
            ((H, 13, T), 13),
            ((B, H, 1, T), 1),
            ((13, S, T), 13),
            ((K, S, T), K),
            ((1, S, T), 1),
            ((B, 13, S, T), 13),
            ((B, 1, S, T), 1),
            ((13, H, S, T), 13),
            ((MAX_B, H, S, T), MAX_B),
        )
    ),
    Defect("a boolean mask too short", "5", {"attn_mask": mx.ones((S, 5), mx.bool_)}, ATTENTION_ONLY),
]

ROWS = [
    pytest.param(defect, operator, bit, layout, id=f"{defect.name}-{operator}-{bit}bit-layout{layout}")
    for defect in DEFECTS
    for operator in defect.operators
    for bit in defect.bits
    for layout in defect.layouts
]


def whole(word: str) -> str:
    """A pattern for a word or number that is not a part of a longer one, and for 1 not the 1 of -1."""
    return rf"(?<![\w-])({word})(?!\w)"


@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("quant_bit", ANY_BIT)
@pytest.mark.parametrize("operator", BOTH)
def test_the_good_call_is_good(operator: str, quant_bit: int, layout: int) -> None:
    """Otherwise every refusal below could be for another reason. The cache changes here, which the same check sees."""
    given = good_call(operator, quant_bit, layout)
    before = bits_of(given)
    mx.eval(OPERATORS[operator](**given))
    assert not any(same_bits(a, b) for a, b in zip(bits_of(given), before, strict=True))


@pytest.mark.parametrize(("defect", "operator", "quant_bit", "layout"), ROWS)
def test_refused(defect: Defect, operator: str, quant_bit: int, layout: int) -> None:
    given = good_call(operator, quant_bit, layout)
    for name, change in defect.changes.items():
        given[name] = change(given[name]) if callable(change) else change
    before = bits_of(given)
    with pytest.raises(ValueError, match=whole(defect.word)):
        mx.eval(OPERATORS[operator](**given))
    after = bits_of(given)
    assert all(same_bits(a, b) for a, b in zip(after, before, strict=True)), "the refused call changed cache or scale"


@pytest.mark.parametrize("quant_bit", QUANTIZED)
def test_an_odd_head_dim_is_refused_at_4_bits_only(quant_bit: int) -> None:
    cache, scale = mx.zeros((1, 1, 2, 4, 1, 7 if quant_bit == 8 else 3)), mx.zeros((1, 1, 2, 4, 1, 1))
    cache = cache.astype(mx.int8 if quant_bit == 8 else mx.uint8)
    new = normal(1, 2, 1, 7)
    options = {"quant_bit": quant_bit, "quant_group": 7}
    if quant_bit == 8:
        key_value_cache(new, new, 0, cache, scale, **options)
        assert to_numpy(cache).any()
        return
    with pytest.raises(ValueError, match=r"\b7\b"):
        key_value_cache(new, new, 0, cache, scale, **options)
    with pytest.raises(ValueError, match=r"\b7\b"):
        multi_head_cache_attention(new, new, new, 0, cache, scale, num_heads=1, head_dim=7, is_causal=True, **options)
    assert not to_numpy(cache).any()
    assert not to_numpy(scale).any()


@pytest.mark.parametrize(
    ("shape", "options", "word"),
    [
        ((2, 8), {"quant_bit": 3, "quant_group": 8}, "3"),
        ((2, 8), {"quant_bit": 16, "quant_group": 8}, "16"),
        ((2, 8), {"quant_bit": 8, "quant_group": 3}, "3"),
        ((2, 8), {"quant_bit": 8, "quant_group": 0}, "0"),
        ((2, 8), {"quant_bit": 8, "quant_group": -8}, "-8"),
        ((2, 7), {"quant_bit": 4, "quant_group": 7}, "7"),
    ],
)
def test_quantize_refuses(shape: tuple[int, ...], options: dict[str, int], word: str) -> None:
    with pytest.raises(ValueError, match=whole(word)):
        mx.eval(quantize(normal(*shape), **options))


@pytest.mark.parametrize(
    ("width", "groups", "options", "word"),
    [
        (8, 2, {"quant_bit": 3, "quant_group": 4}, "3"),
        (8, 1, {"quant_bit": 8, "quant_group": 3}, "3"),
        (8, 1, {"quant_bit": 8, "quant_group": 4}, "1"),  # a scale that broadcasting would accept
    ],
)
def test_dequantize_refuses(width: int, groups: int, options: dict[str, int], word: str) -> None:
    quantized, scale = mx.ones((2, width), mx.int8), mx.ones((2, groups))
    with pytest.raises(ValueError, match=whole(word)):
        mx.eval(dequantize(quantized, scale, dtype=mx.float32, **options))

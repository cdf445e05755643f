"""Every refusal of the dynamic operators: a ValueError with the given and the expected, and not a bit of the cache
changed."""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest
from support.operator_calls import ANY_BIT, ATTENTION_ONLY, BOTH, CACHE_ONLY, OWN_WORDS, QUANTIZED, VALUES, bits_of
from support.operator_cases import same_bits, to_numpy
from support.packed_calls import (
    CACHESTARTS,
    MAX_ROWS,
    OPERATORS,
    D,
    H,
    K,
    L,
    N,
    T,
    good_call,
)


@dataclass(frozen=True, slots=True)
class Defect:
    """One thing wrong with a good call. A callable change is given the good value; each word must be in the message."""

    name: str
    words: tuple[object, ...]
    changes: dict[str, Any]
    operators: tuple[str, ...] = BOTH
    bits: tuple[int, ...] = ANY_BIT
    modes: tuple[int, ...] = (0, 1)
    layouts: tuple[int, ...] = (0, 1, 2, 3)


def resized(axis: int, size: int) -> Callable[[mx.array], mx.array]:
    """The same kind of array with another size of one axis."""
    return lambda x: mx.zeros([size if i == axis % x.ndim else old for i, old in enumerate(x.shape)], x.dtype)


def reshaped(*more: int) -> Callable[[mx.array], mx.array]:
    """The same kind of array, with these axes instead of its first."""
    return lambda x: mx.zeros((*more, *x.shape[1:]), x.dtype)


def retyped(dtype: mx.Dtype) -> Callable[[mx.array], mx.array]:
    return lambda x: mx.zeros(x.shape, dtype)


def index(name: str, *words: object, value: Any, modes: tuple[int, ...] = (0, 1)) -> Defect:
    """A defect of one index argument, or of one of its entries."""
    return Defect(f"{name} {value}", (name, *words), {name.partition("\\[")[0]: value}, bits=(8,), modes=modes)


def table(row: int, page: int, entry: int) -> list[list[int]]:
    """The good page tables with another entry."""
    tables = [list(x) for x in CACHESTARTS[1]]
    tables[row][page] = entry
    return tables


INDEXES = ("seqstarts", "kvstarts", "cachestarts", "start_pos")
KEYS = ("current_key", "current_value")
LARGE = 2**63 - 1

DEFECTS = [
    # arrays that are none; rank and shape
    *(
        Defect(f"{name} a list", (name, "list", "mx.array"), {name: [[[0.0]]]}, operators, bits)
        for name, operators, bits in (
            *((name, BOTH, ANY_BIT) for name in (*KEYS, "cache")),
            ("scale", BOTH, QUANTIZED),
            ("query", ATTENTION_ONLY, ANY_BIT),
            ("attn_mask", ATTENTION_ONLY, ANY_BIT),
        )
    ),
    *(
        Defect(f"{name}: {more} for the first axis", (name, "37", dims), {name: reshaped(*more)}, operators, bits)
        for name, dims, operators, bits in (
            *((name, "3 dimensions", BOTH, ANY_BIT) for name in KEYS),
            ("cache", "5 dimensions", BOTH, ANY_BIT),
            ("scale", "expected", BOTH, QUANTIZED),
            ("query", rf"\({N}, {H}, {D}\)", ATTENTION_ONLY, ANY_BIT),
        )
        for more in ((37, 1), (37, 1, 1))
    ),
    *(
        Defect(f"{name}: axis {axis}", (name, "37", "expected|current_key"), {name: resized(axis, 37)}, operators)
        for name, operators in (("current_value", BOTH), ("query", ATTENTION_ONLY))
        for axis in range(3)
    ),
    Defect("N differs", ("seqstarts", N, 37), {name: resized(0, 37) for name in KEYS}, CACHE_ONLY),
    Defect("no new token", ("current_key", "0", "at least 1"), {name: resized(0, 0) for name in KEYS}, bits=(0, 8)),
    Defect("K differs", ("cache", "37", 2), {name: resized(1, 37) for name in KEYS}, CACHE_ONLY),
    Defect("D differs", ("cache", "40|20", "8|4"), {name: resized(2, 40) for name in KEYS}, CACHE_ONLY),
    *(
        Defect(f"cache: axis {axis}", ("37", "expected|cache has"), {"cache": resized(axis, 37)}, layouts=(layout,))
        for layout, axes in enumerate(((1, 2, 3, 4), (0, 2, 3, 4), (0, 1, 3, 4), (0, 1, 2, 4)))
        for axis in axes
    ),
    *(
        Defect(f"scale: axis {axis}", ("scale", "37", "expected"), {"scale": resized(axis, 37)}, bits=QUANTIZED)
        for axis in range(5)
    ),
    Defect("scale: one per element", ("scale", D, D // 4), {"scale": resized(-1, D)}, bits=QUANTIZED),
    Defect("cache: packed width at 8 bits", ("cache", 4, 8), {"cache": resized(-1, 4)}, bits=(8,)),
    Defect("cache: unpacked width at 4 bits", ("cache", 8, 4), {"cache": resized(-1, 8)}, bits=(4,)),
    # dtypes and quantization
    *(
        Defect(f"cache {dtype} at {bit} bits", ("cache", dtype, wanted), {"cache": retyped(dtype)}, bits=(bit,))
        for bit, wanted, dtypes in (
            (0, "floats", (mx.int8, mx.int32)),
            (8, "int8", (mx.uint8, mx.float32)),
            (4, "uint8", (mx.int8, mx.float16)),
        )
        for dtype in dtypes
    ),
    Defect("scale bfloat16", ("bfloat16", "float32 or float16"), {"scale": retyped(mx.bfloat16)}, bits=QUANTIZED),
    Defect("no scale", ("scale is missing", "needs one"), {"scale": None}, bits=QUANTIZED),
    Defect("a scale at 0 bits", ("scale is given", "expected none"), {"scale": mx.ones((1,))}, bits=(0,)),
    Defect("two dtypes", ("float16", "float32"), {"current_value": retyped(mx.float16)}),
    Defect("int8 keys", ("int8", "float32"), {name: retyped(mx.int8) for name in KEYS}, CACHE_ONLY, QUANTIZED),
    Defect("query of another dtype", ("query", "float16", "float32"), {"query": retyped(mx.float16)}, ATTENTION_ONLY),
    Defect("query of ints", ("query", "int32", "float32"), {"query": retyped(mx.int32)}, ATTENTION_ONLY),
    *(Defect(f"quant_bit {x}", ("quant_bit", x, "0, 8, 4"), {"quant_bit": x}) for x in (3, -8, 16)),
    *(Defect(f"quant_group {x}", ("quant_group", x), {"quant_group": x}, bits=QUANTIZED) for x in (0, 3, 16, -4)),
    # attributes
    Defect("cache_layout 4", ("cache_layout", 4, "0, 1, 2, 3"), {"cache_layout": 4}, layouts=(0,)),
    Defect("cache_layout -1", ("cache_layout", -1, "0, 1, 2, 3"), {"cache_layout": -1}, layouts=(0,)),
    *(Defect(f"cache_mode {x}", ("cache_mode", x, "0, 1"), {"cache_mode": x}, layouts=(0,)) for x in (2, -1, True)),
    *(Defect(f"page_size {x}", ("page_size", x, "positive"), {"page_size": x}, layouts=(0,)) for x in (0, -128)),
    Defect("num_layer", ("num_layer", L + 1, L), {"num_layer": L + 1}),
    *(Defect(f"layer_idx {x}", ("layer_idx", x, f"0 to {L - 1}"), {"layer_idx": x}) for x in (-1, L)),
    Defect("num_heads", ("query", H, 4), {"num_heads": 4}, ATTENTION_ONLY),
    Defect("num_kv_heads", ("current_key", 3, K), {"num_kv_heads": 3}, ATTENTION_ONLY),
    Defect("num_kv_heads 0", ("current_key", H, K), {"num_kv_heads": 0}, ATTENTION_ONLY),
    Defect("num_kv_heads does not divide", (H, 4, "multiple"), {"num_kv_heads": 4}, ATTENTION_ONLY),
    Defect("head_dim", (D, 37), {"head_dim": 37}, ATTENTION_ONLY),
    Defect("is_causal", ("is_causal is 1", "True or False"), {"is_causal": 1}, ATTENTION_ONLY),
    Defect("is_alibi", ("is_alibi is None", "True or False"), {"is_alibi": None}, ATTENTION_ONLY),
    *(
        Defect(f"decoding_batches {x}", ("decoding_batches", x, "0 to 3"), {"decoding_batches": x}, ATTENTION_ONLY)
        for x in (-1, 4, LARGE)
    ),
    *(Defect(f"num_repeat {x}", ("num_repeat", x, "positive"), {"num_repeat": x}, CACHE_ONLY) for x in (0, -1, True)),
    Defect("num_repeat", ("num_repeat", 2**31, (2**31 - 1) // (T * K * D)), {"num_repeat": 2**31}, CACHE_ONLY),
    # mask
    *(
        Defect(f"mask {shape}", ("attn_mask", *shape, f">={T}"), {"attn_mask": mx.zeros(shape)}, ATTENTION_ONLY)
        for shape in ((37,), (N, T - 1), (1, T), (N + 1, T), (H, N, T - 1), (K, N, T), (1, N, T), (1, H, N, T))
    ),
    Defect("mask of ints", ("attn_mask", "int32", "bool"), {"attn_mask": mx.zeros((N, T), mx.int32)}, ATTENTION_ONLY),
    # starts that do not add up
    index("seqstarts", 4, 3, value=[0, 1, 7]),
    index("seqstarts", 4, 5, value=[0, 1, 5, 7, 7]),
    index("seqstarts", 4, 0, value=[]),
    index("seqstarts", 1, 0, value=[1, 1, 5, 7]),
    index("seqstarts", -1, 0, value=[-1, 1, 5, 7]),
    index("seqstarts", 0, 1, value=[0, 1, 0, 7]),
    index("seqstarts", 8, N, value=[0, 1, 5, 8]),
    index("seqstarts", 6, N, value=[0, 1, 5, 6]),
    index("seqstarts", LARGE, N, value=[0, 1, 5, LARGE]),
    index("kvstarts", 4, 3, value=[0, 10, 21]),
    index("kvstarts", 2, 0, value=[2, 12, 16, 23]),
    index("kvstarts", 9, 10, value=[0, 10, 9, 21]),
    index("kvstarts", "sequence 1", 5, 4, value=[0, 10, 15, 22]),
    index("kvstarts", "sequence 2", 6, 7, value=[0, 10, 14, 20]),
    index("kvstarts", LARGE - 14, 7, value=[0, 10, 14, LARGE]),
    index("start_pos", -1, 0, value=[9, -1, 5]),
    index("start_pos", 10, 11, value=[10, 0, 5]),
    index("start_pos", LARGE, 10, value=[LARGE, 0, 5]),
    index("kvstarts", 2**70 - 14, 7, value=[0, 10, 14, 2**70]),
    index("start_pos", 2**70 + 2, 7, value=[9, 0, 2**70]),
    Defect("start_pos too short", ("4 entries", 3), {"start_pos": [9, 0]}, bits=(8,)),
    *(index("max_seqlen", x, 4, value=x) for x in (3, 5, 0, -1, LARGE)),
    *(index("max_kvlen", x, 10, value=x) for x in (9, 11, 0, -1, LARGE)),
    # rows
    index("cachestarts", 2, 3, value=[16, 12], modes=(0,)),
    index("cachestarts", 4, 3, value=[16, 12, 5, 0], modes=(0,)),
    index(r"cachestarts\[0\]", MAX_ROWS - 9, 10, MAX_ROWS, value=[MAX_ROWS - 9, 12, 5], modes=(0,)),
    index(r"cachestarts\[2\]", -1, 7, MAX_ROWS, value=[16, 12, -1], modes=(0,)),
    index("cachestarts", LARGE, MAX_ROWS, value=[16, LARGE, 5], modes=(0,)),
    index("cachestarts", "2 page tables", 3, value=CACHESTARTS[1][:2], modes=(1,)),
    index(r"cachestarts\[0\]", "2 entries", 3, value=[[16, 3], [12, 0], [20, 24]], modes=(1,)),
    index(r"cachestarts\[1\]", "0 entries", 1, value=[[16, 3, 8], [], [20, 24]], modes=(1,)),
    index(r"cachestarts\[0\]\[2\]", MAX_ROWS - 1, 2, MAX_ROWS, value=table(0, 2, MAX_ROWS - 1), modes=(1,)),
    index(r"cachestarts\[0\]\[1\]", -1, 4, MAX_ROWS, value=table(0, 1, -1), modes=(1,)),
    index(r"cachestarts\[2\]\[0\]", LARGE, MAX_ROWS, value=table(2, 0, LARGE), modes=(1,)),
    index("cachestarts", "array|int", value=[16, 12, 5], modes=(1,)),
    index("cachestarts", "16|3", "int|integers", value=[[16, 3, 8], [12, 0, 0], [20, 24, 0]], modes=(0,)),
    # a written row that holds another token
    *(
        Defect(f"written twice: {rows}", words, {"cachestarts": rows}, bits=(8,), modes=(mode,))
        for mode, rows, words in (
            (0, [16, 15, 5], ("sequence 1", "row 16", "sequence 0")),  # 1 writes 15 to 18; 0 reads 16 to 24
            (0, [16, 22, 5], ("sequence 1", "row 22", "sequence 0")),
            (0, [16, 10, 5], ("sequence [12]", "row 10", "sequence [12]")),  # both write
            (0, [0, 12, 0], ("sequence 2", "row 5", "sequence 0")),  # 2 writes 5, which 0 reads
            (1, [[16, 3, 8], [16], [20, 24]], ("sequence 1", "row 16", "sequence 0")),
            (1, [[16, 3, 8], [12], [20, 7]], ("sequence 2", "row 8", "sequence 0")),  # pages at any row
            (1, [[16, 3, 8], [12], [20, 20]], ("sequence 2", "row 21", "sequence 2")),  # in one sequence
            (1, [[16, 3, 15], [12], [20, 24]], ("sequence 1", "row 15", "sequence 0")),
            (1, [[0, 4, 20], [6], [1, 24]], ("sequence 1", "row 6", "sequence 0")),  # 0 reads 0 to 7, 2 reads 1 to 4
        )
    ),
    # index arguments that are none
    *(
        Defect(f"{name} {value!r}", (name, *words), {name: value}, bits=(8,), layouts=(0,))
        for name in ("seqstarts", "kvstarts", "cachestarts", "start_pos")
        for value, words in (
            (None, ("NoneType", "sequence of ints")),
            ("0157", ("str", "sequence of ints")),
            (4, ("int", "sequence of ints")),
            ({0: 0}, ("dict", "sequence of ints")),
            (mx.array([0.0, 1.0]), ("float32", "integers")),
            (mx.array([[[0, 1]]]), (r"\(1, 1, 2\)", "dimensions?")),
            (mx.array([True, False]), ("bool", "integers")),
            (mx.array(3), (r"\(\)", "dimensions?")),
        )
    ),
    *(
        Defect(f"{name} with {value!r}", (rf"{name}\[0\]", "an int"), {name: [value, 1]}, bits=(8,), modes=(0,))
        for name in ("seqstarts", "kvstarts", "cachestarts", "start_pos")
        for value in (True, 0.0, None, "0", mx.array(0))
    ),
    index(r"cachestarts\[1\]\[0\]", "True", "an int", value=table(1, 0, True), modes=(1,)),
]  # fmt: skip


def as_array(value: Any) -> Any:
    """Ints of 64 bits, or rows of them of one length, as an array; anything else as it is."""
    rows = value if value and isinstance(value[0], list) else [value]
    fits = all(type(x) is int and -(2**63) <= x < 2**63 for row in rows for x in row)
    return mx.array(value, mx.int64) if fits and len(set(map(len, rows))) == 1 else value


def calls(defect: Defect) -> Iterator[dict[str, Any]]:
    for operator in defect.operators:
        for bit in defect.bits:
            for mode in defect.modes:
                for layout in defect.layouts:
                    given = good_call(operator, bit, mode, layout)
                    for name, change in defect.changes.items():
                        given[name] = change(given[name]) if callable(change) else change
                    yield {"operator": operator, **given}
                    lists = {name: given[name] for name in INDEXES if isinstance(given[name], list)}
                    if set(lists) & set(defect.changes):
                        yield {"operator": operator, **given, **{name: as_array(x) for name, x in lists.items()}}


def check_refused(given: dict[str, Any], words: tuple[object, ...]) -> None:
    before = bits_of(given)
    with pytest.raises(ValueError, match="|".join(OWN_WORDS)) as caught:
        mx.eval(OPERATORS[given.pop("operator")](**given))
    for word in words:  # whole numbers and words; for 1 not the 1 of -1
        assert re.search(rf"(?<![\w-])(?:{word})(?!\w)", str(caught.value)), (word, str(caught.value))
    assert all(same_bits(a, b) for a, b in zip(bits_of(given), before, strict=True)), "the refused call wrote"


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_refused(defect: Defect) -> None:
    for given in calls(defect):
        check_refused(given, defect.words)


@pytest.mark.parametrize("layout", range(4))
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("quant_bit", ANY_BIT)
def test_the_good_call_is_good(quant_bit: int, mode: int, layout: int) -> None:
    """Otherwise every refusal could be for another reason. The cache changes here, which the same check sees."""
    for operator in BOTH:
        given = good_call(operator, quant_bit, mode, layout)
        before = bits_of(given)
        mx.eval(OPERATORS[operator](**given))
        assert not any(same_bits(a, b) for a, b in zip(bits_of(given), before, strict=True))


@pytest.mark.parametrize(
    ("operator", "name"),
    [(operator, name) for operator in BOTH for name in inspect.signature(OPERATORS[operator]).parameters],
)
def test_any_value(operator: str, name: str) -> None:
    """Every argument with a value of each wrong kind: refused with nothing written, or it works."""
    for kind, value in VALUES.items():
        for quant_bit, mode, layout in ((8, 0, 3), (4, 1, 1), (0, 1, 2)):
            given = good_call(operator, quant_bit, mode, layout)
            before = bits_of(given)
            try:
                mx.eval(OPERATORS[operator](**(given | {name: value})))
            except ValueError as error:
                message = f"{kind}: {error}"
                assert all(same_bits(a, b) for a, b in zip(bits_of(given), before, strict=True)), message
                assert any(word in message for word in OWN_WORDS), message
            else:
                assert not any(same_bits(a, b) for a, b in zip(bits_of(given), before, strict=True)), kind


@pytest.mark.parametrize("mode", [0, 1])
def test_rows_that_are_only_read_may_be_shared(mode: int) -> None:
    """The first two sequences begin with the same rows; the third, without a new token, is one of their beginnings."""
    given = good_call("key_value_cache", 8, mode, 1) | {
        "seqstarts": [0, 1, 3, 3],
        "kvstarts": [0, 9, 19, 23],
        "start_pos": [8, 8, 4],
        "max_seqlen": 2,
        "max_kvlen": 10,
        "cachestarts": [[4, 8, 0], [4, 8, 12], [4]] if mode else [0, 12, 3],
    }
    given |= {name: given[name][:3] for name in KEYS}
    before = to_numpy(given["cache"]).copy()
    key, _ = OPERATORS["key_value_cache"](**given)
    assert key.shape == (23, K, D)
    changed = to_numpy(given["cache"])[1] != before[1]
    assert [row for row in range(MAX_ROWS) if changed[row].any()] == ([0, 12, 13] if mode else [8, 20, 21])


def test_a_result_that_mlx_cannot_count() -> None:
    """A page table may name one page so often that the tokens have more elements than 32 bits count."""
    pages, page_size = 2**12, 2**19  # together 2**31 tokens of one element
    tokens = pages * page_size
    cache = mx.zeros((2 * page_size, 1, 2, 1, 1), mx.int8)
    scale = mx.zeros((2 * page_size, 1, 2, 1, 1), mx.float16)
    table = [[0] * (pages - 1) + [page_size]]
    new, before = mx.ones((1, 1, 1)), bits_of({"cache": cache, "scale": scale})
    shared = (new, new, [0, 1], [0, tokens], table, [tokens - 1])
    options = {"quant_bit": 8, "quant_group": 1, "cache_mode": 1, "page_size": page_size}
    most = 2**31 - 1
    with pytest.raises(ValueError, match="num_repeat is 1; expected at most 0 for this call"):
        OPERATORS["key_value_cache"](*shared, 1, tokens, cache, scale, **options)
    with pytest.raises(ValueError, match=f"a sequence has {tokens} tokens; expected at most {most}"):
        OPERATORS["multi_head_cache_attention"](
            new, *shared, 0, 1, tokens, cache, scale, num_heads=1, head_dim=1, **options
        )
    assert all(same_bits(a, b) for a, b in zip(bits_of({"cache": cache, "scale": scale}), before, strict=True))


@pytest.mark.skipif(mx.default_device().type != mx.cpu, reason="a GPU refuses the call, not the device")
def test_a_forced_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given = good_call("multi_head_cache_attention", 8, 0, 3)
    before = bits_of(given)
    monkeypatch.setenv("KVANT_KERNELS", "fused")
    with pytest.raises(ValueError, match="KVANT_KERNELS is 'fused'"):
        OPERATORS["multi_head_cache_attention"](**given)
    assert all(same_bits(a, b) for a, b in zip(bits_of(given), before, strict=True))

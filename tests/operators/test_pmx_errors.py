"""Every refusal of PMX's operators: a ValueError that names argument, given and expected, and not a bit
written.
"""

import inspect
import math
import re
from collections.abc import Callable
from decimal import Decimal
from itertools import product
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from support.operator_cases import same_bits, to_numpy
from support.pmx_cases import (
    ATTENTION,
    BOTH,
    CACHE,
    CACHESTARTS,
    MAX_ROWS,
    MAX_S,
    START,
    B,
    D,
    H,
    K,
    L,
    N,
    S,
    T,
    good_call,
)

from kvant.operators import dequantize, quantize

ANY, QUANTIZED, BOOL = (0, 8, 4), (8, 4), (False, True)
OWN_WORDS = ("expected", "does not divide")
KEYS, INDEXES = ("current_key", "current_value"), ("seqstarts", "kvstarts", "cachestarts", "start_pos")
LARGE = 2**63 - 1
# Any argument with a value of each kind: refused in our own words, or it works.
VALUES: list[Any] = [
    *(mx.array(1), mx.array([0, 1]), mx.array(True), np.array(1), np.array([0, 1]), np.int64(1), np.True_),
    *(
        1.0,
        0.5,
        math.nan,
        math.inf,
        Decimal(1),
        True,
        False,
        -1,
        -(2**63),
        2**31 - 1,
        2**31,
        2**32,
        2**63,
        2**64,
    ),
    *(10**100, None, "", "1", b"1", [1], (), {}, object(), int),
]
# What others should be follows from these: the message may name one of the others.
DECISIVE = ("cache_layout", "cache_mode", "page_size", "num_heads", "head_dim", "start_pos")


class Defect(NamedTuple):
    """One thing wrong with a good call. A callable change is given the good value; the words must be in
    the message.
    """

    words: tuple[object, ...]
    changes: dict[str, Any]
    operators: tuple[str, ...] = BOTH
    bits: tuple[int, ...] = ANY
    packed: tuple[bool, ...] = BOOL
    layouts: tuple[int, ...] = (0, 1, 2, 3)
    modes: tuple[int, ...] = (0, 1)

    def fits(self, operator: str, packed: bool, bit: int, layout: int, mode: int) -> bool:
        given = (operator, self.operators), (bit, self.bits), (layout, self.layouts), (mode, self.modes)
        return all(own in allowed for own, allowed in given)


def resized(axis: int, size: int) -> Callable[[mx.array], mx.array]:
    """The same kind of array with another size of one axis."""
    return lambda x: mx.zeros([size if i == axis % x.ndim else old for i, old in enumerate(x.shape)], x.dtype)


def retyped(dtype: mx.Dtype) -> Callable[[mx.array], mx.array]:
    return lambda x: mx.zeros(x.shape, dtype)


def value(name: str, given: object, *words: object, **rest: Any) -> Defect:
    """A defect of one argument; the message has its name, and by itself what is given if that is a number."""
    return Defect((name, *words), {name: given}, **rest)


def index(name: str, given: object, *words: object, modes: tuple[int, ...] = (0, 1)) -> Defect:
    return Defect(
        (name, *words), {name.partition("\\[")[0]: given}, (CACHE, ATTENTION), (8,), (True,), (1,), modes
    )


def page(row: int, number: int, entry: object) -> list[list[object]]:
    tables = [list(x) for x in CACHESTARTS[1]]
    tables[row][number] = entry
    return tables


# What test_any_value cannot give: arrays of the right rank, and numbers that are off by little.
DEFECTS = [
    # arrays
    *(value("current_value", resized(axis, 37), 37, "expected") for axis in range(3)),
    value("current_key", resized(0, 0), 0, "at least 1", bits=(0, 8)),
    value("cache", resized(-1, 40), 40, "8|4"),
    *(value("cache", resized(axis, 37), 37, packed=(packed,), layouts=(layout,))
      for packed, axes in ((False, ((2, 4), (2, 3))), (True, ((2, 3), (2, 3), (1, 3), (1, 2))))
      for layout, own in enumerate(axes) for axis in own),
    *(value("scale", resized(axis, 37), 37, "expected", bits=QUANTIZED) for axis in range(5)),
    *(value("cache", retyped(dtype), str(dtype).rpartition(".")[2], wanted, bits=(bit,)) for bit, wanted, dtype in (
      (0, "float32", mx.int8), (8, "int8", mx.uint8), (4, "uint8", mx.int8))),
    value("scale", retyped(mx.bfloat16), "bfloat16", "float32 or float16", bits=QUANTIZED),
    Defect(("current_key", "int8", "float32"), dict.fromkeys(KEYS, retyped(mx.int8)), (CACHE,), QUANTIZED),
    value("query", retyped(mx.int32), "int32", "float32", operators=(ATTENTION,)),
    value("query", resized(-2, 4), 4, H, operators=(ATTENTION,)),
    # numbers
    *(value("num_layer", x, x, L) for x in (L - 1, L + 1)),
    value("layer_idx", L, L, f"0 to {L - 1}"),
    *(value("quant_group", x, x, bits=QUANTIZED) for x in (3, 16)),
    Defect(("current_key", K, 3), {"num_kv_heads": 3}, (ATTENTION,)),
    Defect(("num_heads", H, "multiple", 4), {"num_kv_heads": 4}, (ATTENTION,)),
    Defect(("query", D, 37), {"head_dim": 37}, (ATTENTION,)),
    *(Defect(("batch of current_key", 37, "1 to 5"), dict.fromkeys(names, resized(0, 37)), only, packed=(False,))
      for only, names in (((CACHE,), KEYS), ((ATTENTION,), ("query", *KEYS)))),
    *(value("start_pos", given, MAX_S - S + 1, packed=(False,)) for given in (MAX_S - S + 1, mx.array(MAX_S - S + 1))),
    *(value("attn_mask", mx.zeros(shape), *shape, f">={START + S}", operators=(ATTENTION,), packed=(False,))
      for shape in ((1, B, H, S, 37), (S, 6), (H, S, 6), (H, 13, 7), (K, S, 7), (B, 13, S, 7), (5, H, S, 7))),
    *(value("attn_mask", mx.zeros(shape), *shape, f">={T}", operators=(ATTENTION,), packed=(True,))
      for shape in ((N, T - 1), (N + 1, T), (H, N, T - 1), (K, N, T))),
    value("decoding_batches", 4, 4, "0 to 3", operators=(ATTENTION,), packed=(True,)),
    # the packed call's index arguments: those that do not add up
    Defect(("seqstarts", N, 37), dict.fromkeys(KEYS, resized(0, 37)), (CACHE,), packed=(True,)),
    *(index("seqstarts", x, len(x), 4) for x in ([0, 1, 7], [0, 1, 5, 7, 7], [])),
    *(index(r"seqstarts\[0\]", x, x[0], 0) for x in ([1, 1, 5, 7], [-1, 1, 5, 7])),
    index(r"seqstarts\[2\]", [0, 1, 0, 7], 0, 1),
    *(index("seqstarts", x, x[-1], N) for x in ([0, 1, 5, 8], [0, 1, 5, 6], [0, 1, 5, LARGE])),
    *(index("kvstarts", x, *words) for x, *words in (
      *(([0, 10, 21], 3, 4), ([2, 12, 16, 23], 2, 0), ([0, 10, 9, 21], 9, 10)),
      *(([0, 10, 15, 22], 15, 14), ([0, 10, 14, 20], 20, 21), ([0, 10, 14, 2**70], 2**70, 21)))),
    *(index("start_pos", x, *words) for x, *words in (([9, -1, 5], -1, 0), ([10, 0, 5], 10, 11), ([LARGE, 0, 5], 10))),
    Defect(("entries of seqstarts", 4, 3), {"start_pos": [9, 0]}, packed=(True,)),
    *(index("max_seqlen", x, x, 4) for x in (3, 5)),
    *(index("max_kvlen", x, x, 10) for x in (9, 11)),
    # rows outside of the cache
    *(index("cachestarts", x, len(x), 3, modes=(0,)) for x in ([16, 12], [16, 12, 5, 0])),
    index(r"cachestarts\[0\]", [MAX_ROWS - 9, 12, 5], MAX_ROWS - 9, 10, MAX_ROWS, modes=(0,)),
    index(r"cachestarts\[2\]", [16, 12, -1], -1, 7, MAX_ROWS, modes=(0,)),
    index("cachestarts", [16, LARGE, 5], LARGE, MAX_ROWS, modes=(0,)),
    index("cachestarts", CACHESTARTS[1][:2], 2, 3, modes=(1,)),
    index(r"cachestarts\[0\]", [[16, 3], [12, 0], [20, 24]], 2, 3, modes=(1,)),
    index(r"cachestarts\[1\]", [[16, 3, 8], [], [20, 24]], 0, 1, modes=(1,)),
    index(r"cachestarts\[0\]\[2\]", page(0, 2, MAX_ROWS - 1), MAX_ROWS - 1, 2, MAX_ROWS, modes=(1,)),
    index(r"cachestarts\[0\]\[1\]", page(0, 1, -1), -1, 4, MAX_ROWS, modes=(1,)),
    index(r"cachestarts\[2\]\[0\]", page(2, 0, LARGE), LARGE, MAX_ROWS, modes=(1,)),
    index("cachestarts", [16, 12, 5], "array|int", modes=(1,)),
    index("cachestarts", [[16, 3, 8], [12, 0, 0], [20, 24, 0]], "16|3", "int|integers", modes=(0,)),
    # a written row that holds another token
    *(index("cachestarts", rows, f"sequence {writer}", f"row {row}", f"sequence {holder}", modes=(mode,))
      for mode, rows, writer, row, holder in (
          (0, [16, 15, 5], 1, 16, 0),  # 1 writes 15 to 18; 0 reads 16 to 24
          (0, [16, 10, 5], "[12]", 10, "[12]"),  # both write
          (0, [0, 12, 0], 2, 5, 0),  # 2 writes 5, which 0 reads
          (1, [[16, 3, 8], [12], [20, 7]], 2, 8, 0),  # pages at any row
          (1, [[16, 3, 8], [12], [20, 20]], 2, 21, 2))),  # in one sequence
    index(r"cachestarts\[1\]\[0\]", page(1, 0, True), "True", "an int", modes=(1,)),
]  # fmt: skip


def calls(packed: bool) -> list[tuple[str, bool, int, int, int]]:
    return list(product(BOTH, [packed], ANY, range(4 if packed else 2), (0, 1) if packed else (0,)))


def bits_of(given: dict[str, Any]) -> list[np.ndarray[Any, Any]]:
    return [to_numpy(x).copy() for x in (given["cache"], given["scale"]) if isinstance(x, mx.array)]


def unchanged(given: dict[str, Any], before: list[np.ndarray[Any, Any]]) -> bool:
    return all(same_bits(a, b) for a, b in zip(bits_of(given), before, strict=True))


def as_array(given: Any) -> Any:
    """Ints of 64 bits, or rows of them of one length, as an array; anything else as it is."""
    if not isinstance(given, list):
        return given
    rows = given if given and isinstance(given[0], list) else [given]
    fits = all(type(x) is int and -(2**63) <= x < 2**63 for row in rows for x in row)
    return mx.array(given, mx.int64) if fits and len(set(map(len, rows))) == 1 else given


@pytest.mark.parametrize("packed", BOOL)
def test_the_good_call_is_good(packed: bool) -> None:
    """Otherwise every refusal could be for another reason. The cache changes here, which the same check
    sees.
    """
    for call in calls(packed):
        given, operator = good_call(*call)
        before = bits_of(given)
        mx.eval(operator(**given))
        assert not any(same_bits(a, b) for a, b in zip(bits_of(given), before, strict=True))


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: f"{next(iter(d.changes))}-{d.words[1:]}"[:60])
def test_refused(defect: Defect) -> None:
    fits = [call for packed in defect.packed for call in calls(packed) if defect.fits(*call)]
    assert fits
    forms = [lambda x: x, *([as_array] if defect.packed == (True,) else [])]
    for call, form in product(fits, forms):
        given, operator = good_call(*call)
        given |= {
            x: change(given[x]) if callable(change) else form(change) for x, change in defect.changes.items()
        }
        before = bits_of(given)
        with pytest.raises(ValueError, match="|".join(OWN_WORDS)) as caught:
            mx.eval(operator(**given))
        for word in defect.words:  # whole numbers and words; for 1 not the 1 of -1
            assert re.search(rf"(?<![\w-])(?:{word})(?!\w)", str(caught.value)), (
                word,
                call,
                str(caught.value),
            )
        assert unchanged(given, before), "the refused call wrote"


ARGUMENTS = [
    (name, packed, argument)
    for name, packed in product(BOTH, BOOL)
    for argument in inspect.signature(good_call(name, packed, 8, 1)[1]).parameters
]


@pytest.mark.parametrize(("name", "packed", "argument"), ARGUMENTS)
def test_any_value(name: str, packed: bool, argument: str) -> None:
    """Every argument with a value of each wrong kind: refused by its name with nothing written, or it
    works.
    """
    for wrong in VALUES:
        for quant_bit, layout in ((8, 0), (4, 1), (0, 1)):
            given, operator = good_call(name, packed, quant_bit, layout, mode=layout if packed else 0)
            before = bits_of(given)
            said = None
            try:
                mx.eval(operator(**(given | {argument: wrong})))
            except ValueError as error:
                said = str(error)
            assert unchanged(given, before) == (said is not None), (wrong, said)
            assert said is None or any(word in said for word in OWN_WORDS), (wrong, said)
            assert said is None or argument in said or argument in DECISIVE, (wrong, said)


def test_a_result_that_mlx_cannot_count() -> None:
    """A page table may name one page so often that the tokens have more elements than 32 bits count."""
    pages, page_size = 2**12, 2**19  # together 2**31 tokens of one element
    tokens = pages * page_size
    arrays = [mx.zeros((2 * page_size, 1, 2, 1, 1), dtype) for dtype in (mx.int8, mx.float16)]
    new, table = mx.ones((1, 1, 1)), [[0] * (pages - 1) + [page_size]]
    shared = (new, new, [0, 1], [0, tokens], table, [tokens - 1])
    options = {"quant_bit": 8, "quant_group": 1, "cache_mode": 1, "page_size": page_size}
    with pytest.raises(ValueError, match="num_repeat is 1; expected at most 0"):
        good_call(CACHE, True, 8, 0)[1](*shared, 1, tokens, *arrays, **options)
    with pytest.raises(ValueError, match=f"max_kvlen is {tokens}; expected 1 to {2**31 - 1}"):
        good_call(ATTENTION, True, 8, 0)[1](
            new, *shared, 0, 1, tokens, *arrays, num_heads=1, head_dim=1, **options
        )
    assert not any(x.any().item() for x in arrays)


FORM = "num_layer=1, layer_idx=0, quant_bit=0, quant_group=8, "
INDEX = "seqstarts, kvstarts, cachestarts, start_pos, "
HEADS = "num_heads, head_dim, is_causal{}, is_alibi=False, num_kv_heads=0, "


@pytest.mark.parametrize(
    ("packed", "name", "expected"),
    [
        (False, CACHE, f"current_key, current_value, start_pos, cache, scale=None, *, {FORM}num_repeat=1, "
         "cache_layout=0"),
        (False, ATTENTION, f"query, current_key, current_value, start_pos, cache, scale=None, "
                           f"attn_mask=None, *, "
         # the last two are kvant's
         f"{HEADS.format('')}{FORM}cache_layout=0, bias_split=None, kernels=None"),
        (True, CACHE, f"current_key, current_value, {INDEX}max_seqlen, max_kvlen, cache, scale=None, *, "
                      f"{FORM}"
         "num_repeat=1, cache_mode=0, cache_layout=0, page_size=128"),
        (True, ATTENTION, f"query, current_key, current_value, {INDEX}decoding_batches, max_seqlen, "
                          f"max_kvlen, cache, "
         f"scale=None, attn_mask=None, *, {HEADS.format('=True')}{FORM}cache_mode=0, cache_layout=0, "
         f"page_size=128"),
    ],
)  # fmt: skip
def test_signature(packed: bool, name: str, expected: str) -> None:
    """Names, order, kinds and defaults of the specification."""
    parameters = inspect.signature(good_call(name, packed, 8, 1)[1]).parameters.values()
    found = str(inspect.Signature([p.replace(annotation=p.empty) for p in parameters]))
    assert found == f"({expected})"


X, Q = mx.ones((2, 8)), quantize(mx.ones((2, 8)))
QUANTIZER = [
    (lambda: quantize(X, quant_bit=0), r"quant_bit\D*0"),
    (lambda: quantize(X, quant_group=3), r"quant_group\D*3"),
    (lambda: quantize(mx.ones((2, 3)), quant_bit=4, quant_group=3), "3.*odd|odd.*3"),
    (lambda: quantize(X.astype(mx.int32)), "int32.*float32"),
    (lambda: quantize(mx.array(1.0)), "quant_group.*0|0.*quant_group"),
    (lambda: dequantize(*Q, quant_bit=16), r"quant_bit\D*16"),
    (lambda: dequantize(Q[0], Q[1][:, :0]), r"scale.*\(2, 0\).*\(2, 1\)"),
    (lambda: dequantize(Q[0], Q[1], quant_bit=4), "int8.*uint8|uint8.*int8"),
]


@pytest.mark.parametrize(("call", "words"), QUANTIZER)
def test_the_quantizer_refuses(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()

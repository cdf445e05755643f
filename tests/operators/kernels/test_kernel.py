"""The fused kernel, run on the host, against the float64 oracle over its whole parameter space; and the
append.

Every access is checked while it runs: tokens past the offset are poison and must not be touched
(docs/operators.md).
"""

from dataclasses import replace
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from support.counts import count
from support.kernel_cases import (
    FORMATS,
    OPTIONS,
    KernelCase,
    check,
    check_append,
    draw,
    expected,
    instances,
    run,
    runs,
)
from support.metal_host import host_pytest_skip
from support.metal_host.run import compiled
from support.operator_cases import FLOATS, check_output, to_mx
from support.oracle import Array, Spec
from support.pmx_cases import draw_values

from kvant.operators.attention import attend_tokens
from kvant.operators.kernels.attend import (
    BIAS_WEIGHTS,
    HEAD_DIMS,
    QUERIES,
    threadgroup_shape,
    unsupported_reason,
)
from kvant.operators.quantization import FITTED_BITS

pytestmark = host_pytest_skip

ALL = instances()
GATE = ALL[2::3]


@pytest.mark.parametrize("instance", count(GATE, ALL), ids=lambda case: str(case.seed))
def test_attention_is_the_oracle_s(instance: KernelCase) -> None:
    for case in runs(instance):
        try:
            check(case)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} in {case}\n{error}") from error


def test_the_cases_cover_what_they_say() -> None:
    """The gate's third too: the formats, and shapes of batches, threadgroups and pages."""
    cases = [case for instance in GATE for case in runs(instance)]
    assert {(*case.bits, case.quant_group) for case in cases} == set(OPTIONS["format"])
    assert {(case.head_dim, case.values) for case in cases} == set(OPTIONS["widths"])
    assert {(case.layout, case.window is None) for case in cases} == set(
        product(("rows", "pages"), (False, True))
    )
    assert {len(set(case.offsets)) for case in cases} >= {1, 2, 3}, "lengths in a batch"
    assert {min(case.offset, 2) for case in cases} == {0, 1, 2}
    assert {case.shape[1] for case in cases} >= {1, 2, 3, 4, 8}, "query groups"
    assert {case.shape[3] for case in cases} == {1, 2, 4, 8}, "queries of a group"
    assert {case.shape[0] > 1 for case in cases} == {False, True}, "several tiles"
    assert {case.firsts[0] > 0 for case in cases} == {False, True}, "a page that left the window"


CASES = {
    # Without stand-ins: up to 17 splits of 64 rows, of a cache of 1,031 that fills.
    **{
        f"{num_keys} keys": KernelCase(
            offset=num_keys - 1, max_tokens=1031, num_kv_heads=1, ratio=1, splits=None
        )
        for num_keys in (1, 255, 256, 257, 1030)
    },
    # 71 queries of one kv head, as Falcon has them: more than a threadgroup takes.
    **{
        f"71 heads, {backend}": KernelCase(ratio=71, num_kv_heads=1, pairs=20, backend=backend, mask="float")
        for backend in QUERIES
    },
}


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_rows_and_heads(name: str) -> None:
    check(CASES[name])


# Instances with an exact tail. A step of one to eight tokens, of one sequence and of three.
TAIL = KernelCase(
    ratio=2, num_kv_heads=1, quant_bit=4, layout="pages", tail="float16", knows_rows=True, seed=1
)
TAILS = {
    "plain": TAIL,
    "4 new tokens": replace(TAIL, new_tokens=4, dtype="float16"),
    "8 new tokens": replace(TAIL, new_tokens=8, tail="bfloat16", dtype="bfloat16", knows_rows=False),
    "one head": replace(TAIL, ratio=1, splits=1),
    "no first tokens": replace(TAIL, new_tokens=4, tail_sinks=0, num_kv_heads=2),
    "a partial tail": replace(TAIL, new_tokens=4, tail_tokens=20),
    "no tail yet": replace(TAIL, new_tokens=2, tail_tokens=0, tail_sinks=0, sinks=True),
    "a window": replace(TAIL, new_tokens=4, window=150),
    "a narrow window": replace(TAIL, new_tokens=4, window=40, splits=2),
    "a narrow window and a partial tail": replace(TAIL, new_tokens=8, window=60, tail_tokens=10, pairs=2),
    "bias split": replace(TAIL, new_tokens=4, pairs=5, sinks=True, num_kv_heads=2),
    "8-bit keys": replace(TAIL, quant_bit=8, value_bit=4, new_tokens=2, softcap=5.0),
    "4-bit keys": replace(TAIL, value_bit=8, pairs=3, tail="bfloat16", head_dim=96),
    "two widths": replace(TAIL, head_dim=192, value_dim=128, new_tokens=2),
    "8 bits, two widths": replace(TAIL, quant_bit=8, head_dim=64, value_dim=128, new_tokens=4, pairs=2),
    "14 queries": replace(TAIL, ratio=7, new_tokens=2, score_scale=0.3, backend="cuda"),
}
# Tokens before a step: about the first ones, a query's tail, the ring and pages.
TAIL_OFFSETS = (0, 1, 2, 3, 4, 5, 60, 63, 99, 104, 106, 107, 108, 109, 111, 112, 119, 120, 123, 124, 125, 127)
TAIL_OFFSETS += (128, 129, 131, 132, 190, 232, 248, 252, 300, 371, 500)


@pytest.mark.parametrize("name", TAILS)
def test_an_exact_tail_is_the_oracle_s(name: str) -> None:
    """Quantized rows that the tail stands for are poison, and so are exact rows that no query sees."""
    number = [*TAILS].index(name)
    offsets = count(TAIL_OFFSETS[number % 8 :: 8], TAIL_OFFSETS)
    for i, offset in enumerate(offsets):
        batch = (1, 3)[(i + number) % 2]
        case = replace(TAILS[name], seed=offset, offset=offset, batch=batch, shorter=offset // 3)
        try:
            check(replace(case, max_tokens=case.num_keys))
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} in {case}\n{error}") from error


def test_exact_rows_are_read_at_every_length() -> None:
    """Of sequences that grow token by token around the ring."""
    for offset in range(*count((100, 260, 23), (0, 400, 1))):
        check(replace(TAIL, seed=offset, offset=offset, max_tokens=offset + 1))


def test_a_threadgroup_fits_metal() -> None:
    """All queries have a place; at most 256 threads; at most 32 KiB of bias weights and partial sums."""
    # or CASES' tiles would be one
    assert all(threadgroup_shape(71, 20, backend, 64)[0] > 1 for backend in QUERIES)
    for queries, D, (backend, most) in product(range(1, 130), HEAD_DIMS, QUERIES.items()):
        for pairs in (0, 1, 13, D // 4, 3 * D // 8, D // 2):
            query_tiles, query_groups, simdgroups, each = threadgroup_shape(queries, pairs, backend, D)
            assert query_tiles * query_groups * each >= queries
            assert (query_tiles - 1) * query_groups * each < queries
            assert each <= most
            assert each.bit_count() == 1
            assert 32 * query_groups * simdgroups <= 256
            sharers = 2 if each * D > 1024 else 4
            assert simdgroups == 1 or query_groups * simdgroups <= sharers
            assert query_groups * each * 2 * pairs <= BIAS_WEIGHTS
            assert 4 * (sharers * each * (D + 2) + (BIAS_WEIGHTS if pairs else 0)) <= 32 * 1024


@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("side", [0, 1], ids=["key", "value"])
def test_a_nan_that_counts_for_one_query_alone(side: int, mask: str) -> None:
    """A query is NaN where the unfused operator's is, which takes the two behind 8 others.

    A key that is not seen yet does no harm. One that a mask leaves out does, and so does a value: 0 times NaN
    is NaN.
    """
    case = KernelCase(
        ratio=1,
        num_kv_heads=1,
        offset=13,
        max_tokens=17,
        new_tokens=2,
        quant_bit=0,
        cache_dtype="float32",
        mask=mask,
    )
    drawn = draw(case)
    if drawn.mask is not None:
        own = np.full((1, 1, 2, case.num_keys), mask == "bool", drawn.mask.dtype)
        own[:, :, 0, 2] = False if mask == "bool" else -np.inf
        drawn = replace(drawn, mask=own)
    drawn.cache[0, 0, side, 0, 2 if mask != "none" else case.num_keys - 1, 7] = np.nan
    key, value = (mx.array(drawn.cache[0, :, i, :, : case.num_keys]) for i in (0, 1))
    before = [(0, 0), (0, 0), (8, 0), (0, 0)]
    given = None if drawn.mask is None else mx.array(np.pad(drawn.mask, before, mode="edge"))
    unfused = attend_tokens(mx.array(np.pad(drawn.query, before)), key, value, mask=given)[:, :, 8:]
    found = np.isnan(np.array(run(case, drawn)))
    np.testing.assert_array_equal(found, np.isnan(np.array(unfused)))
    assert found[0, 0].any(axis=-1).tolist() == [side == 1 or mask != "none", True]


@pytest.mark.parametrize("mask", ["bool", "float"])
def test_new_tokens_share_a_mask(mask: str) -> None:
    """A row for all of them, as a model may give one for padding: the kernel does not look behind it."""
    case = KernelCase(batch=2, new_tokens=3, mask=mask, mask_rank=4, dtype="float32", seed=4)
    drawn = draw(case)
    assert drawn.mask is not None
    shared = drawn.mask[:, :1, :1]
    own = np.broadcast_to(shared, (len(shared), case.num_heads, case.new_tokens, shared.shape[-1]))
    check_output(run(case, replace(drawn, mask=shared)), expected(case, replace(drawn, mask=own)), case.dtype)


def test_large_scores_do_not_overflow() -> None:
    """Scores of thousands, and masks that add the lowest number there is."""
    case = KernelCase(offset=40, max_tokens=44, new_tokens=2, mask="float")
    drawn = draw(case)
    assert drawn.mask is not None
    lowest = np.finfo(np.float32).min
    mask = np.where(np.isneginf(drawn.mask), lowest, drawn.mask * 1e4)
    mask[..., 3] = 5e3  # every query keeps a token
    drawn = replace(drawn, mask=mask.astype(np.float32))
    output = np.array(run(case, drawn))
    np.testing.assert_allclose(output, expected(case, drawn), rtol=2e-4, atol=2e-4)


def test_the_offset_is_read_by_the_kernel() -> None:
    """One text for every offset: nothing is compiled again as the cache fills."""
    cases = [KernelCase(offset=offset, max_tokens=40) for offset in (0, 1, 17, 39)]
    check(cases[0])
    before = compiled.cache_info().misses
    for case in cases:
        check(case)
    assert compiled.cache_info().misses == before


WIDTHS = "64, 80, 96, 128, 192, 256, 512"


@pytest.mark.parametrize(
    ("shape", "form", "value_dim", "reason"),
    [
        ((1, 8, 1, 72), (8, 8), None, f"head_dim 72; it takes {WIDTHS}"),
        ((1, 8, 1, 64), (8, 8), 72, f"values of 72; it takes {WIDTHS}"),
        ((1, 8, 9, 64), (8, 16), None, "9 new tokens; it takes up to 8"),
        ((1, 8, 1, 64), (4, 4), None, "groups of 4; it takes 8, 16, 32, 64, 128"),
        ((1, 8, 1, 64), (0, 4), None, None),
        ((1, 1000, 8, 256), (8, 128), None, None),
        ((1, 8, 8, 192), (4, 64), 128, None),
    ],
)
def test_what_is_refused(
    shape: tuple[int, ...], form: tuple[int, int], value_dim: int | None, reason: str | None
) -> None:
    assert unsupported_reason(shape, quant_bit=form[0], quant_group=form[1], value_dim=value_dim) == reason


@pytest.mark.parametrize("tail", ["", "float16"])
def test_a_sequence_s_numbers_do_not_depend_on_the_others(tail: str) -> None:
    """Bitwise: alone, and beside a sequence that is longer."""
    case = KernelCase(
        batch=2,
        offset=300,
        shorter=200,
        max_tokens=400,
        ratio=2,
        layout="pages",
        pairs=3,
        sinks=True,
        tail=tail,
    )
    drawn = draw(case)
    assert drawn.pages is not None
    both = run(case, drawn)
    for b in range(2):
        own = replace(drawn, query=drawn.query[b : b + 1], pages=drawn.pages[b : b + 1])
        if drawn.tail is not None:
            pages, spans = drawn.tail.pages[b : b + 1], drawn.tail.spans[[b, b]]
            own = replace(own, tail=drawn.tail._replace(pages=pages, spans=spans))
        own_case = replace(case, batch=1, offset=case.offsets[b], shorter=0)
        assert mx.array_equal(run(own_case, own)[0], both[b]).item()


@pytest.mark.parametrize("layout", ["rows", "pages"])
@pytest.mark.parametrize("window", [None, 150])
def test_numbers_do_not_depend_on_whether_the_rows_are_known(layout: str, window: int | None) -> None:
    """Bitwise: a caller that knows the longest sequence's rows starts fewer threadgroups, for the same
    splits.
    """
    case = KernelCase(
        batch=2, offset=300, shorter=200, max_tokens=1500, layout=layout, window=window, splits=24
    )
    drawn = draw(case)
    assert mx.array_equal(run(replace(case, knows_rows=True), drawn), run(case, drawn)).item()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("bits", "value_bits", "group"), [own for own in FORMATS if own[0]])
def test_appended_values_and_scales_are_the_operator_s_to_the_bit(
    bits: int, value_bits: int, group: int, dtype: str
) -> None:
    """In float32 and, MLX rounding a half-precision quotient as the kernel does, in the others too."""
    rng = np.random.default_rng(bits * group + FLOATS.index(dtype))
    D, Dv = (group * int(rng.integers(1, 1 + 640 // group)) for _ in range(2))
    spec, scale_dtype = (
        Spec(dtype, quant_bit=bits, quant_group=group),
        str(rng.choice(["float32", "float16"])),
    )
    for data in ("unit", "ties", "tiny", "zeros", "large"):
        shape = [int(rng.integers(1, top)) for top in (4, 4, 9)]  # B, K, S
        widths = (D, Dv if data in ("ties", "large") else D)
        key, value = (to_mx(draw_values(rng, (*shape, width), data, spec), dtype) for width in widths)
        for fit in {False, FITTED_BITS in (bits, value_bits)}:
            form = {"quant_bit": bits, "value_bit": value_bits, "quant_group": group}
            check_append(key, value, scale_dtype, **form, fit=fit)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_appended_and_no_number_is_not_hidden(bad: float, bits: int, dtype: str) -> None:
    """A NaN anywhere in a group makes its scale NaN, an infinity infinite, as the operator's; no other's."""
    x: Array = np.random.default_rng(3).standard_normal((1, 2, 1, 64)).astype(np.float32)
    for place in (0, 17, 63):
        given = x.copy()
        given[0, 1, 0, place] = bad
        key = to_mx(given, dtype)
        for fit in {False, bits == FITTED_BITS}:
            _, scale = check_append(key, key, quant_bit=bits, quant_group=32, fit=fit)
            assert np.isfinite(np.array(scale)).sum() == 8 - 2
            assert not np.isfinite(np.array(scale)[0, :, 1, 0, place // 32]).any()

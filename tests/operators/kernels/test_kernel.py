"""The fused kernel, run on the host, against the float64 oracle over its whole parameter space.

Every access is checked while it runs: tokens past the offset are poison and must not be touched (docs/host-run.md).
"""

from dataclasses import replace
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from support.kernel_cases import OPTIONS, KernelCase, check, draw, expected, instances, run, runs
from support.metal_host import host_pytest_skip
from support.operator_cases import OUTPUT_TOLERANCE

from kvant.operators.kernels.attend import (
    BIAS_WEIGHT_BYTES,
    HEAD_DIMS,
    QUERIES,
    num_splits,
    threadgroup_shape,
    unsupported_reason,
)

pytestmark = host_pytest_skip

INSTANCES = instances()


@pytest.mark.parametrize("instance", INSTANCES, ids=lambda case: str(case.seed))
def test_attention_is_the_oracle_s(instance: KernelCase) -> None:
    for case in runs(instance):
        try:
            check(case)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} in {case}\n{error}") from error


def test_the_cases_cover_what_they_say() -> None:
    """Not only each value: empty splits, splits of one token or several steps, several query groups, uneven tiles."""
    cases = [case for instance in INSTANCES for case in runs(instance)]
    for name, values in OPTIONS.items():
        if name != "format":
            assert {getattr(case, name) for case in cases} == set(values), name
    assert {(case.quant_bit, case.quant_group) for case in cases} == set(OPTIONS["format"])
    assert {case.batch for case in cases} >= {1, 2, 4}
    assert {case.num_kv_heads for case in cases} == {1, 2, 3}
    assert {case.offset for case in cases} >= {0, 1}
    assert {len(set(case.offsets)) for case in cases} == {1, 2, 3}  # lengths in a batch
    shapes = {case: threadgroup_shape(case.ratio * case.new_tokens, case.pairs or 0, case.backend) for case in cases}
    assert {query_groups for _, query_groups, _, _ in shapes.values()} >= {1, 2, 3, 4, 8}
    assert any(query_tiles > 1 for query_tiles, _, _, _ in shapes.values())
    assert any(np.prod([*shapes[c]]) // shapes[c][2] > c.ratio * c.new_tokens for c in cases), (
        "no tile with fewer queries"
    )
    share = {case: max(-(-case.num_keys // case.splits), case.min_split_tokens) for case in cases}
    assert any(case.num_keys % share[case] == 1 and case.splits > 1 for case in cases), "no split of one token"
    assert any(share[case] * (case.splits - 1) >= case.num_keys for case in cases), "no empty split"
    assert any(share[case] > 2 * case.step for case in cases), "no split of several steps"


@pytest.mark.parametrize("num_keys", [1, 255, 256, 257, 1030])
def test_the_module_s_own_splits(num_keys: int) -> None:
    """Without stand-ins: four splits of at least 64 tokens, of a cache of 1,031 that fills."""
    assert num_splits(1031, 1) == 4
    check(KernelCase(offset=num_keys - 1, max_tokens=1031, num_kv_heads=1, ratio=1, splits=None, min_split_tokens=64))


@pytest.mark.parametrize("backend", QUERIES)
def test_a_cache_of_one_token(backend: str) -> None:
    check(KernelCase(offset=0, max_tokens=1, ratio=8, backend=backend, pairs=3))


@pytest.mark.parametrize("backend", QUERIES)
def test_any_number_of_query_heads(backend: str) -> None:
    """71 queries of one kv head, as Falcon has them: more than a threadgroup takes."""
    query_tiles, query_groups, _, queries = threadgroup_shape(71, 20, backend)
    assert query_tiles > 1
    assert query_tiles * query_groups * queries > 71
    check(KernelCase(ratio=71, num_kv_heads=1, pairs=20, backend=backend, mask="float"))


def test_a_threadgroup_fits_metal() -> None:
    """All queries have a place; at most 256 threads; at most 32 KiB of staged tokens, bias weights and partial sums."""
    for queries, D, backend in product(range(1, 130), HEAD_DIMS, QUERIES):
        for pairs in (0, 1, 13, D // 4, 3 * D // 8, D // 2):
            query_tiles, query_groups, simdgroups, each = threadgroup_shape(queries, pairs, backend)
            assert query_tiles * query_groups * each >= queries
            assert (query_tiles - 1) * query_groups * each < queries
            assert each <= QUERIES[backend]
            assert 32 * query_groups * simdgroups <= 256
            lanes = {64: 8, 96: 16, 128: 16, 256: 32}[D]
            step = simdgroups * 32 // lanes * (2 if each > 4 else 4)
            stage = 2 * step * D if query_groups > 1 else 0
            bias_weights = query_groups * each * 2 * pairs
            assert 4 * (max(stage, simdgroups * query_groups * (D + 2)) + bias_weights) <= 32 * 1024
            assert pairs == 0 or 4 * 2 * pairs * (query_groups * each - query_groups) <= BIAS_WEIGHT_BYTES


def test_a_nan_is_not_hidden() -> None:
    """A NaN in the cache gives NaN, as in the unfused operator, and only where its token counts."""
    case = KernelCase(batch=2, offset=30, max_tokens=32, dtype="float32")
    drawn = draw(case)
    assert drawn.scale is not None
    drawn.scale[0, 1, 0, 1, 12] = np.nan  # a key of sequence 1, kv head 1
    output = np.array(run(case, drawn))
    drawn.scale[0, 1, 0, 1, 12] = 1.0
    right = expected(case, drawn)
    assert np.isnan(output[1, 4:]).all()
    output[1, 4:] = right[1, 4:]
    tolerance = OUTPUT_TOLERANCE["float32"]
    np.testing.assert_allclose(output, right, rtol=tolerance, atol=tolerance)


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
    from support.metal_host import run as host_run

    cases = [KernelCase(offset=offset, max_tokens=40) for offset in (0, 1, 17, 39)]
    check(cases[0])
    before = host_run.compiled.cache_info().misses
    for case in cases:
        check(case)
    assert host_run.compiled.cache_info().misses == before


@pytest.mark.parametrize(
    ("shape", "options", "reason"),
    [
        ((1, 8, 1, 80), {"quant_bit": 8, "quant_group": 16}, "head_dim 80; it takes 64, 96, 128, 256"),
        ((1, 8, 9, 64), {"quant_bit": 8, "quant_group": 16}, "9 new tokens; it takes up to 8"),
        ((1, 8, 1, 64), {"quant_bit": 4, "quant_group": 64 // 16}, "groups of 4; it takes 8, 16, 32, 64, 128"),
        ((1, 8, 1, 64), {"quant_bit": 0, "quant_group": 4}, None),
        ((1, 1000, 8, 256), {"quant_bit": 8, "quant_group": 128}, None),
    ],
)
def test_what_is_refused(shape: tuple[int, ...], options: dict[str, int], reason: str | None) -> None:
    assert unsupported_reason(shape, **options) == reason


def test_splits() -> None:
    """A power of two, by the cache's size alone: 256 tokens or more each, where the cache is full."""
    sizes = {
        (1, 8): 1,
        (511, 8): 1,
        (512, 8): 2,
        (4096, 8): 16,
        (32768, 8): 64,
        (131072, 8): 128,
        (131072, 64): 64,
        (131072, 5000): 1,
    }
    assert {(tokens, heads): num_splits(tokens, heads) for tokens, heads in sizes} == sizes


def test_inputs_are_left_alone() -> None:
    case = KernelCase()
    drawn = draw(case)
    first, again = run(case, drawn), run(case, drawn)
    assert mx.array_equal(first, again).item()

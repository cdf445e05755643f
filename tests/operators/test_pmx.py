"""PMX's operators, static and packed, against one oracle: seeded calls over the whole parameter space.

A failure names the case with its seed; `draw_case(seed)` makes it again. Refused calls are in
test_pmx_errors.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support import oracle
from support.counts import count, half
from support.numbers import peak_bytes
from support.operator_cases import FLOATS, QuantizedTally, check_output, to_numpy
from support.oracle import Array
from support.pmx_cases import FORMS, MASKS, START_FORMS, Call, check_cases, draw_case, good_call, plain_case

from kvant import operators
from kvant.operators import dynamic_batching

CASES, CHUNK = count(1250, 8000), 250
HOW = [{}, {"is_alibi": True}, {"is_causal": False, "mask": "float", "mask_padding": 7}]
on_a_cpu = pytest.mark.skipif(
    mx.default_device().type != mx.cpu, reason="measured on a CPU, where MLX queues ahead"
)


@pytest.mark.parametrize("first", range(0, CASES, CHUNK))
def test_against_the_oracle(first: int) -> None:
    check_cases(range(first, first + CHUNK))


def test_the_cases_cover_the_parameter_space() -> None:
    """The values that depend on others, and the awkward combinations."""
    cases = [draw_case(seed) for seed in range(CASES)]
    for packed, layouts, forms in ((False, 2, START_FORMS), (True, 4, FORMS)):
        cache, attention = ([c for c in cases if (c.packed, c.attends) == (packed, x)] for x in (False, True))
        for part in (cache, attention):
            formats = {(c.spec.quant_bit, c.spec.dtype, c.spec.cache_layout) for c in part}
            assert formats >= {(b, d, x) for b in (0, 8, 4) for d in FLOATS for x in range(layouts)}
            assert {(c.spec.dtype, c.spec.cache_dtype) for c in part} >= {
                (a, b) for a in FLOATS for b in FLOATS
            }
            assert {form for c in part for form in c.forms} == set(forms)
            assert any(min(c.sequences.earlier) > 0 and len(c.sequences.new) > 1 for c in part)
            assert packed or any(c.max_rows[0] > len(c.sequences.new) for c in part)
            assert not packed or any(0 in c.sequences.new for c in part), "no sequence without new tokens"
            for paged in (True, False) if packed else ():
                own = [c for c in part if (c.page_size is not None) == paged]
                assert {(c.spec.quant_bit, c.spec.cache_layout) for c in own} == {f[::2] for f in formats}
                rows = [[row for each in c.sequences.rows or [] for row in each] for c in own]
                assert any(len(set(each)) < len(each) for each in rows), "no rows are shared"
        assert any(c.data == "int8" for c in cache)
        masks = {(c.mask, c.mask_rank, c.mask_padding > 0) for c in attention if c.mask in MASKS[2:]}
        assert len(masks) == (8 if packed else 12)
        assert {c.num_heads for c in attention if c.is_alibi} >= {1, 2, 3, 4, 6, 8, 9, 12}


@pytest.mark.parametrize(("lengths", "quant_bit", "how"), half([(2500, 1), (900, 1100)], [0, 4], HOW))
def test_long_contexts(lengths: tuple[int, int], quant_bit: int, how: dict[str, Any]) -> None:
    """Long enough to be split into blocks, of which the last is not full."""
    call = Call(plain_case(quant_bit, *lengths, **how))
    result = call.run()
    call.check_stored(QuantizedTally())
    call.check_result(result)


@pytest.mark.parametrize("new_tokens", [1, 4])
@pytest.mark.parametrize("size", [4.0, 16.0])
def test_large_float16_keys(new_tokens: int, size: float) -> None:
    """q.k is past float16, at 16 after scaling too; keys differ by a half."""
    query = np.full((1, new_tokens, 1, 64), size, np.float16)
    key = np.full((1, new_tokens + 4, 1, 64), 2000.0, np.float16)
    key[0, :, 0, 0] += np.arange(new_tokens + 4) % 3  # scores differ by 1/2 or 2: exact in float32
    value = np.random.default_rng(2).standard_normal(key.shape).astype(np.float16)
    cache = mx.zeros((1, 1, 2, 1, new_tokens + 4, 64), mx.float16)
    operators.key_value_cache(mx.array(key[:, :4]), mx.array(value[:, :4]), 0, cache, cache_layout=1)
    new, heads = (
        (mx.array(query), mx.array(key[:, 4:]), mx.array(value[:, 4:])),
        {"num_heads": 1, "head_dim": 64},
    )
    output = operators.multi_head_cache_attention(*new, 4, cache, **heads, is_causal=True, cache_layout=1)
    check_output(output, oracle.attend(query, key, value, is_causal=True), "float16")


def peak_of(call: Callable[[], Any], arrays: list[mx.array]) -> int:
    mx.eval(arrays)
    return peak_bytes(lambda: mx.eval(call(), arrays))


@pytest.mark.parametrize("quant_bit", [0, 8])
@pytest.mark.parametrize("layout", range(4))
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("attends", [False, True])
def test_memory_of_a_call_does_not_grow_with_the_cache(
    attends: bool, mode: int, layout: int, quant_bit: int
) -> None:
    """The bound allows what is alive at once on the way (it varies by 20 KB), but no copy of a cache or
    its scale.
    """
    K, D, rows = 2, 32, 20_000
    shape = ((rows, 1, 2, K, D), (1, rows, 2, K, D), (1, 2, rows, K, D), (1, 2, K, rows, D))[layout]
    arrays = [mx.zeros(shape, mx.int8 if quant_bit else mx.float32)]
    arrays += [mx.zeros((*shape[:-1], D // 8), mx.float16)] if quant_bit else []
    new, table = mx.ones((3, K, D)), [[40, 4], [0, 900], [80, 20]] if mode else [900, 0, 40]
    options: dict[str, Any] = {
        "quant_bit": quant_bit,
        "cache_mode": mode,
        "cache_layout": layout,
        "page_size": 4,
    }
    for first in (6, 7):  # the first call may make what is kept
        shared = (new, new, [0, 1, 2, 3], [0, first + 1, 2 * first + 2, 3 * first + 3], table, [first] * 3)
        index = (1, first + 1, *arrays)
        call = partial(dynamic_batching.key_value_cache, *shared, *index, **options)
        if attends:
            attend = dynamic_batching.multi_head_cache_attention
            call = partial(attend, new, *shared, 3, *index, **options, num_heads=K, head_dim=D)
        peak = peak_of(call, [new, *arrays])
    assert 0 < peak < 100_000
    assert arrays[-1].nbytes > 500_000


@on_a_cpu
def test_memory_of_the_attention_does_not_grow_with_the_sequences() -> None:
    """Each sequence's keys and values are dequantized when it is its turn, or while it waits in MLX's
    queue of ten.
    """
    K, D, tokens, most = 2, 64, 512, 64
    arrays = [
        mx.zeros((1, 2, K, most * tokens, D), mx.int8),
        mx.zeros((1, 2, K, most * tokens, D // 8), mx.float16),
    ]
    floats = 2 * K * tokens * D * 4  # of one sequence
    options = {"num_heads": K, "head_dim": D, "quant_bit": 8, "cache_layout": 3}
    new, ends = mx.ones((most, K, D)), list(range(0, (most + 1) * tokens, tokens))
    index = (list(range(most + 1)), ends, ends[:-1], [tokens - 1] * most, most, 1, tokens)
    call = partial(dynamic_batching.multi_head_cache_attention, new, new, new, *index, *arrays, **options)
    assert floats < peak_of(call, [new, *arrays]) < 20 * floats  # 8 where nothing else runs


def spoilt_call(packed: bool, quant_bit: int, which: str, bad: float) -> tuple[Array, list[Array]]:
    """Output and stored arrays of a call in which one element is ``bad``: of the second sequence, head 1."""
    given, operator = good_call("multi_head_cache_attention", packed, quant_bit, 1)
    given["cache"] = mx.full(given["cache"].shape, 3, given["cache"].dtype)
    given["scale"] = mx.full(given["scale"].shape, 0.1) if quant_bit else None
    x = to_numpy(given[which]).copy()
    x[(1, 1, 3) if packed else (1, 0, 1, 3)] = bad if bad else x[(1, 1, 3) if packed else (1, 0, 1, 3)]
    output = operator(**(given | {which: mx.array(x)}))
    return to_numpy(output), [to_numpy(given[name]) for name in ("cache", "scale") if given[name] is not None]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("quant_bit", [0, 8, 4])
@pytest.mark.parametrize("which", ["query", "current_key", "current_value"])
def test_non_finite_values_stay_in_their_row_and_head(
    quant_bit: int, which: str, bad: float, packed: bool
) -> None:
    (clean, clean_stored), (found, found_stored) = (
        spoilt_call(packed, quant_bit, which, x) for x in (0.0, bad)
    )
    own: Any = (slice(1, 5),) if packed else (1,)  # the second sequence's queries
    heads = slice(1, 2) if which == "query" else slice(3, 6)  # of kv head 1
    for x in (clean, found):
        x[(*own, heads) if packed else (1, slice(None), heads)] = 0
    np.testing.assert_allclose(found, clean, rtol=1e-6, atol=1e-6)
    for before, after in zip(clean_stored, found_stored, strict=True):
        differ = np.argwhere((before != after) & ~(np.isnan(before) & np.isnan(after)))
        tokens = {tuple(place[:-1]) for place in differ}
        assert len(tokens) == (which != "query" and len(differ) > 0), "more than one token's head changed"
        assert all(place[-1] < before.shape[-1] / 2 for place in differ), "another group changed"

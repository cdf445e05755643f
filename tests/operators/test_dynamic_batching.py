"""kvant.operators.dynamic_batching against the oracle, and against the static operators sequence by sequence.

A failure names the case with its seed; `draw_packed_case(seed)` makes it again. Refused calls are in
test_dynamic_batching_errors.py.
"""

import sys
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from support import packed_oracle
from support.counts import count
from support.operator_cases import (
    FLOATS,
    QuantizedTally,
    check_output,
    check_returned,
    check_stored,
    draw_values,
    run_cases,
    same_bits,
    to_mx,
    to_numpy,
)
from support.oracle import KEY, VALUE, Array, cast
from support.packed_calls import good_call
from support.packed_cases import FORMS, MASKS, PAGE_SIZES, PackedCase, draw_packed_case, make_cache, make_mask

from kvant import operators
from kvant.operators import dynamic_batching

CASES = count(320, 5000)
CHUNK = 160


class Call:
    """The arrays of a case, in NumPy for the oracle and in MLX for the operators."""

    def __init__(self, case: PackedCase) -> None:
        self.case, spec = case, case.spec
        rng = np.random.default_rng((case.seed, 1))
        shape = (case.new_tokens, case.num_kv_heads, case.head_dim)
        self.key, self.value = draw_values(rng, shape, case), draw_values(rng, shape, case)
        self.cache, self.scale = make_cache(case, rng)
        self.mx_key, self.mx_value = self.given(self.key), self.given(self.value)
        self.mx_cache = to_mx(self.cache, spec.cache_dtype)
        self.mx_scale = None if self.scale is None else to_mx(self.scale, spec.scale_dtype)
        self.rng = rng

    def given(self, x: Array) -> mx.array:
        """(N, heads, D) as an array of its own, or in every third case as a transposed view."""
        if self.case.seed % 3:
            return to_mx(x, self.case.spec.dtype)
        return to_mx(np.ascontiguousarray(x.swapaxes(0, 1)), self.case.spec.dtype).swapaxes(0, 1)

    def check_stored(self, tally: QuantizedTally) -> None:
        case = self.case
        expected = packed_oracle.store(self.key, self.value, case.packing, self.cache, self.scale, case.spec)

        def written(x: Array) -> list[Array]:
            rows = [row for _, row in case.packing.new_tokens()]
            return [packed_oracle.token(x, kind, row, case.spec) for row in rows for kind in (KEY, VALUE)]

        check_stored((self.mx_cache, self.mx_scale), expected, case.spec, written, tally)

    def fetch(self) -> tuple[Array, Array]:
        """Keys and values as they must be read from what is stored now."""
        scale = None if self.mx_scale is None else to_numpy(self.mx_scale)
        return packed_oracle.fetch(self.case.packing, to_numpy(self.mx_cache), scale, self.case.spec)


def check_cache_case(case: PackedCase, tally: QuantizedTally) -> None:
    call = Call(case)
    both = dynamic_batching.key_value_cache(
        call.mx_key,
        call.mx_value,
        cache=call.mx_cache,
        scale=call.mx_scale,
        num_repeat=case.num_repeat,
        **case.index_arguments,
        **case.options,
    )
    call.check_stored(tally)
    for actual, expected, name in zip(both, call.fetch(), ("key", "value"), strict=True):
        check_returned(actual, np.repeat(expected, case.num_repeat, axis=1), case.spec.dtype, name)


def check_attention_case(case: PackedCase, tally: QuantizedTally) -> None:
    call = Call(case)
    query = cast(call.rng.standard_normal((case.new_tokens, case.num_heads, case.head_dim)), case.spec.dtype)
    mask = make_mask(case, call.rng)
    output = dynamic_batching.multi_head_cache_attention(
        call.given(query),
        call.mx_key,
        call.mx_value,
        decoding_batches=case.decoding_batches,
        cache=call.mx_cache,
        scale=call.mx_scale,
        attn_mask=None if mask is None else to_mx(mask, case.mask_dtype),
        **case.index_arguments,
        **case.attention_options,
    )
    call.check_stored(tally)
    expected = packed_oracle.attend(
        query,
        *call.fetch(),
        case.packing,
        decoding_batches=case.decoding_batches,
        is_causal=case.is_causal,
        is_alibi=case.is_alibi,
        attn_mask=mask,
    )
    check_output(output, expected, case.spec.dtype)


def check_case(case: PackedCase, tally: QuantizedTally) -> None:
    check = check_attention_case if case.attends else check_cache_case
    check(case, tally)


@pytest.mark.parametrize("first", range(0, CASES, CHUNK))
def test_against_the_oracle(first: int) -> None:
    run_cases(map(draw_packed_case, range(first, min(first + CHUNK, CASES))), check_case)


def test_the_cases_cover_the_parameter_space() -> None:
    """Every value of every parameter is among the cases, and so are the awkward combinations."""
    cases = [draw_packed_case(seed) for seed in range(CASES)]
    cache, attention = ([case for case in cases if case.attends == attends] for attends in (False, True))
    for part in (cache, attention):
        found = {(c.spec.quant_bit, c.packing.cache_mode, c.spec.cache_layout) for c in part}
        assert found == {(bit, mode, layout) for bit in (0, 8, 4) for mode in (0, 1) for layout in range(4)}
        assert {c.spec.dtype for c in part} - {"int8"} == set(FLOATS)
        assert {c.spec.scale_dtype for c in part if c.spec.quant_bit} == {"float32", "float16"}
        assert {c.spec.layer_idx for c in part} == {0, 1, 2}
        assert {c.packing.page_size for c in part if c.packing.cache_mode} == set(PAGE_SIZES)
        assert {form for c in part for form in c.forms} == set(FORMS)
        assert {c.packing.batch for c in part} == {1, 2, 3, 4}
        assert {c.num_kv_heads for c in part} == {1, 2, 3}
        for mode in (0, 1):
            own = [c for c in part if c.packing.cache_mode == mode]
            assert any(len(set(c.packing.all_rows())) < c.tokens for c in own), "no rows are shared"
            assert any(0 in c.seqlens for c in own), "no sequence without new tokens"
            assert any(c.tokens == c.max_rows for c in own), "no cache is full"
            assert any(min(c.packing.start_pos) > 0 and c.packing.batch > 1 for c in own)
    assert any(c.data == "int8" for c in cache)
    assert {c.num_repeat for c in cache} == {1, 2, 3}
    assert {c.mask for c in attention} == set(MASKS)
    masks = {(c.mask, c.mask_rank, c.mask_padding > 0) for c in attention if c.mask in MASKS[2:]}
    assert len(masks) == 8
    assert {c.mask_dtype for c in attention if c.mask == "float"} == set(FLOATS)
    assert {(c.is_causal, c.is_alibi) for c in attention} == {(a, b) for a in (True, False) for b in (True, False)}
    assert {c.num_heads // c.num_kv_heads for c in attention} == {1, 2, 3, 4}
    causal = [c for c in attention if c.is_causal and not c.is_alibi and max(c.seqlens) > 1]
    assert any(max(c.seqlens[: c.decoding_batches], default=0) > 1 for c in causal), "nothing is not causal"
    assert any(max(c.seqlens[c.decoding_batches :], default=0) > 1 for c in causal), "nothing is causal"
    assert any(c.attention_options["num_kv_heads"] == 0 for c in attention)


# ---- against the static operators ------------------------------------------------------------------------------------

STEPS = ((5, 3, 0), (1, 1, 4), (2, 0, 1), (1, 1, 1))  # new tokens of each sequence
PAGES = [[8, 21, 0], [25, 4, 12], [16, 34, 29]]  # of four rows


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", range(4))
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("quant_bit", [0, 8, 4])
def test_the_same_bits_as_the_static_operators(quant_bit: int, mode: int, layout: int, dtype: str) -> None:
    """A conversation of three sequences in one cache, and of each in its own."""
    H, K, D, G, rows = 4, 2, 16, 8, 40
    width, stored = (D // 2, mx.uint8) if quant_bit == 4 else (D, mx.int8 if quant_bit else mx.float32)

    def arrays(shape: Callable[[int], tuple[int, ...]]) -> dict[str, mx.array]:
        scale = {"scale": mx.zeros(shape(D // G), mx.float16)} if quant_bit else {}
        return {"cache": mx.zeros(shape(width), stored), **scale}

    packed = arrays(lambda x: ((rows, 1, 2, K, x), (1, rows, 2, K, x), (1, 2, rows, K, x), (1, 2, K, rows, x))[layout])
    own = [arrays(lambda x: (1, 1, 2, K, 12, x)) for _ in PAGES]
    options = {"quant_bit": quant_bit, "quant_group": G}
    here = {"cache_mode": mode, "cache_layout": layout, "page_size": 4}
    heads = {"num_heads": H, "num_kv_heads": K, "head_dim": D}
    start_pos = [0, 0, 0]
    for step, seqlens in enumerate(STEPS):
        ends = [start + new for start, new in zip(start_pos, seqlens, strict=True)]
        seq = [sum(seqlens[:b]) for b in range(4)]
        q, k, v = (
            mx.random.normal((seq[-1], x, D), key=mx.random.key(10 * step + i)).astype(getattr(mx, dtype))
            for i, x in enumerate((H, K, K))
        )
        kv = [sum(ends[:b]) for b in range(4)]
        index = (seq, kv, PAGES if mode else [0, 13, 27], start_pos)
        last = step == len(STEPS) - 1
        if last:
            outputs = dynamic_batching.key_value_cache(k, v, *index, 1, max(ends), **packed, **options, **here)
        else:
            longest = (max(seqlens), max(ends))
            outputs = dynamic_batching.multi_head_cache_attention(
                q, k, v, *index, 0, *longest, **packed, is_causal=True, **heads, **options, **here
            )
        for b, new in enumerate(seqlens):
            if not new:
                continue
            now = slice(seq[b], seq[b + 1])
            alone = {**own[b], **options, "cache_layout": 1}
            if last:
                expected = operators.key_value_cache(k[None, now], v[None, now], start_pos[b], **alone)
                pairs = [(x[kv[b] : kv[b + 1]], y[0]) for x, y in zip(outputs, expected, strict=True)]
            else:
                new_tokens = (q[None, now], k[None, now], v[None, now])
                expected = operators.multi_head_cache_attention(
                    *new_tokens, start_pos[b], **alone, is_causal=True, kernels="unfused", **heads
                )
                pairs = [(outputs[now], expected[0])]
            assert all(same_bits(to_numpy(x), to_numpy(y)) for x, y in pairs), (step, b)
        start_pos = ends


# ---- in place --------------------------------------------------------------------------------------------------------


def peak_of_a_call(operator: str, mode: int, layout: int, quant_bit: int, rows: int) -> tuple[int, int]:
    """The most memory that a second call takes above what is held before it, and the bytes of the smaller array."""
    K, D = 2, 32
    shape = ((rows, 1, 2, K, D), (1, rows, 2, K, D), (1, 2, rows, K, D), (1, 2, K, rows, D))[layout]
    arrays = [mx.zeros(shape, mx.int8 if quant_bit else mx.float32)]
    if quant_bit:
        arrays.append(mx.zeros((*shape[:-1], D // 8), mx.float16))
    new = mx.ones((3, K, D))
    peak = 0
    for first in (6, 7):
        starts = ([0, 1, 2, 3], [0, first + 1, 2 * first + 2, 3 * first + 3])
        table = [[40, 4], [0, 900], [80, 20]] if mode else [900, 0, 40]
        decoding, options = (), {"quant_bit": quant_bit, "cache_mode": mode, "cache_layout": layout, "page_size": 4}
        inputs = [new, new]
        if operator == "multi_head_cache_attention":
            inputs, decoding = [new, *inputs], (3,)
            options |= {"num_heads": K, "head_dim": D}
        mx.eval(inputs, arrays)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        call = getattr(dynamic_batching, operator)
        result = call(*inputs, *starts, table, [first] * 3, *decoding, 1, first + 1, *arrays, **options)
        mx.eval(result, arrays)
        peak = mx.get_peak_memory() - before
        del result
    return peak, arrays[-1].nbytes


@pytest.mark.parametrize("quant_bit", [0, 8])
@pytest.mark.parametrize("layout", range(4))
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("operator", ["key_value_cache", "multi_head_cache_attention"])
def test_memory_of_a_call_does_not_grow_with_the_cache(operator: str, mode: int, layout: int, quant_bit: int) -> None:
    """The bound allows what is alive at once on the way (it varies by 20 KB), but no copy of a cache or its scale."""
    for rows in (1_000, 20_000):
        peak, smallest = peak_of_a_call(operator, mode, layout, quant_bit, rows)
        assert 0 < peak < 100_000
    assert smallest > 500_000


@pytest.mark.skipif(mx.default_device().type != mx.cpu, reason="measured on a CPU, where MLX queues ahead")
def test_memory_of_the_attention_does_not_grow_with_the_sequences() -> None:
    """Each sequence's keys and values are dequantized when it is its turn."""
    K, D, tokens, most = 2, 64, 1024, 16
    cache = mx.zeros((1, 2, K, most * tokens, D), mx.int8)
    scale = mx.zeros((1, 2, K, most * tokens, D // 8), mx.float16)
    floats = 2 * K * tokens * D * 4  # of one sequence
    peaks: dict[int, int] = {}
    for B in [4, most] * 3:  # how far MLX queues ahead depends on what else the machine does
        new = mx.ones((B, K, D))
        mx.eval(new, cache, scale)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        starts = (list(range(B + 1)), list(range(0, (B + 1) * tokens, tokens)))
        rows = list(range(0, B * tokens, tokens))
        output = dynamic_batching.multi_head_cache_attention(
            *(new, new, new, *starts, rows, [tokens - 1] * B, B, 1, tokens, cache, scale),
            num_heads=K,
            head_dim=D,
            quant_bit=8,
            cache_layout=3,
        )
        mx.eval(output, cache, scale)
        peaks[B] = min(mx.get_peak_memory() - before, peaks.get(B, sys.maxsize))
    assert floats < peaks[most] < most / 2 * floats
    assert peaks[most] < peaks[4] + 2 * floats


@pytest.mark.parametrize("layout", range(4))
@pytest.mark.parametrize("quant_bit", [0, 8, 4])
def test_a_sequence_of_nan_stays_alone(quant_bit: int, layout: int) -> None:
    outputs = []
    for value in (1.0, float("nan")):
        given = good_call("multi_head_cache_attention", quant_bit, 1, layout) | {"layer_idx": 0}
        given["cache"] = mx.full(given["cache"].shape, 3, given["cache"].dtype)
        if quant_bit:
            given["scale"] = mx.full(given["scale"].shape, 0.1)
        second = mx.arange(7)[:, None, None]
        second = (second >= 1) & (second < 5)  # the new tokens of the second sequence
        for name in ("query", "current_key", "current_value"):
            given[name] = mx.where(second, value, given[name])
        outputs.append(to_numpy(dynamic_batching.multi_head_cache_attention(**given)))
    assert np.isfinite(outputs[0]).all()
    assert all(same_bits(outputs[0][part], outputs[1][part]) for part in (slice(0, 1), slice(5, 7)))


def test_inputs_are_left_alone() -> None:
    """Cache and scale are in-out; all else is not."""
    given = good_call("multi_head_cache_attention", 8, 1, 3)
    given |= {name: mx.array(given[name]) for name in ("seqstarts", "kvstarts", "cachestarts", "start_pos")}
    given["attn_mask"] = mx.zeros((7, 21))
    before = {name: to_numpy(x).copy() for name, x in given.items() if isinstance(x, mx.array)}
    mx.eval(dynamic_batching.multi_head_cache_attention(**given))
    changed = {name for name, bits in before.items() if not same_bits(to_numpy(given[name]), bits)}
    assert changed == {"cache", "scale"}

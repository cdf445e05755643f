"""kvant.operators against the oracle: seeded cases over the whole parameter space.

A chunk of cases is one test. A failure names the case with its seed; `draw_cache_case(seed)` or
`draw_attention_case(seed)` makes it again. Known traps are in test_operator_traps.py, refused calls in
test_operator_errors.py.

B batch, S new tokens, T cached tokens read, H query heads, K kv heads, D head_dim, G group size.
"""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from support import oracle
from support.counts import count
from support.operator_cases import (
    FLOATS,
    Case,
    QuantizedTally,
    check_output,
    check_returned,
    check_stored,
    draw_attention_case,
    draw_cache_case,
    draw_values,
    dtype_name,
    make_cache,
    make_input,
    make_mask,
    run_cases,
    same_bits,
    to_mx,
    to_numpy,
)
from support.oracle import Array, Spec

from kvant.operators import dequantize, key_value_cache, multi_head_cache_attention, quantize

CHUNK = 100
CACHE_CASES, ATTENTION_CASES = count(1400, 2400), count(1400, 2400)
QUANTIZE_CASES, CONVERSATIONS = count(200, 600), count(40, 100)


def chunks(count: int) -> list[range]:
    return [range(first, min(first + CHUNK, count)) for first in range(0, count, CHUNK)]


def by_chunk(cases: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("seeds", chunks(cases), ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")


# ---- one call against the oracle -------------------------------------------------------------------------------------


class Call:
    """The arrays of a case, in NumPy for the oracle and in MLX for the operators."""

    def __init__(self, case: Case) -> None:
        self.case, spec = case, case.spec
        rng = np.random.default_rng((case.seed, 1))
        current = (case.batch, case.new_tokens, case.num_kv_heads, case.head_dim)
        self.key, self.value = draw_values(rng, current, case), draw_values(rng, current, case)
        self.cache, self.scale = make_cache(case, rng)
        self.mask = make_mask(case, rng)
        self.query = self.key
        if case.data != "int8":
            query = rng.standard_normal((case.batch, case.new_tokens, case.num_heads, case.head_dim))
            self.query = oracle.cast(query, spec.dtype)
        self.mx_query, self.mx_key, self.mx_value = (
            make_input(x, spec.dtype, case.strided) for x in (self.query, self.key, self.value)
        )
        self.mx_cache = to_mx(self.cache, spec.cache_dtype)
        self.mx_scale = None if self.scale is None else to_mx(self.scale, spec.scale_dtype)
        self.mx_mask = None if self.mask is None else to_mx(self.mask, case.mask_dtype)

    def stored_now(self) -> tuple[Array, Array | None]:
        """What the operator left in the caller's arrays."""
        return to_numpy(self.mx_cache), None if self.mx_scale is None else to_numpy(self.mx_scale)

    def check_stored(self, tally: QuantizedTally) -> None:
        case = self.case
        expected = oracle.store(self.key, self.value, case.start_pos, self.cache, self.scale, case.spec)

        def written(x: Array) -> list[Array]:
            bounds = (case.batch, case.start_pos, case.num_keys, case.spec)
            return [oracle.tokens(x, kind, *bounds) for kind in (oracle.KEY, oracle.VALUE)]

        check_stored((self.mx_cache, self.mx_scale), expected, case.spec, written, tally)

    def fetch(self) -> tuple[Array, Array]:
        """Keys and values as they must be read from what is stored now, whatever value rounded the other way."""
        return oracle.fetch(self.case.batch, self.case.num_keys, *self.stored_now(), self.case.spec)


def check_cache_case(case: Case, tally: QuantizedTally) -> None:
    call = Call(case)
    key, value = key_value_cache(
        call.mx_key,
        call.mx_value,
        case.start(),
        call.mx_cache,
        call.mx_scale,
        num_repeat=case.num_repeat,
        **case.options,
    )
    call.check_stored(tally)
    for actual, expected, name in zip((key, value), call.fetch(), ("key", "value"), strict=True):
        check_returned(actual, np.repeat(expected, case.num_repeat, axis=2), case.spec.dtype, name)


def check_attention_case(case: Case, tally: QuantizedTally) -> None:
    call = Call(case)
    output = multi_head_cache_attention(
        call.mx_query,
        call.mx_key,
        call.mx_value,
        case.start(),
        call.mx_cache,
        call.mx_scale,
        call.mx_mask,
        **case.attention_options,
    )
    call.check_stored(tally)
    expected = oracle.attend(
        call.query, *call.fetch(), is_causal=case.is_causal, is_alibi=case.is_alibi, attn_mask=call.mask
    )
    check_output(output, expected, case.spec.dtype)


def check_conversation(case: Case, tally: QuantizedTally) -> None:
    """Prefill, a chunk, tokens one by one, a chunk again: every step appends to the same cache."""
    rng = np.random.default_rng((case.seed, 2))
    case = replace(case, start_pos=0, new_tokens=1, max_seq_len=24)
    call = Call(case)
    for new_tokens in (7, 4, 1, 1, 1, 3, 1):
        case = replace(case, new_tokens=new_tokens)
        # The next step starts from what the operator left; check_stored has held it against the oracle's step.
        step = Call(case)
        step.cache, step.scale = call.stored_now()
        step.mx_cache, step.mx_scale = call.mx_cache, call.mx_scale
        output = multi_head_cache_attention(
            step.mx_query,
            step.mx_key,
            step.mx_value,
            case.start(),
            step.mx_cache,
            step.mx_scale,
            step.mx_mask,
            **case.attention_options,
        )
        step.check_stored(tally)
        attention = {"is_causal": case.is_causal, "is_alibi": case.is_alibi, "attn_mask": step.mask}
        check_output(output, oracle.attend(step.query, *step.fetch(), **attention), case.spec.dtype)
        call, case = step, replace(case, start_pos=case.num_keys, seed=int(rng.integers(2**31)) * 2 + case.seed % 2)


@by_chunk(CACHE_CASES)
def test_key_value_cache(seeds: range) -> None:
    run_cases(map(draw_cache_case, seeds), check_cache_case)


@by_chunk(ATTENTION_CASES)
def test_multi_head_cache_attention(seeds: range) -> None:
    run_cases(map(draw_attention_case, seeds), check_attention_case)


@by_chunk(CONVERSATIONS)
def test_conversation(seeds: range) -> None:
    run_cases(map(draw_attention_case, seeds), check_conversation)


@by_chunk(QUANTIZE_CASES)
def test_quantize_and_dequantize(seeds: range) -> None:
    def check(case: Case, tally: QuantizedTally) -> None:
        spec = case.spec
        x = draw_values(np.random.default_rng(case.seed), (case.batch, case.new_tokens, case.head_dim), case)
        # None is x's own dtype, which a cache's scale is not allowed to have in bfloat16 but a bare one may
        given = None if case.strided else spec.scale_dtype
        spec = spec._replace(scale_dtype=given or spec.dtype)
        options = {"quant_bit": spec.quant_bit, "quant_group": spec.quant_group}
        quantized, scale = quantize(
            to_mx(x, spec.dtype), scale_dtype=None if given is None else getattr(mx, given), **options
        )
        expected_levels, expected_scale = oracle.quantize(x, spec)
        assert dtype_name(quantized) == {8: "int8", 4: "uint8"}[spec.quant_bit]
        assert dtype_name(scale) == spec.scale_dtype
        assert (quantized.shape, scale.shape) == (expected_levels.shape, expected_scale.shape)
        actual_levels, actual_scale = to_numpy(quantized), to_numpy(scale)
        unpacked = [oracle.unpack_nibbles(a) if spec.quant_bit == 4 else a for a in (actual_levels, expected_levels)]
        tally.compare(*unpacked, spec.dtype)
        check_returned(scale, expected_scale, spec.scale_dtype, "scale")
        restored = dequantize(quantized, scale, dtype=getattr(mx, spec.dtype), **options)
        check_returned(restored, oracle.dequantize(actual_levels, actual_scale, spec), spec.dtype, "dequantized")

    def draw(seed: int) -> Case:
        case = draw_cache_case(seed)
        bit = (8, 4)[seed % 2] if case.head_dim % 2 == 0 else 8
        spec = case.spec._replace(quant_bit=bit, dtype=FLOATS[seed % 3])
        return replace(case, spec=spec, data="unit" if case.data == "int8" else case.data)

    run_cases(map(draw, seeds), check)


def test_the_cases_cover_the_parameter_space() -> None:
    """Every value of every parameter is among the cases, and the awkward combinations are."""
    cache = [draw_cache_case(seed) for seed in range(CACHE_CASES)]
    attention = [draw_attention_case(seed) for seed in range(ATTENTION_CASES)]
    for cases in (cache, attention):
        for bit, dtypes in ((0, FLOATS), (8, ("int8",)), (4, ("uint8",))):
            for dtype in FLOATS:
                for cache_dtype in dtypes:
                    for layout in (0, 1):
                        wanted = (bit, dtype, cache_dtype, layout)
                        assert any(
                            (c.spec.quant_bit, c.spec.dtype, c.spec.cache_dtype, c.spec.cache_layout) == wanted
                            and c.spec.layer_idx > 0
                            and c.max_batch > c.batch
                            and c.start_pos > 0
                            for c in cases
                        ), wanted
    assert sum(c.spec.dtype == "int8" for c in cache) >= 5
    assert {c.num_repeat for c in cache} == {1, 2, 3}
    masks = {(c.mask, c.mask_rank, c.mask_batch > 1, c.new_tokens > 1, c.is_alibi, c.is_causal) for c in attention}
    for mask in ("float", "bool"):
        for rank in (2, 3, 4):
            assert len([m for m in masks if m[:2] == (mask, rank)]) >= 8, (mask, rank)
    assert {c.num_heads for c in attention if c.is_alibi} >= {1, 2, 3, 4, 6, 8, 9, 12}


# ---- the comparator can fail -----------------------------------------------------------------------------------------


def quantized_call(seed: int) -> Call:
    spec = Spec(cache_dtype="int8", quant_bit=8, quant_group=8, cache_layout=1)
    case = replace(draw_attention_case(seed), spec=spec, head_dim=16, data="unit", mask="none", batch=2, max_batch=2)
    return Call(replace(case, num_kv_heads=2, num_heads=4, start_pos=3, new_tokens=2, max_seq_len=6, start_form="int"))


def one_group_changed(scale: Array) -> Array:
    """The scale with the group of one head in one current token made half as large again."""
    scale = scale.copy()
    scale[0, 1, oracle.VALUE, 1, 4, 0] *= 1.5  # (L, MaxB, 2, K, MaxS, D/G)
    return scale


@pytest.mark.parametrize("seed", range(5))
def test_one_changed_scale_fails_the_comparison(seed: int) -> None:
    """The comparison that the cases rely on notices a single group, in what is stored and in what is computed."""
    call = quantized_call(seed)
    case = call.case
    output = multi_head_cache_attention(
        call.mx_query,
        call.mx_key,
        call.mx_value,
        case.start_pos,
        call.mx_cache,
        call.mx_scale,
        **case.attention_options,
    )
    call.check_stored(QuantizedTally())
    attention = {"is_causal": case.is_causal, "is_alibi": case.is_alibi}
    check_output(output, oracle.attend(call.query, *call.fetch(), **attention), "float32")
    assert call.mx_scale is not None
    call.mx_scale = to_mx(one_group_changed(to_numpy(call.mx_scale)), "float32")
    with pytest.raises(AssertionError, match="stored scale"):
        call.check_stored(QuantizedTally())
    with pytest.raises(AssertionError, match="attention output"):
        check_output(output, oracle.attend(call.query, *call.fetch(), **attention), "float32")


@pytest.mark.parametrize("seed", range(5))
def test_one_changed_scale_fails_the_comparison_of_returned_rows(seed: int) -> None:
    call = quantized_call(seed)
    case = call.case
    both = key_value_cache(call.mx_key, call.mx_value, case.start_pos, call.mx_cache, call.mx_scale, **case.options)
    check_returned(both[1], call.fetch()[1], "float32", "value")
    assert call.mx_scale is not None
    call.mx_scale = to_mx(one_group_changed(to_numpy(call.mx_scale)), "float32")
    with pytest.raises(AssertionError, match="value"):
        check_returned(both[1], call.fetch()[1], "float32", "value")


def test_inputs_are_left_alone() -> None:
    """Cache and scale are in-out; query, key, value and mask are not."""
    call = quantized_call(0)
    mask = mx.zeros((2, 5))
    given = (call.mx_query, call.mx_key, call.mx_value, mask)
    before = [to_numpy(x).copy() for x in given]
    options = call.case.attention_options
    multi_head_cache_attention(*given[:3], 3, call.mx_cache, call.mx_scale, mask, **options)
    for x, bits in zip(given, before, strict=True):
        assert same_bits(to_numpy(x), bits)

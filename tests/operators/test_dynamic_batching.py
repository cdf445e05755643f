"""kvant.operators.dynamic_batching against the oracle, and against the static operators sequence by sequence.

A failure names the case with its seed; `draw_packed_case(seed)` makes it again. Refused calls are in
test_dynamic_batching_errors.py.
"""

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
    to_mx,
    to_numpy,
)
from support.oracle import KEY, VALUE, Array, cast
from support.packed_cases import FORMS, MASKS, PAGE_SIZES, PackedCase, draw_packed_case, make_cache, make_mask

from kvant.operators import dynamic_batching

CASES = count(480, 5000)
CHUNK = 160


class Call:
    """The arrays of a case, in NumPy for the oracle and in MLX for the operators."""

    def __init__(self, case: PackedCase) -> None:
        self.case, spec = case, case.spec
        rng = np.random.default_rng((case.seed, 1))
        shape = (case.new_tokens, case.num_kv_heads, case.head_dim)
        self.key, self.value = draw_values(rng, shape, case), draw_values(rng, shape, case)
        self.cache, self.scale = make_cache(case, rng)
        self.mx_key, self.mx_value = to_mx(self.key, spec.dtype), to_mx(self.value, spec.dtype)
        self.mx_cache = to_mx(self.cache, spec.cache_dtype)
        self.mx_scale = None if self.scale is None else to_mx(self.scale, spec.scale_dtype)
        self.rng = rng

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
        to_mx(query, case.spec.dtype),
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

"""The operators' known traps, each by itself and with the reason why it is one.

B batch, S new tokens, T cached tokens read, H query heads, K kv heads, D head_dim, G group size.
"""

import inspect
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support import oracle
from support.operator_cases import FLOATS, QuantizedTally, check_output, check_returned, same_bits, to_mx, to_numpy
from support.oracle import Array, Spec

from kvant.operators import key_value_cache, multi_head_cache_attention, quantize


def operands(
    rng: np.random.Generator, *, batch: int, new_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[Array, Array, Array]:
    """Unit-scale query, key and value in float32."""
    query = rng.standard_normal((batch, new_tokens, num_heads, head_dim)).astype(np.float32)
    key, value = rng.standard_normal((2, batch, new_tokens, num_kv_heads, head_dim)).astype(np.float32)
    return query, key, value


def empty_cache(
    shape: tuple[int, ...], quant_bit: int, quant_group: int, dtype: mx.Dtype = mx.float32
) -> tuple[mx.array, mx.array | None]:
    """A cache of zeros for keys of the given full shape, and its scale."""
    *outer, head_dim = shape
    if quant_bit == 0:
        return mx.zeros(shape, dtype), None
    scale = mx.zeros((*outer, head_dim // quant_group), dtype)
    if quant_bit == 8:
        return mx.zeros(shape, mx.int8), scale
    return mx.zeros((*outer, head_dim // 2), mx.uint8), scale


def test_prefill_attends_the_past_and_the_quantized_current_rows() -> None:
    """A fused kernel elsewhere attends the unquantized current tokens in prefill, and forgets the past."""
    rng = np.random.default_rng(11)
    cache, scale = empty_cache((1, 1, 2, 1, 8, 4), 4, 4)
    first = operands(rng, batch=1, new_tokens=3, num_heads=1, num_kv_heads=1, head_dim=4)
    second = operands(rng, batch=1, new_tokens=4, num_heads=1, num_kv_heads=1, head_dim=4)
    options: dict[str, Any] = {"num_heads": 1, "head_dim": 4, "is_causal": True}
    options |= {"quant_bit": 4, "quant_group": 4, "cache_layout": 1}
    multi_head_cache_attention(*map(mx.array, first), 0, cache, scale, **options)
    output = multi_head_cache_attention(*map(mx.array, second), 3, cache, scale, **options)
    spec = Spec(cache_dtype="uint8", quant_bit=4, quant_group=4, cache_layout=1)
    keys, values = oracle.fetch(1, 7, to_numpy(cache), None if scale is None else to_numpy(scale), spec)
    check_output(output, oracle.attend(second[0], keys, values, is_causal=True), "float32")
    forgetful = oracle.attend(second[0], keys[:, 3:], values[:, 3:], is_causal=True)
    unquantized = oracle.attend(
        second[0],
        np.concatenate((keys[:, :3], second[1]), axis=1),
        np.concatenate((values[:, :3], second[2]), axis=1),
        is_causal=True,
    )
    for wrong in (forgetful, unquantized):  # these two mistakes are large enough to be seen at this tolerance
        with pytest.raises(AssertionError):
            check_output(output, wrong, "float32")


@pytest.mark.parametrize("how", ["causal", "alibi", "masked"])
@pytest.mark.parametrize("quant_bit", [0, 4])
@pytest.mark.parametrize(("past", "new_tokens"), [(2500, 1), (900, 1100)])
def test_long_contexts(past: int, new_tokens: int, quant_bit: int, how: str) -> None:
    """Long enough for an implementation to split queries or keys into blocks, of which the last is not full."""
    rng = np.random.default_rng(15)
    spec = Spec(quant_bit=quant_bit, cache_dtype="uint8" if quant_bit else "float32", quant_group=8, cache_layout=1)
    cache, scale = empty_cache((1, 1, 2, 2, past + new_tokens + 5, 16), quant_bit, 8)
    cache_options = {"quant_bit": quant_bit, "quant_group": 8, "cache_layout": 1}
    _, *earlier = operands(rng, batch=1, new_tokens=past, num_heads=4, num_kv_heads=2, head_dim=16)
    key_value_cache(*map(mx.array, earlier), 0, cache, scale, **cache_options)
    query, key, value = operands(rng, batch=1, new_tokens=new_tokens, num_heads=4, num_kv_heads=2, head_dim=16)
    mask = None
    if how == "masked":
        mask = np.where(rng.random((new_tokens, past + new_tokens + 3)) > 0.5, 0.0, -np.inf).astype(np.float32)
        mask[-1] = -np.inf
        mask[:, past + new_tokens :] = np.nan
    output = multi_head_cache_attention(
        *map(mx.array, (query, key, value)),
        past,
        cache,
        scale,
        None if mask is None else mx.array(mask),
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        is_causal=how != "masked",
        is_alibi=how == "alibi",
        **cache_options,
    )
    stored = to_numpy(cache), None if scale is None else to_numpy(scale)
    keys, values = oracle.fetch(1, past + new_tokens, *stored, spec)
    attention = {"is_causal": how != "masked", "is_alibi": how == "alibi", "attn_mask": mask}
    check_output(output, oracle.attend(query, keys, values, **attention), "float32")


@pytest.mark.parametrize("new_tokens", [1, 4])
@pytest.mark.parametrize("size", ["past float16 after scaling", "past float16 before scaling"])
def test_large_float16_keys(new_tokens: int, size: str) -> None:
    """q.k of 512,000 must not become infinity in float16, nor lose the half that tells two keys apart."""
    query = np.full((1, new_tokens, 1, 64), 4.0 if size == "past float16 before scaling" else 16.0, np.float16)
    key = np.full((1, new_tokens + 4, 1, 64), 2000.0, np.float16)
    key[0, :, 0, 0] += np.arange(new_tokens + 4) % 3  # scores differ by 1/2 or 2: exact in float32
    value = np.random.default_rng(2).standard_normal(key.shape).astype(np.float16)
    cache = mx.zeros((1, 1, 2, 1, new_tokens + 4, 64), mx.float16)
    options: dict[str, Any] = {"cache_layout": 1}
    key_value_cache(mx.array(key[:, :4]), mx.array(value[:, :4]), 0, cache, **options)
    new = (mx.array(query), mx.array(key[:, 4:]), mx.array(value[:, 4:]))
    options |= {"num_heads": 1, "head_dim": 64, "is_causal": True}
    output = multi_head_cache_attention(*new, 4, cache, **options)
    check_output(output, oracle.attend(query, key, value, is_causal=True), "float16")


@pytest.mark.parametrize("mask_kind", ["float", "bool", "float and causal"])
@pytest.mark.parametrize("is_alibi", [False, True])
@pytest.mark.parametrize("new_tokens", [1, 3])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("quant_bit", [0, 8, 4])
def test_a_fully_masked_row_is_zeros(
    mask_kind: str, is_alibi: bool, new_tokens: int, dtype: str, quant_bit: int
) -> None:
    """Also where the mask leaves only keys that causality takes away."""
    rng = np.random.default_rng(4)
    given = operands(rng, batch=1, new_tokens=new_tokens, num_heads=2, num_kv_heads=1, head_dim=8)
    cache, scale = empty_cache((1, 1, 2, 1, 4, 8), quant_bit, 4)
    keep = np.ones((2, new_tokens, new_tokens), np.bool_)
    keep[1, 0] = False  # head 1, the first query
    if mask_kind == "float and causal":
        keep[1, 0, 1:] = True
    mask = mx.array(keep) if mask_kind == "bool" else mx.where(mx.array(keep), 0.0, -mx.inf)
    output = multi_head_cache_attention(
        *(to_mx(x, dtype) for x in given),
        0,
        cache,
        scale,
        mask,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        is_causal=mask_kind == "float and causal",
        is_alibi=is_alibi,
        quant_bit=quant_bit,
        quant_group=4,
        cache_layout=1,
    )
    output = to_numpy(output)
    assert np.isfinite(output).all()
    np.testing.assert_array_equal(output[0, 0, 1], 0.0)
    assert (np.abs(output).sum(axis=-1) > 0).sum() == 2 * new_tokens - 1, "a query with keys is zero"


def test_causal_needs_more_than_one_query() -> None:
    """One query sees every key, whatever is_causal says."""
    rng = np.random.default_rng(6)
    given = operands(rng, batch=1, new_tokens=1, num_heads=2, num_kv_heads=2, head_dim=4)
    cache = mx.array(rng.standard_normal((1, 1, 2, 6, 2, 4)).astype(np.float32))
    outputs = [
        multi_head_cache_attention(
            *map(mx.array, given), 5, mx.array(cache), num_heads=2, head_dim=4, is_causal=is_causal
        )
        for is_causal in (True, False)
    ]
    np.testing.assert_array_equal(to_numpy(outputs[0]), to_numpy(outputs[1]))


def test_num_repeat_is_interleaved() -> None:
    key = np.arange(2 * 3 * 4, dtype=np.float32).reshape(1, 2, 3, 4)
    cache = mx.zeros((1, 1, 2, 2, 3, 4))
    both = key_value_cache(mx.array(key), mx.array(-key), 0, cache, num_repeat=2)
    for actual, sign in zip(both, (1, -1), strict=True):
        assert [int(h) for h in to_numpy(actual)[0, 0, :, 0]] == [sign * h for h in (0, 0, 4, 4, 8, 8)]
        assert actual.shape == (1, 2, 6, 4)


def test_kv_heads_are_grouped_in_order() -> None:
    """With one token, a query head's output is its kv head's value: heads 0 and 1 read kv head 0, and so on."""
    value = np.arange(3, dtype=np.float32).reshape(1, 1, 3, 1).repeat(2, axis=-1)
    output = multi_head_cache_attention(
        mx.ones((1, 1, 6, 2)),
        mx.array(value),
        mx.array(value),
        0,
        mx.zeros((1, 1, 2, 1, 3, 2)),
        num_heads=6,
        num_kv_heads=3,
        head_dim=2,
        is_causal=True,
    )
    assert to_numpy(output)[0, 0, :, 0].tolist() == [0, 0, 1, 1, 2, 2]


def test_nibble_order() -> None:
    """Element 2i in the low nibble, 2i+1 in the high one, two's complement."""
    quantized, scale = quantize(mx.array([[1.0, -1.0, 7.0, -7.0]]), quant_bit=4, quant_group=4)
    assert (quantized.dtype, quantized.tolist()) == (mx.uint8, [[0xF1, 0x97]])
    assert (scale.dtype, scale.tolist()) == (mx.float32, [[1.0]])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("quant_bit", [8, 4])
def test_ties_go_to_even(dtype: str, quant_bit: int) -> None:
    limit = oracle.max_quantized(quant_bit)
    x = mx.array([[limit, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.5]]).astype(getattr(mx, dtype))
    quantized, _ = quantize(x, quant_bit=quant_bit, quant_group=8)
    found = to_numpy(quantized)
    found = oracle.unpack_nibbles(found) if quant_bit == 4 else found
    assert found.tolist() == [[limit, 0, 2, 2, 0, -2, -2, 4]]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("quant_bit", [8, 4])
def test_an_all_zero_group_has_the_least_scale(dtype: str, quant_bit: int) -> None:
    quantized, scale = quantize(mx.zeros((2, 8), getattr(mx, dtype)), quant_bit=quant_bit, quant_group=4)
    least = oracle.cast(np.array(1e-5), dtype)
    assert not to_numpy(quantized).any()
    np.testing.assert_array_equal(to_numpy(scale), np.full((2, 2), least))


def test_division_is_not_a_reciprocal() -> None:
    """In float16 a multiply by the rounded reciprocal flips about one value in a hundred."""
    x = np.random.default_rng(8).standard_normal((4096, 32)).astype(np.float16)
    quantized, _ = quantize(mx.array(x), quant_bit=8, quant_group=8)
    expected, scale = oracle.quantized_and_scale(x, "float16", 8, 8)
    tally = QuantizedTally()
    tally.compare(to_numpy(quantized), expected, "float16")
    tally.check()
    groups = x.reshape(4096, 4, 8)
    flipped = np.rint(groups * (np.float16(1) / scale[..., None])).reshape(x.shape).astype(np.int8)
    tally = QuantizedTally()
    tally.compare(flipped, expected, "float16")
    with pytest.raises(AssertionError, match="differ by one"):  # the mistake is one that the comparison sees
        tally.check()


@pytest.mark.parametrize("start_pos", [2, mx.array(2), mx.array([2]), mx.array([2], mx.uint8), mx.array([[2]])])
def test_start_pos_is_an_int_or_an_array_of_one_integer(start_pos: int | mx.array) -> None:
    rng = np.random.default_rng(9)
    query, key, value = operands(rng, batch=1, new_tokens=2, num_heads=1, num_kv_heads=1, head_dim=4)
    before = rng.standard_normal((1, 1, 2, 5, 1, 4)).astype(np.float32)
    cache = mx.array(before)
    keys, values = key_value_cache(mx.array(key), mx.array(value), start_pos, cache)
    check_returned(keys, np.concatenate((before[:, 0, 0, :2], key), axis=1), "float32", "key")
    check_returned(values, np.concatenate((before[:, 0, 1, :2], value), axis=1), "float32", "value")
    output = multi_head_cache_attention(
        *map(mx.array, (query, key, value)), start_pos, cache, num_heads=1, head_dim=4, is_causal=True
    )
    expected = oracle.attend(query, to_numpy(keys), to_numpy(values), is_causal=True)
    check_output(output, expected, "float32")


@pytest.mark.parametrize("mask", [None, mx.array([]), mx.zeros((0, 0)), mx.zeros((0,), mx.bool_)])
def test_an_empty_mask_is_none(mask: mx.array | None) -> None:
    rng = np.random.default_rng(10)
    given = operands(rng, batch=1, new_tokens=2, num_heads=1, num_kv_heads=1, head_dim=4)
    options = {"num_heads": 1, "head_dim": 4, "is_causal": False}
    output = multi_head_cache_attention(*map(mx.array, given), 0, mx.zeros((1, 1, 2, 2, 1, 4)), None, mask, **options)
    check_output(output, oracle.attend(*given, is_causal=False), "float32")


@pytest.mark.parametrize("operator", [key_value_cache, multi_head_cache_attention])
def test_signature(operator: Callable[..., Any]) -> None:
    """Names, order, kinds and defaults of the specification."""
    common = {"num_layer": 1, "layer_idx": 0, "quant_bit": 0, "quant_group": 8, "cache_layout": 0}
    required = inspect.Parameter.empty
    positional: dict[str, Any] = dict.fromkeys(("current_key", "current_value", "start_pos", "cache"), required)
    positional["scale"] = None
    keywords: dict[str, Any] = {**common, "num_repeat": 1}
    if operator is multi_head_cache_attention:
        positional = {"query": required, **positional, "attn_mask": None}
        keywords = {**common, **dict.fromkeys(("num_heads", "head_dim", "is_causal"), required)}
        keywords |= {"is_alibi": False, "num_kv_heads": 0}
        keywords |= {"bias_split": None, "kernels": None}  # kvant's extensions; absent, the operator is PMX's
    parameters = inspect.signature(operator).parameters.values()
    kinds = inspect.Parameter
    found = {p.name: p.default for p in parameters if p.kind is kinds.POSITIONAL_OR_KEYWORD}
    assert (list(found), found) == (list(positional), positional)
    assert {p.name: p.default for p in parameters if p.kind is kinds.KEYWORD_ONLY} == keywords


# ---- non-finite input keeps to its own token, head and group ---------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("quant_bit", [8, 4])
def test_non_finite_values_stay_in_their_group(bad: float, dtype: str, quant_bit: int) -> None:
    x = oracle.cast(np.random.default_rng(12).standard_normal((3, 5, 16)), dtype)
    spoilt = x.copy()
    spoilt[1, 2, 5] = bad  # the second group of four
    options = {"quant_bit": quant_bit, "quant_group": 4}
    clean, found = (quantize(to_mx(a, dtype), **options) for a in (x, spoilt))
    for before, after, width in ((clean[0], found[0], 4 * quant_bit // 8), (clean[1], found[1], 1)):
        before, after = to_numpy(before), to_numpy(after)
        for a in (before, after):
            a[1, 2, width : 2 * width] = 0
        assert same_bits(before, after)


@pytest.mark.parametrize("quant_bit", [0, 8, 4])
@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("new_tokens", [1, 3])
def test_non_finite_values_stay_in_their_batch_row_and_head(quant_bit: int, which: str, new_tokens: int) -> None:
    rng = np.random.default_rng(13)
    given = operands(rng, batch=2, new_tokens=new_tokens, num_heads=4, num_kv_heads=2, head_dim=8)
    spoilt = [x.copy() for x in given]
    spoilt[("query", "key", "value").index(which)][1, 0, 1, 3] = np.nan  # sequence 1, token 0, head 1
    results = []
    for arrays in (given, spoilt):
        cache, scale = empty_cache((2, 1, 2, 4, 2, 8), quant_bit, 4)
        output = multi_head_cache_attention(
            *map(mx.array, arrays),
            0,
            cache,
            scale,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            is_causal=True,
            quant_bit=quant_bit,
            quant_group=4,
        )
        results.append([to_numpy(a) for a in (output, cache, scale) if a is not None])
    (clean_output, *clean_stored), (found_output, *found_stored) = results
    own = (1, 0, 1) if which == "query" else (1, slice(None), slice(2, 4))  # (B, S, H, D)
    clean_output[own] = found_output[own] = 0
    np.testing.assert_allclose(found_output, clean_output, rtol=1e-6, atol=1e-6)
    kind = {"query": None, "key": oracle.KEY, "value": oracle.VALUE}[which]
    for clean, found in zip(clean_stored, found_stored, strict=True):
        if kind is not None:  # (MaxB, L, 2, MaxS, K, last): the half of the head that holds the group
            half = clean.shape[-1] // 2
            clean[1, 0, kind, 0, 1, :half] = found[1, 0, kind, 0, 1, :half] = 0
        assert same_bits(clean, found)

"""The known traps of PMX's operators, each by itself and with the reason why it is one.

B batch, S new tokens, T cached tokens read, H query heads, K kv heads, D head_dim, G group size.
"""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support import oracle
from support.operator_cases import FLOATS, QuantizedTally, check_output, check_returned, same_bits, to_mx, to_numpy
from support.oracle import Array, Sequences, Spec

from kvant.operators import key_value_cache, multi_head_cache_attention, quantize


def operands(seed: int, new_tokens: int, H: int, K: int, D: int) -> list[Array]:
    """Unit-scale query, key and value (1, S, heads, D) in float32."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((1, new_tokens, heads, D)).astype(np.float32) for heads in (H, K, K)]


def empty_cache(K: int, rows: int, D: int, quant_bit: int, quant_group: int) -> list[mx.array]:
    """A cache (1, 1, 2, K, rows, D') of zeros, and its scale."""
    width, dtype = {0: (D, mx.float32), 8: (D, mx.int8), 4: (D // 2, mx.uint8)}[quant_bit]
    shape = (1, 1, 2, K, rows)
    return [mx.zeros((*shape, width), dtype), *([mx.zeros((*shape, D // quant_group))] if quant_bit else [])]


def attended(arrays: list[mx.array], query: Array, tokens: int, spec: Spec, **options: Any) -> Array:
    """The oracle's attention to what the cache holds now."""
    stored = [to_numpy(x) for x in arrays]
    key, value = oracle.fetch(Sequences([0], [tokens]), stored[0], stored[1] if len(stored) > 1 else None, spec)
    return oracle.attend(query, key[None], value[None], **options)


@pytest.mark.parametrize("how", ["causal", "alibi", "masked"])
@pytest.mark.parametrize("quant_bit", [0, 4])
@pytest.mark.parametrize(("past", "new_tokens"), [(2500, 1), (900, 1100)])
def test_long_contexts(past: int, new_tokens: int, quant_bit: int, how: str) -> None:
    """Long enough for an implementation to split queries or keys into blocks, of which the last is not full.

    A fused kernel elsewhere attends the unquantized new tokens in prefill, and forgets the past.
    """
    spec = Spec(quant_bit=quant_bit, cache_dtype="uint8" if quant_bit else "float32", cache_layout=1)
    T, H, K, D = past + new_tokens, 4, 2, 16
    arrays, form = empty_cache(K, T + 5, D, quant_bit, 8), {"quant_bit": quant_bit, "cache_layout": 1}
    key_value_cache(*map(mx.array, operands(1, past, H, K, D)[1:]), 0, *arrays, **form)
    query, key, value = operands(2, new_tokens, H, K, D)
    mask = None
    if how == "masked":
        mask = np.where(np.random.default_rng(3).random((new_tokens, T + 3)) > 0.5, 0.0, -np.inf).astype(np.float32)
        mask[-1], mask[:, T:] = -np.inf, np.nan
    attention: dict[str, Any] = {"is_causal": how != "masked", "is_alibi": how == "alibi"}
    output = multi_head_cache_attention(
        *map(mx.array, (query, key, value)), past, *[*arrays, None][:2], None if mask is None else mx.array(mask),
        num_heads=H, num_kv_heads=K, head_dim=D, **form, **attention,
    )  # fmt: skip
    check_output(output, attended(arrays, query, T, spec, attn_mask=mask, **attention), "float32")


@pytest.mark.parametrize("new_tokens", [1, 4])
@pytest.mark.parametrize("size", [4.0, 16.0])
def test_large_float16_keys(new_tokens: int, size: float) -> None:
    """q.k of 512,000 must not become infinity in float16, nor lose the half that tells two keys apart.

    At 16 it is past float16 after scaling, at 4 before.
    """
    query = np.full((1, new_tokens, 1, 64), size, np.float16)
    key = np.full((1, new_tokens + 4, 1, 64), 2000.0, np.float16)
    key[0, :, 0, 0] += np.arange(new_tokens + 4) % 3  # scores differ by 1/2 or 2: exact in float32
    value = np.random.default_rng(2).standard_normal(key.shape).astype(np.float16)
    cache = mx.zeros((1, 1, 2, 1, new_tokens + 4, 64), mx.float16)
    key_value_cache(mx.array(key[:, :4]), mx.array(value[:, :4]), 0, cache, cache_layout=1)
    new = (mx.array(query), mx.array(key[:, 4:]), mx.array(value[:, 4:]))
    output = multi_head_cache_attention(*new, 4, cache, num_heads=1, head_dim=64, is_causal=True, cache_layout=1)
    check_output(output, oracle.attend(query, key, value, is_causal=True), "float16")


@pytest.mark.parametrize("mask_kind", ["float", "bool", "float and causal"])
@pytest.mark.parametrize("is_alibi", [False, True])
@pytest.mark.parametrize("new_tokens", [1, 3])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("quant_bit", [0, 8])
def test_a_fully_masked_row_is_zeros(
    mask_kind: str, is_alibi: bool, new_tokens: int, dtype: str, quant_bit: int
) -> None:
    """Also if the mask leaves only keys that causality takes away."""
    keep = np.ones((2, new_tokens, new_tokens), np.bool_)
    keep[1, 0] = False  # head 1, the first query
    keep[1, 0, 1:] = mask_kind == "float and causal"
    mask = mx.array(keep) if mask_kind == "bool" else mx.where(mx.array(keep), 0.0, -mx.inf)
    output = multi_head_cache_attention(
        *(to_mx(x, dtype) for x in operands(4, new_tokens, 2, 1, 8)), 0,
        *[*empty_cache(1, 4, 8, quant_bit, 4), None][:2], mask, num_heads=2, num_kv_heads=1, head_dim=8,
        is_causal=mask_kind == "float and causal", is_alibi=is_alibi, quant_bit=quant_bit, quant_group=4,
        cache_layout=1,
    )  # fmt: skip
    found = to_numpy(output)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found[0, 0, 1], 0.0)
    assert (np.abs(found).sum(axis=-1) > 0).sum() == 2 * new_tokens - 1, "a query with keys is zero"


def test_division_is_not_a_reciprocal() -> None:
    """In float16 a multiply by the rounded reciprocal flips about one value in a hundred."""
    x = np.random.default_rng(8).standard_normal((4096, 32)).astype(np.float16)
    quantized, _ = quantize(mx.array(x), quant_bit=8, quant_group=8)
    expected, scale = oracle.quantized_and_scale(x, "float16", 8, 8)
    flipped = np.rint(x.reshape(4096, 4, 8) * (np.float16(1) / scale[..., None])).reshape(x.shape).astype(np.int8)
    tallies = [QuantizedTally(), QuantizedTally()]
    for tally, found in zip(tallies, (to_numpy(quantized), flipped), strict=True):
        tally.compare(found, expected, "float16")
    tallies[0].check()
    with pytest.raises(AssertionError, match="differ by one"):  # the mistake is one that the comparison sees
        tallies[1].check()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("quant_bit", [8, 4])
def test_non_finite_values_stay_in_their_group(bad: float, dtype: str, quant_bit: int) -> None:
    x = oracle.cast(np.random.default_rng(12).standard_normal((3, 5, 16)), dtype)
    spoilt = x.copy()
    spoilt[1, 2, 5] = bad  # the second group of four
    clean, found = (quantize(to_mx(a, dtype), quant_bit=quant_bit, quant_group=4) for a in (x, spoilt))
    for before, after, width in ((clean[0], found[0], 4 * quant_bit // 8), (clean[1], found[1], 1)):
        mine, theirs = to_numpy(before), to_numpy(after)
        for a in (mine, theirs):
            a[1, 2, width : 2 * width] = 0
        assert same_bits(mine, theirs)


def test_current_tokens_come_back_as_they_are_stored() -> None:
    """By hand: half a scale is lost on the way."""
    cache, scale = empty_cache(1, 2, 4, 8, 4)
    key = mx.array([[[[127.0, 0.5, 1.5, 2.25]]]])
    keys, values = key_value_cache(key, -key, 0, cache, scale, quant_bit=8, quant_group=4, cache_layout=1)
    check_returned(keys, np.array([[[[127.0, 0.0, 2.0, 2.0]]]], np.float32), "float32", "key")
    check_returned(values, np.array([[[[-127.0, 0.0, -2.0, -2.0]]]], np.float32), "float32", "value")

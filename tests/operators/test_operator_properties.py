"""Laws the operators keep whatever the shapes: no oracle here, only one call held against another.

B batch, S new tokens, H query heads, K kv heads, D head_dim, G group size.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.operator_cases import OUTPUT_TOLERANCE, same_bits, to_numpy
from support.oracle import Array

from kvant.operators import dequantize, key_value_cache, multi_head_cache_attention, quantize

few = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@st.composite
def formats(draw: st.DrawFn) -> dict[str, int]:
    """quant_bit, quant_group and the head_dim they fit."""
    group = draw(st.integers(1, 8))
    return {
        "quant_bit": draw(st.sampled_from([0, 8, 4])),
        "quant_group": group,
        "head_dim": group * draw(st.sampled_from([2, 4])),
    }


class Problem:
    """Operands of random shape, and calls upon caches that may be larger than needed."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.format = draw(formats())
        self.head_dim = self.format.pop("head_dim")
        self.batch, self.tokens = draw(st.integers(1, 3)), draw(st.integers(1, 7))
        self.num_kv_heads, self.group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        self.is_alibi = draw(st.booleans())
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        shape = (self.batch, self.tokens, self.num_kv_heads, self.head_dim)
        self.query = rng.standard_normal((*shape[:2], self.num_heads, self.head_dim)).astype(np.float32)
        self.key, self.value = rng.standard_normal((2, *shape)).astype(np.float32)

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    def cache(self, layout: int = 0, extra: tuple[int, int, int] = (0, 0, 0)) -> tuple[mx.array, mx.array | None]:
        """Zeros, with more sequences, tokens and layers than needed."""
        batch, length, layers = self.batch + extra[0], self.tokens + extra[1], 1 + extra[2]
        outer = (batch, layers, 2, length, self.num_kv_heads)
        if layout == 1:
            outer = (layers, batch, 2, self.num_kv_heads, length)
        bit, width = self.format["quant_bit"], self.head_dim // self.format["quant_group"]
        if bit == 0:
            return mx.zeros((*outer, self.head_dim)), None
        if bit == 8:
            return mx.zeros((*outer, self.head_dim), mx.int8), mx.zeros((*outer, width))
        return mx.zeros((*outer, self.head_dim // 2), mx.uint8), mx.zeros((*outer, width))

    def attend(
        self, cache: mx.array, scale: mx.array | None, first: int = 0, stop: int | None = None, **options: Any
    ) -> Array:
        """The output (B, stop - first, H, D) of tokens first : stop."""
        part = [mx.array(x[:, first:stop]) for x in (self.query, self.key, self.value)]
        heads = {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim}
        options = {"is_causal": True, "is_alibi": self.is_alibi, "attn_mask": None, **heads, **self.format, **options}
        return to_numpy(multi_head_cache_attention(*part, first, cache, scale, **options))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    return Problem(draw)


def near(actual: Array, expected: Array) -> None:
    tolerance = OUTPUT_TOLERANCE["float32"]
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def same_arrays(a: tuple[mx.array, mx.array | None], b: tuple[mx.array, mx.array | None]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(x is y is None or (x is not None and y is not None and mx.array_equal(x, y)) for x, y in pairs)


@few
@given(problem=problems(), cut=st.integers(0, 7))
def test_a_prompt_in_two_parts_is_the_prompt_in_one(problem: Problem, cut: int) -> None:
    cut = 1 + cut % problem.tokens
    whole, parts = problem.cache(), problem.cache()
    expected = problem.attend(*whole)
    outputs = [problem.attend(*parts, 0, cut)]
    if cut < problem.tokens:
        outputs.append(problem.attend(*parts, cut))
    near(np.concatenate(outputs, axis=1), expected)
    assert same_arrays(whole, parts)


@few
@given(problem=problems(), layer=st.integers(0, 2), extra=st.tuples(st.integers(0, 2), st.integers(0, 3)))
def test_layout_and_spare_room_do_not_matter(problem: Problem, layer: int, extra: tuple[int, int]) -> None:
    tight, roomy = problem.cache(), problem.cache(1, (*extra, 2))
    near(problem.attend(*roomy, cache_layout=1, num_layer=3, layer_idx=layer), problem.attend(*tight))
    for small, large in zip(tight, roomy, strict=True):
        if small is None or large is None:
            continue
        # (L, MaxB, 2, K, MaxS, last) -> the owned part -> (B, 2, S, K, last)
        owned = large[layer, : problem.batch, :, :, : problem.tokens].swapaxes(2, 3)
        assert mx.array_equal(owned, small[:, 0])
        assert mx.sum(large != 0) == mx.sum(owned != 0), "something outside the owned part was written"


@few
@given(problem=problems(), padding=st.integers(0, 5), rank=st.integers(2, 4), seed=st.integers(0, 2**32 - 1))
def test_boolean_and_additive_masks_agree(problem: Problem, padding: int, rank: int, seed: int) -> None:
    shape = (problem.batch, problem.num_heads, problem.tokens, problem.tokens + padding)[-rank:]
    keep = np.random.default_rng(seed).random(shape) > 0.4
    added = np.where(keep, 0.0, -np.inf).astype(np.float32)
    added[..., problem.tokens :] = np.nan
    outputs = [problem.attend(*problem.cache(), attn_mask=mx.array(mask)) for mask in (keep, added)]
    near(outputs[0], outputs[1])


@few
@given(problem=problems())
def test_causal_is_a_triangular_mask(problem: Problem) -> None:
    triangle = mx.array(np.tri(problem.tokens, dtype=np.bool_))
    near(
        problem.attend(*problem.cache(), is_causal=False, attn_mask=triangle),
        problem.attend(*problem.cache(), is_causal=True),
    )


@few
@given(problem=problems(), num_repeat=st.integers(1, 4))
def test_num_repeat_repeats_each_head(problem: Problem, num_repeat: int) -> None:
    current = mx.array(problem.key), mx.array(problem.value)
    once = key_value_cache(*current, 0, *problem.cache(), **problem.format)
    repeated = key_value_cache(*current, 0, *problem.cache(), num_repeat=num_repeat, **problem.format)
    for a, b in zip(once, repeated, strict=True):
        assert same_bits(to_numpy(a).repeat(num_repeat, axis=2), to_numpy(b))


@few
@given(problem=problems())
def test_writing_what_was_read_changes_nothing(problem: Problem) -> None:
    """Dequantized tokens lie on the quantizer's own values."""
    if problem.format["quant_bit"] == 0:
        return
    first, second = problem.cache(), problem.cache()
    both = key_value_cache(mx.array(problem.key), mx.array(problem.value), 0, *first, **problem.format)
    key_value_cache(*both, 0, *second, **problem.format)
    assert mx.array_equal(first[0], second[0])


def round_trip(x: Array, quant_bit: int, group: int) -> tuple[Array, Array, Array]:
    """Signed quantized values, their scale, and what they stand for."""
    options = {"quant_bit": quant_bit, "quant_group": group}
    quantized, scale = quantize(mx.array(x), **options)
    values = to_numpy(dequantize(quantized, scale, dtype=mx.float32, **options))
    return np.rint(values / to_numpy(scale).repeat(group, axis=-1)), to_numpy(scale), values


def with_values(law: Callable[[Array, int, int], None]) -> Callable[[], None]:
    """A law of the quantizer, for values of any size."""

    @few
    @given(
        exponent=st.integers(-12, 12),
        quant_bit=st.sampled_from([8, 4]),
        group=st.integers(1, 16),
        seed=st.integers(0, 2**32 - 1),
    )
    def run(exponent: int, quant_bit: int, group: int, seed: int) -> None:
        x = np.random.default_rng(seed).standard_normal((3, 4 * group)).astype(np.float32)
        law(x * np.float32(2.0**exponent), quant_bit, group)

    return run


@with_values
def test_the_error_is_at_most_half_a_scale(x: Array, quant_bit: int, group: int) -> None:
    quantized, scale, values = round_trip(x, quant_bit, group)
    assert np.abs(quantized).max() <= 2 ** (quant_bit - 1) - 1
    bound = scale.repeat(group, axis=-1) / 2
    assert (np.abs(values - x) <= bound * (1 + 1e-4)).all()  # the largest value may be a rounding beyond


@with_values
def test_the_quantizer_is_odd(x: Array, quant_bit: int, group: int) -> None:
    quantized, scale, _ = round_trip(x, quant_bit, group)
    negative_quantized, same_scale, _ = round_trip(-x, quant_bit, group)
    assert same_bits(scale, same_scale)
    np.testing.assert_array_equal(negative_quantized, -quantized)


@with_values
def test_the_largest_of_a_group_has_the_largest_value(x: Array, quant_bit: int, group: int) -> None:
    quantized, scale, _ = round_trip(x, quant_bit, group)
    peaks = np.abs(quantized).reshape(-1, group).max(axis=-1)  # (3, 4 * G) -> (12, G)
    assert (peaks[scale.ravel() > np.float32(1e-5)] == 2 ** (quant_bit - 1) - 1).all()

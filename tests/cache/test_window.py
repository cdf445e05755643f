"""The ring of a sliding window, against attention over everything in float64, and mlx-lm's rotating cache."""

import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import RotatingKVCache
from support.counts import count
from support.numbers import relative_error
from support.oracle import Array

from kvant.cache import CompiledCacheView, ModelCache, QuantizedKVCache, WindowKVCache
from kvant.cache.window import SLACK
from kvant.errors import ContextError
from kvant.operators.bias_split import BiasSplit
from kvant.operators.kernels import launch
from kvant.operators.quantization import dequantize, quantize
from kvant.operators.rotary import Rotary

H, K, D, GROUP, RESERVED = 4, 2, 32, 16, 1200
THETA, PAIRS = 100.0, (0, 3, 11)
ROTARY = Rotary.plain(D, THETA)
TOLERANCE = 1e-5


def _normal(rng: np.random.Generator, *shape: int) -> mx.array:
    return mx.array(rng.standard_normal(shape).astype(np.float32))


def _seen(start: int, end: int, window: int | None, keep: int) -> Array:
    """(new, tokens) boolean, by the definition."""
    query, token = np.arange(start, end)[:, None], np.arange(end)
    near = token > query - (window or end + 1)
    return (token <= query) & (near | (token < keep))


class _Layer:
    """One layer's cache, and everything that was given to it in float64."""

    def __init__(self, rng: np.random.Generator, window: int | None, keep: int, options: dict[str, Any]) -> None:
        self.window, self.keep, self.bits = window, keep, options["kv_bits"]
        self.key_bias, self.value_bias = np.zeros((K, 2, D // 2)), np.zeros((K, D))
        split = None
        if options.pop("split"):
            self.key_bias[..., list(PAIRS)] = rng.standard_normal((K, 2, len(PAIRS))).astype(np.float32)
            self.value_bias = rng.standard_normal((K, D)).astype(np.float32)
            split = BiasSplit(
                mx.array(self.key_bias[..., list(PAIRS)].astype(np.float32)),
                PAIRS,
                mx.zeros((2, len(PAIRS), 0)),
                mx.array(self.value_bias),
            )
        sinks = options.pop("sinks")
        self.sinks = _normal(rng, H) if sinks else None
        slack = options.pop("slack")
        options = options | {"kv_group_size": GROUP, "dtype": mx.float32, "scale_dtype": mx.float32}
        self.split, self.ring = split, {"window": window, "keep": keep, "slack": slack, "rotary": ROTARY}
        self.options = options
        self.cache = self.empty(RESERVED)
        self.keys, self.values = np.zeros((K, 0, D)), np.zeros((K, 0, D))

    def empty(self, reserved: int) -> QuantizedKVCache:
        """A cache in this format that holds nothing."""
        split = self.split
        if self.window is not None:
            return WindowKVCache(reserved, K, D, bias_split=split, **self.ring, **self.options)
        if split is not None:
            split = replace(split, rotation=mx.array(_turns(np.arange(reserved)), mx.float32))
        return QuantizedKVCache(reserved, K, D, bias_split=split, **self.options)

    def attend(self, rng: np.random.Generator, new: int, start: int, mask: Array | None) -> float:
        """Attend through the cache; the largest difference from attention over everything."""
        query, key, value = (_normal(rng, 1, heads, new, D) for heads in (H, K, K))
        given = None if mask is None else mx.array(mask)
        output = np.array(self.cache.attend(query, key, value, given, self.sinks), np.float64)
        self.keys, self.values = (
            np.concatenate([held[:, :start], self._stored(fresh[0])], axis=1)
            for held, fresh in ((self.keys, key), (self.values, value))
        )
        wanted = self._expected(np.array(query[0], np.float64), start, start + new, mask)
        return float(np.abs(output[0] - wanted).max() / np.abs(wanted).max())

    def _stored(self, x: mx.array) -> Array:
        """What quantization leaves of it."""
        if self.bits:
            x = dequantize(*quantize(x, quant_bit=self.bits, quant_group=GROUP), quant_bit=self.bits, quant_group=GROUP)
        return np.array(x, np.float64)

    def _expected(self, query: Array, start: int, end: int, mask: Array | None) -> Array:
        cosine, sine = _turns(np.arange(end))  # (P, end)
        turned = np.zeros((K, end, D))
        for i, p in enumerate(PAIRS):
            first, second = self.key_bias[:, 0, p, None], self.key_bias[:, 1, p, None]
            turned[..., p] = first * cosine[i] - second * sine[i]
            turned[..., p + D // 2] = first * sine[i] + second * cosine[i]
        key = np.repeat(self.keys + turned, H // K, axis=0)
        value = np.repeat(self.values + self.value_bias[:, None], H // K, axis=0)
        scores = np.einsum("hsd,htd->hst", query, key) / math.sqrt(D)
        scores = np.where(_seen(start, end, self.window, self.keep), scores, -np.inf)
        if mask is not None:
            scores = scores + mask[:, :end]
        top = scores.max(axis=-1, keepdims=True)
        sink = 0.0
        if self.sinks is not None:
            sinks = np.array(self.sinks, np.float64)[:, None, None]
            top = np.maximum(top, sinks)
            sink = np.exp(sinks - top)
        weights = np.exp(scores - top)
        result: Array = (weights @ value) / (weights.sum(axis=-1, keepdims=True) + sink)
        return result


def _turns(positions: Array) -> Array:
    """Cosine and sine of the split pairs, by the definition of rotary positions: (2, P, positions)."""
    angle = np.array([THETA ** (-2 * p / D) for p in PAIRS])[:, None] * positions
    return np.stack([np.cos(angle), np.sin(angle)])


class _Machine(RuleBasedStateMachine):
    """A model's cache whose layers have different windows. Steps are committed, in part, or not at all."""

    @initialize(
        seed=st.integers(0, 2**32 - 1),
        bits=st.sampled_from([0, 8, 4]),
        windows=st.lists(st.sampled_from([None, 1, 8, 20, 29, 90]), min_size=2, max_size=3),
        keep=st.sampled_from([0, 0, 4]),
        slack=st.sampled_from([0, 7, SLACK]),
        split=st.booleans(),
        sinks=st.booleans(),
    )
    def make(self, seed: int, windows: list[int | None], keep: int, bits: int, **options: Any) -> None:
        self.rng = np.random.default_rng(seed)
        self.slack = options["slack"]
        self.windows = [window for window in windows if window is not None]
        self.layers = [_Layer(self.rng, w, keep, options | {"kv_bits": bits}) for w in windows]
        self.cache = ModelCache([layer.cache for layer in self.layers])
        self.nbytes = self.cache.nbytes
        self.keep = keep
        self.most = 0  # that it has had since it was empty

    def _step(self, new: int, masked: bool) -> None:
        length = self.cache.offset
        self.cache.begin(mx.zeros((1, new), mx.int32))
        mask = None
        if masked:
            mask = np.where(self.rng.random((new, length + new)) < 0.2, -3.0, 0.0).astype(np.float32)
        for layer in self.layers:
            assert layer.attend(self.rng, new, length, mask) < TOLERANCE
        if new <= self.slack + 1:
            self.most = max(self.most, length + new)

    @precondition(lambda self: self.cache.offset < RESERVED - 200)
    @rule(
        new=st.one_of(st.integers(1, 3), st.integers(1, 40), st.integers(1, 200)),
        fate=st.sampled_from(["committed", "committed", "committed", "in part", "abandoned"]),
        masked=st.booleans(),
    )
    def append(self, new: int, fate: str, masked: bool) -> None:
        self._step(new, masked)
        if fate != "abandoned":
            kept = new if fate == "committed" else int(self.rng.integers(new + 1))
            self.cache.commit(kept, ids=[[0] * kept])
            self.most = max(self.most, self.cache.offset)

    @rule(share=st.floats(0, 1))
    def trim_what_the_slack_has(self, share: float) -> None:
        """Up to slack + 1 tokens back from the most there were; any number while no ring is full."""
        length = self.cache.offset
        is_full = any(self.most > self.keep + window + self.slack for window in self.windows)
        can = max(0, length - self.most + self.slack + 1) if is_full else length
        lost = min(length, round(share * can))
        assert self.cache.trim(lost) == lost
        self.most = self.most if self.cache.offset else 0

    @rule()
    def trim_more(self) -> None:
        """Refused, and nothing changes."""
        length = self.cache.offset
        ring = min((self.keep + window + self.slack for window in self.windows), default=self.most)
        back = length - self.most + self.slack + 2
        if self.most > ring and 0 < back < length:
            assert not self.cache.can_trim_to(length - back)
            with pytest.raises(ValueError, match="its windows or states go back no further"):
                self.cache.trim(back)
        assert self.cache.offset == length

    def _take(self, cache: ModelCache) -> None:
        """Go on with another cache."""
        self.cache = cache
        for layer, own in zip(self.layers, cache, strict=True):
            layer.cache = own

    @rule(reserved=st.one_of(st.just(RESERVED), st.integers(0, 40)))
    def save_and_load(self, reserved: int) -> None:
        """Into the same room, or into as much as the tokens need and a little more; and back."""
        before = self.cache.lengths, self.cache.ids
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "saved"
            self.cache.save(path)
            room = reserved if reserved == RESERVED else max(1, reserved + self.cache.offset)
            for size in (room, RESERVED):  # the last one has the room for more
                self._take(ModelCache([layer.empty(size) for layer in self.layers]))
                self.cache.load(path)
                assert (self.cache.lengths, self.cache.ids) == before
                self.cache.save(path)

    @rule(new=st.integers(1, 60), keep_the_copy=st.booleans())
    def fork(self, new: int, keep_the_copy: bool) -> None:
        """What one of two is given does not reach the other."""
        one, other = self.cache, self.cache.fork()
        if keep_the_copy:
            one, other = other, one
        if other.offset + new < RESERVED:
            other.begin(mx.zeros((1, new), mx.int32))
            for layer in other:
                rows = [_normal(self.rng, 1, heads, new, D) for heads in (H, K, K)]
                mx.eval(layer.attend(*rows))
            other.commit()
        self._take(one)

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.most = 0

    @invariant()
    def its_bytes_stay(self) -> None:
        if hasattr(self, "cache"):
            assert self.cache.nbytes == self.nbytes


TestMachine = pytest.mark.filterwarnings("ignore")(_Machine.TestCase)
TestMachine.settings = settings(
    max_examples=count(12, 2000), stateful_step_count=count(20, 40), deadline=None, print_blob=True
)


@pytest.mark.parametrize("bits", [0, 8, 4])
def test_the_rows_and_bytes(bits: int) -> None:
    """keep + window + slack rows, or as many as are reserved; all there from the start."""
    for reserved, rows in ((1000, 4 + 40 + 8), (30, 30)):
        layer = WindowKVCache(reserved, K, D, window=40, keep=4, slack=8, kv_bits=bits, kv_group_size=16)
        row = 2 * K * (D * 2 if not bits else D * bits // 8 + D // 16 * 2)
        assert layer.nbytes == rows * row
        assert layer.num_rows == rows


def test_more_tokens_than_are_reserved() -> None:
    layer = WindowKVCache(20, K, D, window=4)
    x = mx.zeros((1, K, 15, D))
    layer.attend(mx.zeros((1, H, 15, D)), x, x)
    with pytest.raises(ContextError, match="6 more tokens do not fit: 15 of the 20 reserved"):
        layer.attend(mx.zeros((1, H, 6, D)), x[:, :, :6], x[:, :, :6])
    assert layer.offset == 15


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"window": 0}, "window is 0; expected an int, 1 or more"),
        ({"window": 4, "keep": -1}, "keep is -1"),
        ({"window": 4, "slack": True}, "slack is True"),
    ],
)
def test_sizes_out_of_range(argument: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WindowKVCache(20, K, D, **argument)


@pytest.mark.parametrize(("keep", "steps"), [(0, [30, 1, 1, 17, 5, 1, 60, 2, 1]), (4, [40, *[1] * 60])])
def test_mlx_lm_agrees_where_it_is_right(keep: int, steps: list[int]) -> None:
    """Without kept tokens; with them only one token at a time after the prompt: its mask goes by the row's number."""
    rng = np.random.default_rng(0)
    size = 24
    ours = WindowKVCache(500, K, D, window=size - keep, keep=keep, kv_bits=0, dtype=mx.float32)
    theirs = RotatingKVCache(max_size=size, keep=keep)
    for i, new in enumerate(steps):
        query, key, value = (_normal(rng, 1, heads, new, D) for heads in (H, K, K))
        mask = theirs.make_mask(new)
        rows = theirs.update_and_fetch(key, value)
        expected = scaled_dot_product_attention(query, *rows, cache=theirs, scale=1 / math.sqrt(D), mask=mask)
        output = ours.attend(query, key, value)
        if keep == 0 or i > 0:  # its prompt's mask drops the kept tokens
            assert relative_error(output, expected) < TOLERANCE


def test_a_long_append_holds_no_more_than_itself() -> None:
    """What waits for the commit is written then, and given up."""
    layer = WindowKVCache(500, K, D, window=20)
    cache = ModelCache([layer])
    rng = np.random.default_rng(1)
    for _ in range(3):
        cache.begin(mx.zeros((1, 60), mx.int32))
        layer.attend(*(_normal(rng, 1, heads, 60, D) for heads in (H, K, K)))
        assert layer._pending or cache.offset == 0
        cache.commit(ids=[[0] * 60])
        assert not layer._pending


def _layer(rng: np.random.Generator, **options: Any) -> _Layer:
    given = {"kv_bits": 8, "split": True, "sinks": False, "slack": 7} | options
    return _Layer(rng, 20, 0, given)


def test_an_abandoned_step_takes_from_the_slack() -> None:
    """Its tokens overwrote rows. What is still exact is allowed, one more is not."""
    rng = np.random.default_rng(3)
    for back, exact in ((3, True), (4, False)):
        layer = _layer(rng)
        cache = ModelCache([layer.cache])
        for new in (50, 5):
            cache.begin(mx.zeros((1, new), mx.int32))
            assert layer.attend(rng, new, cache.offset, None) < TOLERANCE
            if new == 50:
                cache.commit(ids=[[0] * new])
        assert cache.can_trim_to(50 - back) is exact
        if exact:
            assert cache.trim(back) == back
            cache.begin(mx.zeros((1, 1), mx.int32))
            assert layer.attend(rng, 1, cache.offset, None) < TOLERANCE
        else:
            with pytest.raises(ValueError, match="can forget all, or the last 3"):
                cache.trim(back)


# New tokens, how many of them are committed. A ring of 2 + 12 + 7 rows wraps.
STEPS = [(9, 4), (3, 3), (40, 22), (1, 1), (4, 1), (2, 2), (3, 3), (2, 0), (1, 1)]
# Sinks take no instance of the kernel of their own.
MIXED = [(0, "sinks", False), (8, "split sinks", False), (4, "split", False), (8, "sinks", True), (4, "split", True)]


@pytest.mark.parametrize(("bits", "extras", "masked"), MIXED)
def test_the_fused_kernel_agrees(
    bits: int, extras: str, masked: bool, launches: list[tuple[str, list[mx.array]]]
) -> None:
    """Its text, executed on the host: rows out of order, angles in the order of the rows, a mask of ours."""
    rng = np.random.default_rng(4)
    caches = [ModelCache([_wide(bits, "split" in extras, kernels)]) for kernels in ("fused", "unfused")]
    for step, (new, kept) in enumerate(STEPS):
        query, key, value = (_normal(rng, 1, heads, new, 64) for heads in (H, K, K))
        mask = _normal(rng, *((1, H) if step % 2 else ()), new, caches[0].offset + new) if masked else None
        if masked and step % 3 == 0:
            mask = mask > -1 if mask is not None else None
        sinks = _normal(rng, H) if "sinks" in extras else None
        launches.clear()
        outputs = []
        for cache in caches:
            cache.begin(mx.zeros((1, new), mx.int32))
            outputs.append(cache[0].attend(query, key, value, mask, sinks))
            mx.eval(outputs[-1], cache[0].arrays)
            cache.commit(kept, ids=[[0] * kept])
        attends = [inputs for name, inputs in launches if name == "attend"]
        assert len(attends) == (new <= 8)
        assert all((_input(inputs, "mask").size > 1) is masked for inputs in attends)
        assert relative_error(*outputs) < TOLERANCE
    assert caches[0].offset == 37


def test_a_step_that_waits_is_unfused(launches: list[tuple[str, list[mx.array]]]) -> None:
    """Its tokens would overwrite rows that they see."""
    rng = np.random.default_rng(4)
    layers = [_wide(8, True, kernels, slack=2) for kernels in ("fused", "unfused")]
    for new, fused in ((8, True), (3, True), (8, False), (4, False), (3, True)):
        query, key, value = (_normal(rng, 1, heads, new, 64) for heads in (H, K, K))
        launches.clear()
        outputs = [layer.attend(query, key, value) for layer in layers]
        assert [name for name, _ in launches].count("attend") == fused
        assert relative_error(*outputs) < TOLERANCE


@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("kernels", ["unfused", "fused"])
@pytest.mark.parametrize("length", [9, 40])
def test_a_compiled_steps_operations(checked_gpu: None, bits: int, kernels: str, length: int) -> None:
    """The offset is an array. Before the ring is full, and after; with sinks."""
    rng = np.random.default_rng(6)
    cache, other = (ModelCache([_wide(bits, False, which)]) for which in (kernels, "unfused"))
    held = [_normal(rng, 1, heads, 40, 64) for heads in (H, K, K)]
    new = [_normal(rng, 1, heads, 1, 64) for heads in (H, K, K)]
    sinks = _normal(rng, H)
    for each in (cache, other):
        each.begin(mx.zeros((1, length), mx.int32))
        mx.eval(each[0].attend(*(x[:, :, :length] for x in held)))
        each.commit(ids=[[0] * length])
        each.begin(mx.zeros((1, 1), mx.int32))
    given = CompiledCacheView(cache[0], mx.array(length), 64).attend(*new, sinks=sinks)
    assert relative_error(given, other[0].attend(*new, sinks=sinks)) < TOLERANCE
    for mine, theirs in zip(cache[0].arrays, other[0].arrays, strict=True):
        assert mx.array_equal(mine, theirs).item()


def _input(inputs: list[mx.array], name: str) -> mx.array:
    return dict(zip(launch.INPUTS["attend"], inputs, strict=True))[name]


def _wide(bits: int, split: bool, kernels: str, slack: int = 7) -> WindowKVCache:
    """A cache with a head_dim that the kernel takes; the same at every call."""
    rng, bias = np.random.default_rng(5), None
    if split:
        bias = BiasSplit(_normal(rng, K, 2, len(PAIRS)), PAIRS, mx.zeros((2, len(PAIRS), 0)), _normal(rng, K, 64))
    return WindowKVCache(
        500,
        K,
        64,
        window=12,
        keep=2,
        slack=slack,
        kv_bits=bits,
        dtype=mx.float32,
        bias_split=bias,
        rotary=Rotary.plain(64, THETA),
        kernels=kernels,
    )


def test_a_split_without_pairs_does_not_grow() -> None:
    """Its angles are read by nobody. Written all the same, they were a chain of arrays, one a token."""
    split = BiasSplit(mx.zeros((K, 2, 0)), (), mx.zeros((2, 0, 0)), mx.ones((K, D)))
    layer = WindowKVCache(RESERVED, K, D, window=8, bias_split=split, rotary=ROTARY)
    query, key = mx.ones((1, H, 1, D)), mx.ones((1, K, 1, D))
    mx.eval(query, key)
    active = []
    for _ in range(300):
        mx.eval(layer.attend(query, key, key))
        active.append(mx.get_active_memory())
    assert active[-1] <= active[50]


def test_a_length_below_zero() -> None:
    layer = WindowKVCache(20, K, D, window=4)
    with pytest.raises(ValueError, match="num_tokens is -1; expected an int, 0 or more"):
        ModelCache([layer]).trim_to(-1)

"""The ring of a sliding window, against attention over everything in float64."""

import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvant.cache.window import SLACK
from support.counts import count
from support.numbers import relative_error
from support.pool_oracle import OracleLayer

from kvant.cache import ModelCache, QuantizedKVCache, WindowKVCache
from kvant.operators.bias_split import BiasSplit, rotation_table
from kvant.operators.rotary import Rotary

H, K, D, RESERVED = 4, 2, 32, 1200
THETA, PAIRS = 100.0, (0, 3, 11)
TOLERANCE = 1e-5


def _normal(rng: np.random.Generator, *shape: int) -> mx.array:
    return mx.array(rng.standard_normal(shape).astype(np.float32))


def _heads(rng: np.random.Generator, new: int, width: int = D) -> list[mx.array]:
    """A query, a key and a value of new tokens."""
    return [_normal(rng, 1, heads, new, width) for heads in (H, K, K)]


class _Layer:
    """One layer's cache, and everything that was given to it."""

    def __init__(self, rng: np.random.Generator, ring: dict[str, Any], bits: int, split: bool, sinks: bool) -> None:
        self.ring, self.bits = ring, bits
        self.biases = (_normal(rng, K, 2, len(PAIRS)), _normal(rng, K, D)) if split else None
        self.sinks = _normal(rng, H) if sinks else None
        self.cache = self.empty(RESERVED)
        frequencies = THETA ** (-2 * np.arange(D // 2) / D)
        self.oracle = OracleLayer(self.cache.format, self.cache.bias_split, frequencies)

    def empty(self, reserved: int) -> QuantizedKVCache:
        """A cache in this format that holds nothing."""
        rotary, split = Rotary.plain(D, THETA), None
        if self.biases is not None:
            split = BiasSplit(self.biases[0], PAIRS, rotation_table(rotary, PAIRS, reserved), self.biases[1])
        stored = {"kv_bits": self.bits, "kv_group_size": 16, "dtype": mx.float32, "scale_dtype": mx.float32}
        if self.ring:
            return WindowKVCache(reserved, K, D, bias_split=split, rotary=rotary, **self.ring, **stored)
        return QuantizedKVCache(reserved, K, D, bias_split=split, **stored)

    def attend(self, rng: np.random.Generator, new: int, start: int, mask: mx.array | None) -> float:
        """Attend through the cache; the largest difference from attention over everything."""
        heads = _heads(rng, new)
        self.oracle.cut(start)
        given = self.cache.attend(*heads, mask, self.sinks)
        return relative_error(given, self.oracle.attend(*heads, mask, self.sinks))


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
    def make(self, seed: int, windows: list[int | None], keep: int, slack: int, **options: Any) -> None:
        self.rng = np.random.default_rng(seed)
        self.keep, self.slack = keep, slack
        self.windows = [window for window in windows if window is not None]
        rings = [{} if window is None else {"window": window, "keep": keep, "slack": slack} for window in windows]
        self.layers = [_Layer(self.rng, ring, **options) for ring in rings]
        self.cache = ModelCache([layer.cache for layer in self.layers])
        self.nbytes = self.cache.nbytes
        self.most = 0  # that it has had since it was empty

    @precondition(lambda self: self.cache.offset < RESERVED - 200)
    @rule(
        new=st.one_of(st.integers(1, 3), st.integers(1, 40), st.integers(1, 200)),
        fate=st.sampled_from(["committed", "committed", "committed", "in part", "abandoned"]),
        masked=st.booleans(),
    )
    def append(self, new: int, fate: str, masked: bool) -> None:
        length, mask = self.cache.offset, None
        self.cache.begin(mx.zeros((1, new), mx.int32))
        if masked:
            mask = mx.array(np.where(self.rng.random((new, length + new)) < 0.2, -3.0, 0.0).astype(np.float32))
        for layer in self.layers:
            assert layer.attend(self.rng, new, length, mask) < TOLERANCE
        if new <= self.slack + 1:
            self.most = max(self.most, length + new)
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
            mx.eval([layer.attend(*_heads(self.rng, new)) for layer in other])
            other.commit()
        self._take(one)

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.most = 0

    @invariant()
    def it_goes_back_no_further(self) -> None:
        """More is refused, and nothing changes, its bytes never."""
        if not hasattr(self, "cache"):
            return
        length = self.cache.offset
        ring = min((self.keep + window + self.slack for window in self.windows), default=self.most)
        back = length - self.most + self.slack + 2
        if self.most > ring and 0 < back < length:
            assert not self.cache.can_trim_to(length - back)
            with pytest.raises(ValueError, match="go back no further"):
                self.cache.trim(back)
        assert (self.cache.offset, self.cache.nbytes) == (length, self.nbytes)


TestMachine = pytest.mark.filterwarnings("ignore")(_Machine.TestCase)
TestMachine.settings = settings(
    max_examples=count(12, 2000), stateful_step_count=count(20, 40), deadline=None, print_blob=True
)


def _wide(bits: int, split: bool, kernels: str, slack: int = 7) -> ModelCache:
    """A cache with a head_dim that the kernel takes; the same at every call."""
    rng, bias = np.random.default_rng(5), None
    if split:
        bias = BiasSplit(_normal(rng, K, 2, len(PAIRS)), PAIRS, mx.zeros((2, len(PAIRS), 0)), _normal(rng, K, 64))
    ring = {"window": 12, "keep": 2, "slack": slack, "bias_split": bias, "rotary": Rotary.plain(64, THETA)}
    return ModelCache([WindowKVCache(500, K, 64, kv_bits=bits, dtype=mx.float32, kernels=kernels, **ring)])


# New tokens, how many of them are committed. A ring of 2 + 12 + 7 rows wraps.
STEPS = [(9, 4), (3, 3), (40, 22), (1, 1), (4, 1), (8, 3), (2, 2), (3, 3), (2, 0), (1, 1)]


@pytest.mark.parametrize("slack", [7, 2])
@pytest.mark.parametrize(
    ("bits", "extras", "masked"),
    [(0, "sinks", False), (8, "split sinks", True), (4, "split", False), (4, "split", True)],
)
def test_the_fused_kernel_agrees(bits: int, extras: str, masked: bool, slack: int, launches: list[Any]) -> None:
    """Its text, run on the host. Tokens that would overwrite rows that they see are unfused."""
    rng = np.random.default_rng(4)
    caches = [_wide(bits, "split" in extras, kernels, slack) for kernels in ("fused", "unfused")]
    for step, (new, kept) in enumerate(STEPS):
        end, mask = caches[0].offset + new, None
        if masked:
            mask = _normal(rng, *((1, H) if step % 2 else ()), new, end)
            mask = mask if step % 3 else mask > -1
        heads, sinks = _heads(rng, new, 64), _normal(rng, H) if "sinks" in extras else None
        launches.clear()
        outputs = []
        for cache in caches:
            cache.begin(mx.zeros((1, new), mx.int32))
            outputs.append(cache[0].attend(*heads, mask, sinks))
            mx.eval(outputs[-1], cache[0].arrays)
            cache.commit(kept, ids=[[0] * kept])
        fused = new <= 8 and (new <= slack + 1 or end <= 14 + slack)
        assert [name for name, _ in launches].count("attend") == fused
        assert relative_error(*outputs) < TOLERANCE
    assert caches[0].offset == 40


def test_a_split_without_pairs_does_not_grow() -> None:
    """Its angles are read by nobody. Written all the same, they were a chain of arrays, one a token."""
    split = BiasSplit(mx.zeros((K, 2, 0)), (), mx.zeros((2, 0, 0)), mx.ones((K, D)))
    layer = WindowKVCache(RESERVED, K, D, window=8, bias_split=split, rotary=Rotary.plain(D, THETA))
    query, key = mx.ones((1, H, 1, D)), mx.ones((1, K, 1, D))
    mx.eval(query, key)
    active = []
    for _ in range(300):
        mx.eval(layer.attend(query, key, key))
        active.append(mx.get_active_memory())
    assert active[-1] <= active[50]

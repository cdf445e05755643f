"""One layer's cache: attention against the oracle, plain, static and fused; appends in place; refusals."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support import oracle
from support.numbers import relative_error

from kvant.cache import CompiledCacheView, QuantizedKVCache
from kvant.errors import ContextError
from kvant.operators.bias_split import BiasSplit, rotation_table
from kvant.operators.rotary import Rotary

ROOM = 28
SHAPES = [(4, 2, 64), (7, 1, 64), (4, 4, 80)]


def normal(seed: int, *shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def split_of(K: int, D: int) -> BiasSplit:
    pairs = (3, D // 2 - 1)
    return BiasSplit(
        key_bias=mx.random.normal((K, 2, 2), key=mx.random.key(3)) * 30,
        pairs=pairs,
        rotation=rotation_table(Rotary.plain(D, 1e4), pairs, ROOM),
        value_bias=mx.random.normal((K, D), key=mx.random.key(4)),
    )


def filled(K: int, D: int, past: mx.array, offset: int, **options: Any) -> QuantizedKVCache:
    """A cache of one layer with the first ``offset`` rows of ``past``, poisoned behind them."""
    cache = QuantizedKVCache(ROOM, K, D, dtype=mx.float32, **options)
    cache.attend(past, past, past + 1)
    cache.trim(past.shape[2] - offset)
    cache.arrays[-1][:, :, :, :, offset:] = float("nan")
    mx.eval(cache.arrays)
    return cache


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.parametrize("S", [1, 3, 8])
@pytest.mark.parametrize("offset", [0, 9, 19])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_the_oracle_s(shape: tuple[int, int, int], offset: int, S: int, kind: str) -> None:
    """In float64."""
    H, K, D = shape
    past, query, key = normal(1, 1, K, ROOM, D), normal(2, 1, H, S, D), normal(5, 1, K, S, D)
    cache = filled(K, D, past, offset, kv_bits=0)
    rng = np.random.default_rng(6)
    keep = rng.random((H, S, offset + S)) > 0.3
    mask = {"none": None, "float": np.where(keep, rng.standard_normal(keep.shape), -np.inf).astype(np.float32)}
    given = mask.get(kind, keep)
    output = cache.attend(query, key, key * 2, mask=None if given is None else mx.array(given))
    rows = [  # (1, T, K, D)
        np.array(mx.concatenate([old[:, :, :offset], new], axis=2)).swapaxes(1, 2)
        for old, new in ((past, key), (past + 1, key * 2))
    ]
    expected = oracle.attend(np.array(query).swapaxes(1, 2), *rows, is_causal=True, attn_mask=given).swapaxes(1, 2)
    assert np.abs(np.array(output) - expected).max() < 1e-5 * (1 + np.abs(expected).max())


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("bits", [8, 4, 0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_static_append_is_the_same_attention(shape: tuple[int, int, int], bits: int, split: bool) -> None:
    H, K, D = shape
    sinks = normal(7, H) if split else None
    options = {"kv_bits": bits, "kv_group_size": 16, "bias_split": split_of(K, D) if split else None}
    past = normal(1, 1, K, ROOM, D)
    for offset, rows, S in ((0, 1, 1), (0, 16, 2), (9, 10, 1), (9, 20, 4), (19, 20, 1), (2, 10, 8), (19, ROOM, 1)):
        query, key = normal(2, 1, H, S, D), normal(5, 1, K, S, D)
        eager, static = (filled(K, D, past, offset, **options) for _ in range(2))
        expected = eager.attend(query, key, key * 2, sinks=sinks)
        given = CompiledCacheView(static, mx.array(offset), rows).attend(query, key, key * 2, sinks=sinks)
        assert relative_error(given, expected) < 2e-5
        assert static.offset == offset
        for mine, theirs in zip(static.arrays, eager.arrays, strict=True):
            assert mx.array_equal(mine, theirs, equal_nan=True).item()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("S", [1, 3])
@pytest.mark.parametrize("bits", [8, 4, 0])
def test_the_fused_kernel_is_the_same_attention(checked_gpu: None, bits: int, S: int, split: bool) -> None:
    H, K, D = 4, 2, 64
    sinks = normal(7, H) if split else None
    options = {"kv_bits": bits, "bias_split": split_of(K, D) if split else None}
    past, query, key = normal(1, 1, K, ROOM, D), normal(2, 1, H, S, D), normal(5, 1, K, S, D)
    caches = [filled(K, D, past, 9, kernels=kernels, **options) for kernels in ("unfused", "fused", "fused")]
    expected, given = (cache.attend(query, key, key * 2, sinks=sinks) for cache in caches[:2])
    assert relative_error(given, expected) < 2e-5
    for mine, theirs in zip(caches[1].arrays, caches[0].arrays, strict=True):
        assert mx.array_equal(mine, theirs, equal_nan=True).item()
    if S == 1:
        static = CompiledCacheView(caches[2], mx.array(9), 0).attend(query, key, key * 2, sinks=sinks)
        assert relative_error(static, expected) < 2e-5


def peak_of_appends(room: int, bits: int, *, static: bool, hold: bool = False) -> int:
    """Bytes above the resting state while 10 rows are appended."""
    cache = QuantizedKVCache(room, 2, 64, kv_bits=bits, dtype=mx.float32)
    query, rows = normal(1, 1, 4, 3, 64), normal(2, 1, 2, 3, 64)
    mx.eval(cache.attend(query, rows, rows))
    held = [cache.cache[..., :1, :]] if hold else []
    mx.eval(held)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(10):
        if static:
            layer = CompiledCacheView(cache, mx.array(cache.offset), 40)
            mx.eval(layer.attend(query[:, :, :1], rows[:, :, :1], rows[:, :, :1]), cache.arrays)
            cache.sequence.commit(1)
        else:
            mx.eval(cache.attend(query, rows, rows))
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("bits", [8, 0])
def test_appends_are_in_place(bits: int, static: bool) -> None:
    """The peak does not know how much is reserved: 64 rows, or 65,536 (17 MB at 8 bits). A copy would show."""
    small, large = (peak_of_appends(room, bits, static=static) for room in (64, 65536))
    assert large - small < 100_000
    assert peak_of_appends(65536, bits, static=static, hold=True) > 15_000_000


def test_what_a_layer_alone_refuses() -> None:
    cache = QuantizedKVCache(8, 2, 64)
    rows = normal(1, 1, 2, 6, 64)
    cache.attend(rows, rows, rows)
    quantized = mx.array(cache.cache)
    with pytest.raises(ContextError, match="3 more tokens do not fit: 6 of the 8 reserved tokens are used"):
        cache.attend(rows[:, :, :3], rows[:, :, :3], rows[:, :, :3])
    two = normal(1, 2, 2, 1, 64)
    with pytest.raises(ValueError, match="one sequence"):
        cache.attend(two, two, two)
    for wrong in (-1, True, 1.5, [1]):
        with pytest.raises(ValueError, match="expected an int, 0 or more"):
            cache.trim(wrong)  # type: ignore[arg-type]
    assert cache.offset == 6
    assert mx.array_equal(cache.cache, quantized)
    assert cache.trim(2) == 2
    assert cache.trim(9) == 4

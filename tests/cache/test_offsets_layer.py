"""One layer's cache of several sequences, each at an offset of its own: attention, appends in place, refusals."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support import oracle
from support.numbers import relative_error
from support.ragged import normal, poison

from kvant.cache import CompiledCacheView, FullKVCache, QuantizedKVCache
from kvant.errors import ContextError
from kvant.operators.bias_split import BiasSplit, rotation_table
from kvant.operators.rotary import Rotary

OFFSETS = (0, 9, 19, 4)
ROOM = 28


def split_of(K: int, D: int) -> BiasSplit:
    pairs = (3, D // 2 - 1)
    return BiasSplit(
        key_bias=mx.random.normal((K, 2, 2), key=mx.random.key(3)) * 30,
        pairs=pairs,
        rotation=rotation_table(Rotary.plain(D, 1e4), pairs, ROOM),
        value_bias=mx.random.normal((K, D), key=mx.random.key(4)),
    )


def ragged_layer(K: int, D: int, past: mx.array, **options: Any) -> QuantizedKVCache:
    """A cache of one layer with rows of ``past`` at OFFSETS, poisoned past them."""
    cache = QuantizedKVCache(ROOM, K, D, batch=len(OFFSETS), dtype=mx.float32, **options)
    cache.attend(past, past, past + 1)
    cache.trim([past.shape[2] - n for n in OFFSETS])
    poison([cache])
    return cache


@pytest.mark.parametrize("kind", ["none", "bool", "float", "of each"])
@pytest.mark.parametrize("S", [1, 3, 8])
@pytest.mark.parametrize("shape", [(4, 2, 64), (7, 1, 64), (4, 4, 80)], ids=str)
def test_attention_is_the_oracle_s(shape: tuple[int, int, int], S: int, kind: str) -> None:
    """In float64, a sequence at a time; columns of a mask past a sequence's own rows would let poison in."""
    H, K, D = shape
    B, T = len(OFFSETS), max(OFFSETS) + S
    past, query, key = normal(1, B, K, ROOM, D), normal(2, B, H, S, D), normal(5, B, K, S, D)
    cache = ragged_layer(K, D, past, quant_bit=0)
    rng = np.random.default_rng(6)
    keep = rng.random((B, H, S, T) if kind == "of each" else (H, S, T)) > 0.3
    mask = {"none": None, "float": np.where(keep, rng.standard_normal(keep.shape), -np.inf).astype(np.float32)}
    given = mask.get(kind, keep)
    output = cache.attend(query, key, key * 2, mask=None if given is None else mx.array(given))
    for b, offset in enumerate(OFFSETS):
        rows = [  # (1, T, K, D)
            np.array(mx.concatenate([old[b : b + 1, :, :offset], new[b : b + 1]], axis=2)).swapaxes(1, 2)
            for old, new in ((past, key), (past + 1, key * 2))
        ]
        own = given[b : b + 1] if kind == "of each" else given
        expected = oracle.attend(
            np.array(query[b : b + 1]).swapaxes(1, 2), *rows, is_causal=True, attn_mask=own
        ).swapaxes(1, 2)
        assert np.abs(np.array(output[b : b + 1]) - expected).max() < 1e-5 * (1 + np.abs(expected).max())


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("bits", [8, 4, 0])
@pytest.mark.parametrize("shape", [(4, 2, 64), (7, 1, 64), (4, 4, 80)], ids=str)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_static_append_is_the_same_attention(
    shape: tuple[int, int, int], bits: int, split: bool, with_sinks: bool
) -> None:
    H, K, D = shape
    sinks = normal(7, H) if with_sinks else None
    B, group = len(OFFSETS), 16
    options = {"quant_bit": bits, "quant_group": group, "bias_split": split_of(K, D) if split else None}
    past, query, key = normal(1, B, K, ROOM, D), normal(2, B, H, 1, D), normal(5, B, K, 1, D)
    for rows in (20, ROOM):
        eager, static = (ragged_layer(K, D, mx.repeat(past, H // K, axis=1)[:, :: H // K], **options) for _ in range(2))
        expected = eager.attend(query, key, key * 2, sinks=sinks)
        given = CompiledCacheView(static, mx.array(OFFSETS), rows).attend(query, key, key * 2, sinks=sinks)
        assert relative_error(given, expected) < 2e-5
        assert static.lengths == OFFSETS
        for mine, theirs in zip(static.arrays, eager.arrays, strict=True):
            assert mx.array_equal(mine, theirs, equal_nan=True).item()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("S", [1, 3])
@pytest.mark.parametrize("bits", [8, 4, 0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_fused_kernel_is_the_same_attention(
    checked_gpu: None, bits: int, S: int, split: bool, with_sinks: bool
) -> None:
    H, K, D = 4, 2, 64
    sinks = normal(7, H) if with_sinks else None
    B = len(OFFSETS)
    options = {"quant_bit": bits, "bias_split": split_of(K, D) if split else None}
    past, query, key = normal(1, B, K, ROOM, D), normal(2, B, H, S, D), normal(5, B, K, S, D)
    caches = [ragged_layer(K, D, past, kernels=kernels, **options) for kernels in ("unfused", "fused", "fused")]
    expected, given = (cache.attend(query, key, key * 2, sinks=sinks) for cache in caches[:2])
    assert relative_error(given, expected) < 2e-5
    for mine, theirs in zip(caches[1].arrays, caches[0].arrays, strict=True):
        assert mx.array_equal(mine, theirs, equal_nan=True).item()
    if S == 1:
        static = CompiledCacheView(caches[2], mx.array(OFFSETS), 0).attend(query, key, key * 2, sinks=sinks)
        assert relative_error(static, expected) < 2e-5


def peak_of_appends(room: int, bits: int, *, static: bool, hold: bool = False) -> int:
    """Bytes above the resting state while 10 rows are appended to two sequences of different lengths."""
    cache = QuantizedKVCache(room, 2, 64, batch=2, quant_bit=bits, dtype=mx.float32)
    query, rows = normal(1, 2, 4, 3, 64), normal(2, 2, 2, 3, 64)
    mx.eval(cache.attend(query, rows, rows))
    cache.trim([0, 2])
    held = [cache.cache[..., :1, :]] if hold else []
    mx.eval(held)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(10):
        if static:
            layer = CompiledCacheView(cache, mx.array(cache.lengths), 32)
            mx.eval(layer.attend(query[:, :, :1], rows[:, :, :1], rows[:, :, :1]), cache.arrays)
            cache.sequences.commit(1)
        else:
            mx.eval(cache.attend(query, rows, rows))
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("bits", [8, 0])
def test_appends_are_in_place(bits: int, static: bool) -> None:
    """The peak does not know how much is reserved: 64 rows, or 65,536 (33 MB at 8 bits). A copy would show."""
    small, large = (peak_of_appends(room, bits, static=static) for room in (64, 65536))
    assert large - small < 100_000
    assert peak_of_appends(65536, bits, static=static, hold=True) > 30_000_000


def test_the_longest_sequence_must_have_room() -> None:
    cache = QuantizedKVCache(8, 2, 64, batch=2)
    rows = normal(1, 2, 2, 6, 64)
    cache.attend(rows, rows, rows)
    cache.trim([0, 5])
    quantized = mx.array(cache.cache)
    with pytest.raises(ContextError, match="3 more tokens do not fit: 6 of the 8 reserved tokens are used"):
        cache.attend(rows[:, :, :3], rows[:, :, :3], rows[:, :, :3])
    assert cache.lengths == (6, 1)
    assert mx.array_equal(cache.cache, quantized)


def test_each_sequence_is_trimmed() -> None:
    cache = QuantizedKVCache(8, 2, 64, batch=3)
    rows = normal(1, 3, 2, 6, 64)
    cache.attend(rows, rows, rows)
    assert cache.trim([1, 0, 9]) == 6
    assert (cache.lengths, cache.offset) == ((5, 6, 0), 6)
    assert cache.trim(2) == 2
    assert cache.lengths == (3, 4, 0)
    for wrong, message in (
        ([1, 2], "num_tokens has 2 numbers; the cache has 3 sequences"),
        ([1, -1, 0], r"num_tokens is \[1, -1, 0\]; expected"),
        ([1, True, 0], "expected an int, 0 or more"),
        (1.5, "num_tokens is 1.5; expected an int, 0 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.trim(wrong)
    assert cache.lengths == (3, 4, 0)
    cache.reset()
    assert cache.lengths == (0, 0, 0)


def test_a_cache_that_grows_has_one_length() -> None:
    cache = FullKVCache()
    assert cache.lengths == (0,)
    rows = normal(1, 3, 2, 6, 64)
    cache.attend(rows, rows, rows)
    assert cache.lengths == (6, 6, 6)

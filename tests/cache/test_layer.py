"""One layer's cache: attention against the oracle, plain and fused; appends in place; bytes; refusals."""

from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support import oracle
from support.numbers import normal, peak_bytes, relative_error
from support.pools import tiny_model
from support.runs import Run

from kvant.cache import FullKVCache, QuantizedKVCache
from kvant.errors import ContextError
from kvant.operators.bias_split import BiasSplit, rotation_table
from kvant.operators.rotary import Rotary

ROOM = 28
SHAPES = [(4, 2, 64), (7, 1, 64), (4, 4, 80)]


def split_of(K: int, D: int, tokens: int) -> BiasSplit:
    pairs, rotary = (3, D // 2 - 1), Rotary.plain(D, 1e4)
    return BiasSplit(normal(3, K, 2, 2) * 30, pairs, rotation_table(rotary, pairs, tokens), normal(4, K, D))


def filled(K: int, D: int, past: mx.array, offset: int, **options: Any) -> QuantizedKVCache:
    """A cache of one layer with the first ``offset`` rows of ``past``, poisoned behind them."""
    cache = QuantizedKVCache(ROOM, K, D, dtype=mx.float32, **options)
    cache.multi_head_cache_attention(past, past, past + 1)
    cache.trim(past.shape[2] - offset)
    cache.layer.arrays[-1][:, :, offset:] = float("nan")
    mx.eval(cache.layer.arrays)
    return cache


@pytest.mark.parametrize("kind", ["none", "bool", "float", "float of all heads"])
@pytest.mark.parametrize("S", [1, 3, 8])
@pytest.mark.parametrize("offset", [0, 9, 19])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_the_oracle_s(shape: tuple[int, int, int], offset: int, S: int, kind: str) -> None:
    """In float64; through a window, too."""
    H, K, D = shape
    past, query, key = normal(1, 1, K, ROOM, D), normal(2, 1, H, S, D), normal(5, 1, K, S, D)
    rng = np.random.default_rng(6)
    keep = rng.random((S, offset + S) if kind.endswith("heads") else (1, H, S, offset + S)) > 0.3
    mask = (
        np.where(keep, rng.standard_normal(keep.shape), -np.inf).astype(np.float32)
        if "float" in kind
        else keep
    )
    given = None if kind == "none" else mx.array(mask)
    rows = [  # (1, T, K, D)
        np.array(mx.concatenate([old[:, :, :offset], new], axis=2)).swapaxes(1, 2)
        for old, new in ((past, key), (past + 1, key * 2))
    ]
    options: dict[str, Any] = {"is_causal": True, "attn_mask": None if given is None else mask}
    for window in (None, 12):
        expected = oracle.attend(np.array(query).swapaxes(1, 2), *rows, window=window, **options).swapaxes(
            1, 2
        )
        output = filled(K, D, past, offset, kv_bits=0, window=window).multi_head_cache_attention(
            query, key, key * 2, mask=given
        )
        assert np.abs(np.array(output) - expected).max() < 1e-5 * (1 + np.abs(expected).max())


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("S", [1, 3])
@pytest.mark.parametrize("bits", [8, 4, 0])
def test_the_fused_kernel_is_the_same_attention(checked_gpu: None, bits: int, S: int, split: bool) -> None:
    H, K, D = 4, 2, 64
    sinks = normal(7, H) if split else None
    options = {"kv_bits": bits, "bias_split": split_of(K, D, ROOM) if split else None}
    past, query, key = normal(1, 1, K, ROOM, D), normal(2, 1, H, S, D), normal(5, 1, K, S, D)
    caches = [filled(K, D, past, 9, kernels=kernels, **options) for kernels in ("unfused", "fused")]
    expected, given = (cache.multi_head_cache_attention(query, key, key * 2, sinks=sinks) for cache in caches)
    assert relative_error(given, expected) < 2e-5
    for mine, theirs in zip(caches[1].layer.arrays, caches[0].layer.arrays, strict=True):
        assert mx.array_equal(mine, theirs, equal_nan=True).item()


@pytest.mark.parametrize(
    ("bits", "extras", "masked"),
    [(0, "sinks", False), (8, "split sinks", True), (4, "split", False), (4, "split", True)],
)
def test_the_fused_kernel_agrees_through_a_window(
    bits: int, extras: str, masked: bool, launches: list[Any]
) -> None:
    """Its text, run on the host, while pages move along. Masked steps and those of many tokens are
    unfused.
    """
    H, K, D, room = 4, 2, 64, 700
    split = split_of(K, D, room) if "split" in extras else None
    options: dict[str, Any] = {"window": 12, "kv_bits": bits, "dtype": mx.float32, "bias_split": split}
    caches = [QuantizedKVCache(room, K, D, kernels=kernels, **options) for kernels in ("fused", "unfused")]
    sinks = normal(7, H) if "sinks" in extras else None
    # New tokens, how many of them are committed. There are two pages.
    steps = [(9, 4), (3, 3), (121, 119), (3, 3), (8, 3), (160, 25), (2, 2), (300, 300), (2, 0), (1, 1)]
    for number, (new, kept) in enumerate(steps):
        end = caches[0].offset + new
        mask = normal(number, *((1, H) if number % 2 else ()), new, end) if masked else None
        mask = mask > -1 if mask is not None and number % 3 == 0 else mask
        heads = [normal(number + i, 1, count, new, D) for i, count in enumerate((H, K, K))]
        launches.clear()
        outputs = []
        for cache in caches:
            cache.batch.begin(mx.zeros((1, new), mx.int32))
            outputs.append(cache.batch[0].multi_head_cache_attention(*heads, mask, sinks))
            mx.eval(outputs[-1], cache.layer.arrays)
            cache.batch.commit(kept, ids=[[0] * kept])
        assert [name for name, _ in launches].count("attend") == (new <= 8 and not masked)
        assert relative_error(*outputs) < 1e-5
    assert caches[0].offset == 460


def peak_of_appends(room: int, bits: int, *, hold: bool = False) -> int:
    """Bytes above the resting state while 10 rows are appended."""
    cache = QuantizedKVCache(room, 2, 64, kv_bits=bits, dtype=mx.float32)
    query, rows = normal(1, 1, 4, 3, 64), normal(2, 1, 2, 3, 64)
    mx.eval(cache.multi_head_cache_attention(query, rows, rows))
    held = [cache.layer.arrays[0][:, :, :1]] if hold else []
    mx.eval(held)

    def append() -> None:
        for _ in range(10):
            mx.eval(cache.multi_head_cache_attention(query, rows, rows))

    return peak_bytes(append)


@pytest.mark.parametrize("bits", [8, 0])
def test_appends_are_in_place(bits: int) -> None:
    """The peak does not know how much is reserved: 64 rows, or 65,536 (17 MB at 8 bits). A copy would
    show.
    """
    small, large = (peak_of_appends(room, bits) for room in (64, 65536))
    assert large - small < 100_000
    assert peak_of_appends(65536, bits, hold=True) > 15_000_000


def test_decoding_copies_no_cache(tmp_path: Path) -> None:
    """In the engine's own loop: 65,536 tokens have 4.7 MB a layer, and as many a window of 60,000."""
    model = tiny_model(tmp_path, (None, 60_000), max_position_embeddings=65536)
    peaks = []
    for tokens in (256, 65536):
        steps = Run(model, list(range(1, 9)), model.make_cache(tokens, kv_group_size=16), max_tokens=48)
        for _ in range(8):
            next(steps)
        peaks.append(peak_bytes(partial(list, steps)))
    assert peaks[1] - peaks[0] < 200_000


@pytest.mark.parametrize("window", [None, 4])
def test_what_does_not_fit_is_refused_before_anything_is_written(window: int | None) -> None:
    cache = QuantizedKVCache(8, 2, 64, window=window)
    rows = normal(1, 1, 2, 6, 64)
    cache.multi_head_cache_attention(rows, rows, rows)
    held = [mx.array(np.array(array)) for array in cache.layer.arrays]
    with pytest.raises(ContextError, match="3 more tokens do not fit: 6 of the 8 reserved tokens are used"):
        cache.multi_head_cache_attention(rows[:, :, :3], rows[:, :, :3], rows[:, :, :3])
    for shape, message in (((2, 2, 1, 64), "one sequence"), ((1, 1, 1, 64), "2 kv heads")):
        with pytest.raises(ValueError, match=message):
            cache.multi_head_cache_attention(*[normal(1, *shape)] * 3)
    for wrong in ((1, 6), (7,), (3, 1, 7), (1, 1, 1, 8)):
        with pytest.raises(ValueError, match="mask has"):
            cache.multi_head_cache_attention(
                rows[:, :, :1], rows[:, :, :1], rows[:, :, :1], mask=mx.zeros(wrong)
            )
    for number in (-1, True, 1.5, [1]):
        with pytest.raises(ValueError, match="expected an int, 0 or more"):
            cache.trim(number)  # type: ignore[arg-type]
    assert cache.offset == 6
    assert all(map(mx.array_equal, cache.layer.arrays, held))
    assert (cache.trim(2), cache.trim(9)) == (2, 4)


def test_the_contract_of_a_cache_that_grows() -> None:
    cache = FullKVCache()
    one, two, other = normal(1, 1, 2, 3, 64), normal(2, 1, 2, 2, 64), normal(3, 1, 1, 1, 64)
    _, _, offset, mask = cache.update_and_fetch(one, one + 1, mask_length=3, mask="causal")
    assert (offset, mask) == (3, "causal")
    key, value, offset, mask = cache.update_and_fetch(two, two + 1)
    assert (offset, mask) == (5, None)
    assert mx.array_equal(key, mx.concatenate([one, two], axis=2))
    assert mx.array_equal(value, key + 1)
    assert cache.nbytes == 2 * 5 * 2 * 64 * 4
    with pytest.raises(ValueError, match="the cache holds"):
        cache.update_and_fetch(other, other)
    cache.reset()
    assert (cache.offset, cache.nbytes, cache.update_and_fetch(other, other)[2]) == (0, 0, 1)


@pytest.mark.parametrize(
    ("room", "rows", "options", "row_bytes"),
    [
        (100, 100, {"kv_bits": 8, "kv_group_size": 32}, 64 + 2 * 2),
        (100, 100, {"kv_bits": 8, "kv_group_size": 8, "scale_dtype": mx.float32}, 64 + 8 * 4),
        (300, 300, {"kv_bits": 4, "kv_group_size": 32}, 32 + 2 * 2),
        (100, 100, {"kv_bits": 0}, 64 * 2),
        (100, 100, {"kv_bits": 8, "window": 40}, 64 + 2 * 2),
        (300, 300, {"kv_bits": 0, "window": 290}, 64 * 2),
        # of 1 + 16 tokens more than the window, on two pages
        (300, 256, {"kv_bits": 8, "window": 40}, 64 + 2 * 2),
        (900, 512, {"kv_bits": 0, "window": 290}, 64 * 2),
    ],
)
def test_bytes_are_exact_before_and_after(
    room: int, rows: int, options: dict[str, Any], row_bytes: int
) -> None:
    """Of 2 kv heads a key and a value. A window has no more rows than are reserved."""
    cache = QuantizedKVCache(room, 2, 64, **options)
    for count in (70, room - 70):
        assert cache.nbytes == 4 * rows * row_bytes
        mx.eval(cache.multi_head_cache_attention(*[normal(count, 1, 2, count, 64)] * 3))
    assert (cache.offset, cache.nbytes) == (room, 4 * rows * row_bytes)
    assert cache.layer.arrays[0].shape[2] == rows


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_seq_len": 0}, {"num_kv_heads": -1}, {"head_dim": True}, {"kv_bits": 3}, {"kv_group_size": 48},
        {"kv_group_size": 0}, {"scale_dtype": mx.bfloat16}, {"dtype": mx.int8}, {"window": 0}, {"window": True},
    ],
)  # fmt: skip
def test_bad_arguments(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        QuantizedKVCache(**{"max_seq_len": 8, "num_kv_heads": 2, "head_dim": 64} | wrong)

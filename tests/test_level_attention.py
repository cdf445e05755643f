"""Attention that reads levels directly, against attention over the same rows dequantized."""

import sys

import mlx.core as mx
import pytest
from conftest import relative_error

from kvant.cache import QuantizedKVCache
from kvant.operators.attention import attend_rows
from kvant.operators.bias_split import BiasSplit, rotation_table
from kvant.operators.key_value_cache import read_rows, write_rows
from kvant.operators.level_attention import attend_levels, reads_levels

ROWS, RESERVED = 77, 90


def _cache(K: int, D: int, quant_bit: int, quant_group: int, batch: int) -> QuantizedKVCache:
    """Random rows, and loud ones after them."""
    cache = QuantizedKVCache(RESERVED, K, D, quant_bit=quant_bit, quant_group=quant_group, batch=batch)
    rows = mx.random.normal((batch, K, RESERVED, D), key=mx.random.key(1))
    rows[:, :, ROWS:] *= 1e4
    write_rows(rows, rows * 0.5 + 1, 0, cache.cache, cache.scale, quant_bit=quant_bit, quant_group=quant_group)
    return cache


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("shape", [(2, 2, 64), (4, 2, 64), (7, 1, 128), (8, 4, 128)], ids=str)
@pytest.mark.parametrize("quant_group", [32, 64, 128])
@pytest.mark.parametrize("quant_bit", [8, 4])
@pytest.mark.parametrize("batch", [1, 3])
def test_levels_and_rows_agree(
    shape: tuple[int, int, int], quant_bit: int, quant_group: int, batch: int, split: bool
) -> None:
    H, K, D = shape
    if D % quant_group:
        return  # no such cache
    cache = _cache(K, D, quant_bit, quant_group, batch)
    query = mx.random.normal((batch, H, 1, D), key=mx.random.key(2))
    pairs = (3, D // 2 - 1)
    bias_split = BiasSplit(
        key_bias=mx.random.normal((K, 2, 2), key=mx.random.key(3)) * 30,
        pairs=pairs,
        rotation=rotation_table(D, 1e4, pairs, RESERVED),
        value_bias=mx.random.normal((K, D), key=mx.random.key(4)),
    )
    given = attend_levels(
        query,
        cache.cache[0, :, :, :, :ROWS],
        cache.scale[0, :, :, :, :ROWS],
        quant_bit=quant_bit,
        bias_split=bias_split if split else None,
    )
    key, value = read_rows(
        batch, ROWS, cache.cache, cache.scale, quant_bit=quant_bit, dtype=mx.float32, product_dtype=mx.float32
    )
    expected = attend_rows(query, key, value, bias_split=bias_split if split else None)
    assert relative_error(given, expected) < 2e-5
    wrong = attend_rows(query, key, mx.roll(value, 1, axis=2), bias_split=bias_split if split else None)
    assert relative_error(wrong, expected) > 1e-3


@pytest.mark.parametrize("quant_bit", [8, 4])
def test_the_cache_takes_this_way_for_one_token_only(quant_bit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def spy(query: mx.array, *arguments: mx.array, **options: object) -> mx.array:
        taken.append(query.shape[2])
        return attend_levels(query, *arguments, **options)  # type: ignore[arg-type]

    # By its module: the package's attribute of that name is the operator.
    monkeypatch.setattr(sys.modules["kvant.operators.multi_head_cache_attention"], "attend_levels", spy)
    cache = QuantizedKVCache(32, 2, 64, quant_bit=quant_bit)
    for count, mask in ((5, None), (1, None), (2, None), (1, mx.zeros((1, 9)))):
        rows = mx.random.normal((1, 2, count, 64), key=mx.random.key(count))
        cache.attend(mx.concatenate([rows, rows], axis=1), rows, rows, mask=mask)
    assert taken == [1]


def test_where_levels_are_read() -> None:
    assert reads_levels(1, mx.float32, 8, 32) == (mx.default_device().type == mx.cpu)
    for refused in ((2, mx.float32, 8, 32), (1, mx.float16, 8, 32), (1, mx.float32, 0, 32), (1, mx.float32, 4, 8)):
        assert not reads_levels(*refused)

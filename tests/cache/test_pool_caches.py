"""A pool's sequences and caches of their own: tokens go from one to the other and to a file."""

from pathlib import Path

import mlx.core as mx
import pytest
from support.numbers import peak_bytes
from support.pools import TEXT, check_pages, close, decode, next_logits, prefill, tiny_model

from kvant.cache import CacheOptions, ModelCache
from kvant.cache.pool import Pool, PoolSequence
from kvant.errors import ContextError
from kvant.models import Decoder


def _alone(sequence: PoolSequence, reserved: int) -> ModelCache:
    """A cache with the tokens of a sequence."""
    cache: ModelCache = sequence.pool.make_cache(reserved)
    cache.sequence.load(sequence)
    return cache


def _pool(model: Decoder, bits: int) -> Pool:
    return model.make_pool(
        4096, sequences=4, prefill_step_size=128, options=CacheOptions(kv_bits=bits, kv_group_size=16)
    )


def _fed(model: Decoder, bits: int, length: int) -> ModelCache:
    cache = model.make_cache(1000, kv_bits=bits, kv_group_size=16)
    for first in range(0, length, 128):
        model(mx.array([TEXT[first : min(first + 128, length)]]), cache=cache)
    return cache


def test_what_does_not_go_in(windows: Decoder, plain: Decoder) -> None:
    pool = _pool(windows, 8)
    sequence = pool.sequence(100)
    refused = [
        (
            _fed(windows, 8, 101),
            ContextError,
            "101 more tokens do not fit: 0 of the 100 reserved tokens are used",
        ),
        (_fed(windows, 4, 10), ValueError, "kv_bits is 4; expected 8, in layer 0"),
        (windows.make_cache(50, kv_group_size=8), ValueError, "kv_group_size is 8; expected 16, in layer 0"),
        (windows.make_cache(50, kv_group_size=16, bias_split=False), ValueError, "split_pairs is None"),
        (plain.make_cache(50, kv_group_size=16), ValueError, "the cache has 2 layers; expected 3"),
    ]
    for cache, kind, message in refused:
        with pytest.raises(kind, match=message):
            sequence.load(cache.sequence)
        assert sequence.length == 0
    sequence.load(_fed(windows, 8, 10).sequence)
    with pytest.raises(ValueError, match="the sequence holds 10 tokens; expected an empty one"):
        sequence.load(_fed(windows, 8, 10).sequence)
    with pytest.raises(ContextError, match="10 more tokens do not fit"):
        _alone(sequence, 9)


def test_a_page_that_is_not_whole_is_not_shared(tmp_path: Path) -> None:
    """A ring's file of 828 tokens begins, for a window of 200, at token 612: what page 4 held before is
    not there.
    """
    model = tiny_model(tmp_path, (None, 200))
    pool = _pool(model, 0)
    whole, sequence = pool.sequence(900), pool.sequence(900)
    prefill(model, pool, whole, TEXT[:828])
    lost = {pool.layers[0]: 0, pool.layers[1]: 612}
    with sequence.filling(lost, TEXT[:828]):
        for layer, first in lost.items():
            sequence.put(layer, whole.copied_rows(layer, first), 828)
    assert sequence.tables[1].first == 612
    sequence.share_prefix()
    whole.release()
    assert pool.sequence(900, TEXT[:800]).length == 0
    prefill(model, pool, sequence, TEXT[828:870], step=42)
    sequence.trim_to(820)
    assert close(decode(model, pool, [sequence], TEXT[820:821]), next_logits(model, TEXT[:821]))
    assert not sequence.can_trim_to(810)


def test_a_load_that_is_interrupted_leaves_an_empty_sequence(
    windows: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, cache = _pool(windows, 0), _fed(windows, 0, 500)
    sequence = pool.sequence(900)
    with monkeypatch.context() as patch:
        layers = iter(windows.layers[:2])
        rows = cache.sequence.copied_rows
        patch.setattr(cache.sequence, "copied_rows", lambda *given: next(layers) and rows(*given))
        with pytest.raises(StopIteration):
            sequence.load(cache.sequence)
    assert sequence.length == 0
    check_pages(pool, [sequence])
    sequence.load(cache.sequence)
    given = decode(windows, pool, [sequence], [5])
    assert close(given, windows(mx.array([[5]]), cache=cache)[:, -1])


def test_nothing_holds_the_arrays_afterwards(windows: Decoder) -> None:
    pool = windows.make_pool(
        200 * 128, sequences=4, max_seq_len=900, options=CacheOptions(kv_bits=8, kv_group_size=16)
    )
    sequence = pool.sequence(900)
    prefill(windows, pool, sequence, TEXT[:300])
    before = peak_bytes(lambda: decode(windows, pool, [sequence], [5]))
    pool.sequence(900).load(_alone(sequence, 900).sequence)
    after = peak_bytes(lambda: decode(windows, pool, [sequence], [5]))
    assert abs(after - before) < 200_000 < min(array.nbytes for array in pool.layers[0].arrays)

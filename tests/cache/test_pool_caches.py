"""A pool's sequences and caches of their own: tokens go from one to the other and to a file."""

from pathlib import Path

import mlx.core as mx
import pytest
from support.pools import check_pages, close, decode, prefill, tiny_model

from kvant.cache import FullKVCache, ModelCache
from kvant.cache.pool import Pool, PoolSequence
from kvant.errors import ContextError
from kvant.models import Decoder

TEXT = [(7 * i * i + 3 * i) % 290 for i in range(1000)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Layers that see everything, and two widths of windows."""
    return tiny_model(tmp_path_factory.mktemp("windows"), (None, 40, 200))


def _pool(model: Decoder, bits: int) -> Pool:
    return model.make_pool(4096, sequences=4, kv_bits=bits, kv_group_size=16, prefill_step_size=128)


def _fed(model: Decoder, bits: int, length: int, reserved: int = 1000) -> ModelCache:
    cache = model.make_cache(reserved, kv_bits=bits, kv_group_size=16)
    for first in range(0, length, 128):
        model(mx.array([TEXT[first : min(first + 128, length)]]), cache=cache)
    return cache


def _next(model: Decoder, pool: Pool, sequence: PoolSequence, cache: ModelCache) -> None:
    """One more token through both has the same logits."""
    token = TEXT[sequence.length + 1]
    given = decode(model, pool, [sequence], [token])
    assert close(given, model(mx.array([[token]]), cache=cache)[:, -1])


@pytest.mark.parametrize("bits", [8, 4, 0])
@pytest.mark.parametrize("length", [1, 39, 128, 300, 777])
def test_a_caches_tokens_go_on_in_a_pool(model: Decoder, bits: int, length: int) -> None:
    cache, pool = _fed(model, bits, length), _pool(model, bits)
    sequence = pool.sequence(900)
    sequence.load(cache)
    assert (sequence.length, sequence.ids) == (length, TEXT[:length])
    check_pages(pool, [sequence])
    for _ in range(3):
        _next(model, pool, sequence, cache)
    sequence.share_prefix()
    fork = sequence.fork()
    _next(model, pool, fork, cache)
    check_pages(pool, [sequence, fork])


@pytest.mark.parametrize("bits", [8, 4, 0])
@pytest.mark.parametrize("length", [1, 39, 300, 777])
def test_a_sequence_goes_on_in_a_cache_and_in_a_file(model: Decoder, bits: int, length: int, tmp_path: Path) -> None:
    pool = _pool(model, bits)
    sequence = pool.sequence(900)
    prefill(model, pool, sequence, TEXT[:length])
    cache = sequence.to_cache()
    assert (cache.max_seq_len, cache.ids) == (900, [TEXT[:length]])
    back = [length - n for n in range(min(length, 30)) if cache.can_trim_to(length - n)]
    assert all(sequence.can_trim_to(shorter) for shorter in back), "a row that is missing"
    if bits == 0:
        trimmed = cache.fork()
        trimmed.trim_to(back[-1])
        given = model(mx.array([[5]]), cache=trimmed)[:, -1]
        assert close(given, model.logits(model.hidden_states(mx.array([[*TEXT[: back[-1]], 5]]))[:, -1]))
    cache.save(tmp_path / "saved")
    other = model.make_cache(1000, kv_bits=bits, kv_group_size=16)
    other.load(tmp_path / "saved")
    mine = sequence.fork()
    for _ in range(3):
        _next(model, pool, sequence, cache)
    for _ in range(3):
        _next(model, pool, mine, other)


def test_a_cache_goes_back_no_further_than_its_sequence(model: Decoder) -> None:
    """The window of 40 moved on to page 1 with the last token: a ring's usual 17 tokens back would miss its rows."""
    pool = _pool(model, 0)
    sequence = pool.sequence(900)
    prefill(model, pool, sequence, TEXT[:167])
    decode(model, pool, [sequence], TEXT[167:168])
    cache = sequence.to_cache()
    assert [n for n in range(140, 169) if cache.can_trim_to(n)] == [n for n in range(140, 169) if n >= 167]
    cache.trim_to(167)
    expected = model.logits(model.hidden_states(mx.array([[*TEXT[:167], 5]]))[:, -1])
    assert close(model(mx.array([[5]]), cache=cache)[:, -1], expected)


def test_a_cache_reserved_for_less_than_a_window_goes_in(model: Decoder) -> None:
    pool = _pool(model, 8)
    sequence = pool.sequence(900)
    cache = _fed(model, 8, 30, reserved=36)
    assert all(layer.window is None for layer in cache)
    sequence.load(cache)
    _next(model, pool, sequence, cache)


def test_what_does_not_go_in(model: Decoder, tmp_path: Path) -> None:
    pool = _pool(model, 8)
    sequence = pool.sequence(100)
    refused = [
        (_fed(model, 8, 101), ContextError, "101 more tokens do not fit: 0 of the 100 reserved tokens are used"),
        (_fed(model, 4, 10), ValueError, "kv_bits is 4; expected 8, in layer 0"),
        (model.make_cache(50, kv_group_size=8), ValueError, "kv_group_size is 8; expected 16, in layer 0"),
        (model.make_cache(50, kv_group_size=16, bias_split=False), ValueError, "split_pairs is None"),
        (ModelCache([FullKVCache() for _ in model.layers]), ValueError, "kind is 'full'; expected 'quantized'"),
        (ModelCache([FullKVCache()]), ValueError, "the cache has 1 layers; expected 3"),
    ]
    for cache, kind, message in refused:
        with pytest.raises(kind, match=message):
            sequence.load(cache)
        assert sequence.length == 0
    sequence.load(_fed(model, 8, 10))
    with pytest.raises(ValueError, match="the sequence holds 10 tokens; expected an empty one"):
        sequence.load(_fed(model, 8, 10))
    with pytest.raises(ContextError, match="10 more tokens do not fit"):
        sequence.to_cache(9)


def test_a_page_whose_first_rows_a_ring_has_lost_is_not_shared(tmp_path: Path) -> None:
    """After 828 tokens a ring for a window of 200 begins at token 612: what page 4 held before is not there."""
    model = tiny_model(tmp_path, (None, 200))
    pool = _pool(model, 0)
    sequence = pool.sequence(900)
    sequence.load(_fed(model, 0, 828))
    assert sequence.tables[1].first == 612
    sequence.share_prefix()
    other = pool.sequence(900, TEXT[:800])
    assert other.length == 0
    prefill(model, pool, sequence, TEXT[828:870], step=42)
    sequence.trim_to(820)
    expected = model.logits(model.hidden_states(mx.array([TEXT[:821]]))[:, -1])
    assert close(decode(model, pool, [sequence], TEXT[820:821]), expected)
    assert not sequence.can_trim_to(810)


def test_pages_that_others_share_are_not_loaded_into(model: Decoder) -> None:
    pool = _pool(model, 0)
    prompt = TEXT[500:800]
    first = pool.sequence(400)
    prefill(model, pool, first, prompt)
    first.share_prefix()
    first.trim_to(0)
    cache = _fed(model, 0, 300)
    first.load(cache)
    _next(model, pool, first, cache)
    second = pool.sequence(400, prompt)
    assert second.length == 256
    expected = model.logits(model.hidden_states(mx.array([prompt]))[:, -1])
    assert close(prefill(model, pool, second, prompt[256:]), expected)
    check_pages(pool, [first, second])


def test_a_load_that_is_interrupted_leaves_an_empty_sequence(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, cache = _pool(model, 0), _fed(model, 0, 500)
    sequence = pool.sequence(900)
    with monkeypatch.context() as patch:
        patch.setattr(cache[2], "stored", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sequence.load(cache)
    assert sequence.length == 0
    check_pages(pool, [sequence])
    sequence.load(cache)
    _next(model, pool, sequence, cache)


def test_nothing_holds_the_arrays_afterwards(model: Decoder) -> None:
    """A step after it takes what one before it took, not another pool."""
    pool = model.make_pool(200 * 128, sequences=4, kv_bits=8, kv_group_size=16, max_seq_len=900)
    sequence = pool.sequence(900)
    prefill(model, pool, sequence, TEXT[:300])
    peaks = []
    for _ in range(2):
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        decode(model, pool, [sequence], [5])
        peaks.append(mx.get_peak_memory() - before)
        cache = sequence.to_cache()
        pool.sequence(900).load(cache)
    smallest = min(array.nbytes for layer in pool.layers[:1] for array in layer.arrays)
    assert abs(peaks[0] - peaks[1]) < 200_000 < smallest

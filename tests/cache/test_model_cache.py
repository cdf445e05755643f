"""The cache of a model: one count for all layers, steps that count when they are committed, and mlx-lm's habits."""

import copy
from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from support.counts import count
from support.interruption import Interruption

from kvant.cache import FullKVCache, ModelCache, QuantizedKVCache
from kvant.engine.run import Run
from kvant.errors import ContextError
from kvant.models import Decoder

Pocket = tuple[Decoder, Any]
IDS = list(range(20, 45))


@pytest.fixture(params=[8, 4, 0, None])
def caches(request: pytest.FixtureRequest, pocket: Pocket) -> list[ModelCache]:
    """Two of the same format; None: that grow."""
    model, _ = pocket
    if request.param is None:
        return [ModelCache([FullKVCache() for _ in model.layers]) for _ in range(2)]
    return [model.make_cache(64, kv_bits=request.param) for _ in range(2)]


def test_mlx_lms_trim_counts_once(pocket: Pocket, caches: list[ModelCache]) -> None:
    (model, _), cache = pocket, caches[0]
    model(mx.array([IDS[:-9]]), cache=cache)
    expected = model(mx.array([IDS[-9:]]), cache=cache)
    assert len(cache) == len(list(cache)) == len(model.layers)
    assert {layer.offset for layer in cache} == {cache.offset} == {len(IDS)}
    assert cache.nbytes == sum(layer.nbytes for layer in cache) > 0
    assert can_trim_prompt_cache(cache)
    assert [trim_prompt_cache(cache, 3) for _ in range(2)] == [3, 3]
    assert (cache.offset, cache.ids) == (len(IDS) - 6, [IDS[:-6]])
    assert [layer.trim(1) for layer in reversed(cache)] == [1] * len(cache)
    assert [layer.trim(2) for layer in cache] == [2] * len(cache)
    assert cache.offset == len(IDS) - 9
    assert mx.array_equal(model(mx.array([IDS[-9:]]), cache=cache), expected)
    assert trim_prompt_cache(cache, 1000) == len(IDS)
    assert cache.offset == 0


def test_mlx_lms_own_loop_runs_on_it(pocket: Pocket) -> None:
    model, _ = pocket
    cache = make_prompt_cache(model)
    assert isinstance(cache, ModelCache)
    assert cache.max_seq_len == model.config.max_position_embeddings == 2048
    given = [token for token, _ in generate_step(mx.array(IDS), model, max_tokens=12, prompt_cache=cache)]
    assert given == [token for token, _ in Run(model, IDS, model.make_cache(64), max_tokens=12)]
    assert cache.ids[0][: len(IDS) + 11] == IDS + given[:11]


def test_a_step_counts_when_it_is_committed(pocket: Pocket, caches: list[ModelCache]) -> None:
    """What was fed and not committed, or only in part, is as if it had not been: the bytes behind do not matter."""
    (model, _), (cache, fresh) = pocket, caches
    for used in caches:
        model(mx.array([IDS]), cache=used)
    mx.eval(model.hidden_states(mx.array([[7] * 8]), cache=cache))
    assert cache.offset == len(IDS)
    mx.eval(model.hidden_states(mx.array([[50, 51, 9, 9, 9]]), cache=cache))
    cache.commit(2)
    assert cache.ids == [[*IDS, 50, 51]]
    model(mx.array([[50, 51, 8, 8, 8]]), cache=fresh)
    fresh.trim(3)
    assert mx.array_equal(*(model(mx.array([[60, 61]]), cache=used) for used in (cache, fresh)))


def test_interrupted_steps(pocket: Pocket, caches: list[ModelCache]) -> None:
    """At any line: the cache holds all of a step or nothing, and says which."""
    (model, _), (cache, fresh) = pocket, caches
    counted, held = Interruption(0), set()

    def feed(used: ModelCache, first: int, end: int) -> None:
        if not first:
            used.reset()
        mx.eval(model(mx.array([IDS[first:end]]), cache=used))

    feed(cache, 0, 9)
    counted.of(partial(feed, cache, 9, 14))
    for at in [*range(1, counted.lines, count(counted.lines // 9, 5)), *range(counted.lines - 40, counted.lines)]:
        feed(cache, 0, 9)
        assert Interruption(at).of(partial(feed, cache, 9, 14))
        held.add(cache.offset)
        assert cache.ids == [IDS[: cache.offset]]
        assert {layer.offset for layer in cache} == {cache.offset}
        feed(fresh, 0, 9)
        if cache.offset == 14:
            feed(fresh, 9, 14)
        assert mx.array_equal(*(model(mx.array([[60, 61]]), cache=used) for used in caches))
    assert held == {9, 14}


def test_steps_and_commits_that_are_refused(pocket: Pocket) -> None:
    model, _ = pocket
    cache = model.make_cache(8)
    with pytest.raises(RuntimeError, match="no step to commit"):
        cache.commit()
    model.hidden_states(mx.array([[5, 6]]), cache=cache)
    for number in (3, -1):
        with pytest.raises(ValueError, match=f"num_tokens is {number}"):
            cache.commit(number)
        with pytest.raises(ValueError, match="-1; expected an int, 0 or more"):
            cache.trim_to(-1)
    cache.trim(0)
    with pytest.raises(RuntimeError, match="no step to commit"):
        cache.commit(1)
    with pytest.raises(ContextError, match="9 more tokens do not fit"):
        model(mx.array([[1] * 9]), cache=cache)
    assert (cache.offset, cache.step) == (0, None)


def test_released_memory_is_given_back(pocket: Pocket) -> None:
    model, _ = pocket
    mx.synchronize()
    before = mx.get_active_memory()
    cache = model.make_cache(4096)
    nbytes = cache.nbytes
    assert mx.get_active_memory() - before >= nbytes
    cache.release()
    assert mx.get_active_memory() - before < nbytes / 10
    with pytest.raises(RuntimeError, match="the cache was released"):
        model(mx.array([[5]]), cache=cache)


def test_a_list_of_layers_becomes_one_cache(pocket: Pocket) -> None:
    model, _ = pocket
    layers = [FullKVCache() for _ in model.layers]
    model(mx.array([IDS]), cache=layers)
    assert ModelCache(layers).ids == [IDS]
    other = copy.deepcopy(layers)
    model(mx.array([[5]]), cache=layers)
    assert (layers[0].offset, other[0].offset) == (len(IDS) + 1, len(IDS))
    used, one, rows = [FullKVCache() for _ in range(2)], QuantizedKVCache(8, 2, 64), mx.zeros((1, 2, 3, 64))
    used[1].update_and_fetch(rows, rows)
    for bad, message in (
        ([*layers[:2], *other[2:]], "layers of several caches"),
        (used, "layer 1 of the cache holds 3 tokens; expected an empty one"),
        ([], "0 layers"),
        ([one, one], "none twice"),
        ([one, object()], "holds a object"),
    ):
        with pytest.raises(ValueError, match=message):
            ModelCache(bad)  # type: ignore[arg-type]

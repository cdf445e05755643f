"""The cache of a model: one count for all layers, steps that count when they are committed, and mlx-lm's
habits.
"""

import copy
from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from support.counts import count
from support.interruption import Interruption
from support.pools import TEXT, check_pages
from support.runs import Run

from kvant.cache import FullKVCache, ModelCache
from kvant.errors import ContextError
from kvant.models import Decoder

Pocket = tuple[Decoder, Any]
IDS = TEXT[20:45]


@pytest.fixture(params=[8, 4, 0, "windows"])
def caches(
    request: pytest.FixtureRequest, pocket: Pocket, windows: Decoder
) -> tuple[Decoder, list[ModelCache], int]:
    """A model, two caches of the same format, and tokens that they have first: with windows, more than a
    page has.
    """
    model, bits, first = (windows, 0, 270) if request.param == "windows" else (pocket[0], request.param, 9)
    made = [model.make_cache(first + 250, kv_bits=bits) for _ in range(2)]
    for cache in made:
        model(mx.array([TEXT[:first]]), cache=cache)
    return model, made, first


def test_mlx_lms_trim_counts_once(caches: tuple[Decoder, list[ModelCache], int]) -> None:
    model, (cache, _), first = caches
    expected = model(mx.array([IDS[:9]]), cache=cache)
    assert len(cache) == len(list(cache)) == len(model.layers)
    assert {layer.offset for layer in cache} == {cache.offset} == {first + 9}
    assert cache.nbytes == sum(layer.nbytes for layer in cache) > 0
    assert can_trim_prompt_cache(cache)
    assert [trim_prompt_cache(cache, 3) for _ in range(2)] == [3, 3]
    assert (cache.offset, cache.ids) == (first + 3, TEXT[:first] + IDS[:3])
    assert [layer.trim(1) for layer in reversed(cache)] == [1] * len(cache)
    assert [layer.trim(2) for layer in cache] == [2] * len(cache)
    assert cache.offset == first
    assert mx.array_equal(model(mx.array([IDS[:9]]), cache=cache), expected)
    assert trim_prompt_cache(cache, 1000) == first + 9
    assert cache.offset == 0


def test_mlx_lms_own_loop_runs_on_it(pocket: Pocket) -> None:
    model, _ = pocket
    cache = make_prompt_cache(model)
    assert isinstance(cache, ModelCache)
    assert cache.max_seq_len == model.config.max_position_embeddings == 2048
    given = [token for token, _ in generate_step(mx.array(IDS), model, max_tokens=12, prompt_cache=cache)]
    assert given == [token for token, _ in Run(model, IDS, model.make_cache(64), max_tokens=12)]
    assert cache.ids[: len(IDS) + 11] == IDS + given[:11]


def test_interrupted_steps(caches: tuple[Decoder, list[ModelCache], int]) -> None:
    """At any line: the cache holds all of a step or nothing, and says which."""
    model, (cache, fresh), first = caches
    new = TEXT[first : first + (5 if first == 9 else 150)]
    counted, held = Interruption(0), set()

    def feed(used: ModelCache, *texts: list[int]) -> None:
        for ids in texts:
            mx.eval(model(mx.array([ids]), cache=used))

    counted.of(partial(feed, cache, new))
    for at in [
        *range(1, counted.lines, count(counted.lines // 9, 5)),
        *range(counted.lines - 40, counted.lines, count(2, 1)),
    ]:
        for used in (cache, fresh):
            if used.can_trim_to(first):
                used.trim_to(first)
            else:  # past a window
                used.reset()
                feed(used, TEXT[:first])
        assert Interruption(at).of(partial(feed, cache, new))
        held.add(cache.offset)
        assert cache.ids == TEXT[: cache.offset]
        assert {layer.offset for layer in cache} == {cache.offset}
        if cache.offset > first:
            feed(fresh, new)
        assert mx.array_equal(*(model(mx.array([[60, 61]]), cache=used) for used in (cache, fresh)))
        check_pages(cache.pool, [cache.sequence])
    assert held == {first, first + len(new)}


def test_steps_and_commits_that_are_refused(pocket: Pocket) -> None:
    model, _ = pocket
    cache = model.make_cache(8)
    with pytest.raises(RuntimeError, match="no step to commit"):
        cache.commit()
    model.hidden_states(mx.array([[5, 6]]), cache=cache)
    for number in (3, -1):
        with pytest.raises(ValueError, match=f"num_tokens is {number}"):
            cache.commit(number)
        for trim in (cache.trim, cache.trim_to, cache[0].trim):
            with pytest.raises(ValueError, match="num_tokens is -1; expected an int, 0 or more"):
                trim(-1)
    cache.trim(0)
    with pytest.raises(RuntimeError, match="no step to commit"):
        cache.commit(1)
    with pytest.raises(ContextError, match="9 more tokens do not fit: 0 of the 8 reserved tokens are used"):
        model(mx.array([[1] * 9]), cache=cache)
    assert (cache.offset, cache.batch.step) == (0, None)


def test_a_list_of_layers_is_their_cache(pocket: Pocket) -> None:
    model, _ = pocket
    cache, fresh = model.make_cache(64), model.make_cache(64)
    model(mx.array([IDS]), cache=list(cache))
    model(mx.array([IDS]), cache=fresh)
    assert ModelCache.of(list(cache)) is ModelCache.of(cache) is cache
    assert cache.ids == IDS
    other = copy.deepcopy(list(cache))
    assert ModelCache.of(other) is not cache
    model(mx.array([[5]]), cache=cache)
    assert (cache.offset, other[0].offset) == (len(IDS) + 1, len(IDS))
    assert mx.array_equal(*(model(mx.array([[5]]), cache=used) for used in (other, fresh)))
    for bad, message in (
        ([*cache[:2], *other[2:]], "a list of 4 layers; expected all layers of one cache, in order"),
        ([*reversed(cache)], "a list of 4 layers; expected all layers of one cache, in order"),
        ([], "a list of 0 layers"),
        (cache[:3], "a list of 3 layers; expected all layers of one cache, in order"),
        ([FullKVCache()], "the cache holds a FullKVCache; expected the result of model.make_cache"),
    ):
        with pytest.raises(ValueError, match=message):
            ModelCache.of(bad)


@pytest.mark.parametrize("how", ["refused", "given up"])
def test_embeddings_are_those_of_one_step(pocket: Pocket, how: str) -> None:
    """A step that did not come leaves none to the next."""
    model = pocket[0]
    cache, fresh = (model.make_cache(8) for _ in range(2))
    cache.batch.give_embeddings(mx.zeros((1, 9, model.config.hidden_size)))
    if how == "refused":
        with pytest.raises(ContextError):
            model.next_logits(mx.array([[5] * 9]), cache.batch)
    else:
        cache.trim(0)
    given, expected = (model(mx.array([[5, 6]]), cache=each) for each in (cache, fresh))
    assert mx.array_equal(given, expected)


def test_a_conversation_takes_no_sequence_of_another(pocket: Pocket) -> None:
    cache, other = (pocket[0].make_cache(8) for _ in range(2))
    assert cache.pool.batch([cache.sequence]) is cache.batch
    with pytest.raises(ValueError, match="another pool"):
        cache.pool.batch([other.sequence])

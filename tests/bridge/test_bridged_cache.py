"""The cache of a bridged model in kvant's loop: steps that count when they are committed, exact bytes, trims."""

from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from kvant.bridge.state_layer import StateCache
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import can_trim_prompt_cache
from support.bridged import KINDS, PROMPT, WITH_STATE, bridged, feed
from support.counts import at_widths
from support.numbers import peak_bytes, relative_error
from support.tiny_models import build

from kvant.bridge import BridgedCache, CacheBytes, cache_bytes, make_model_cache
from kvant.bridge.layers import BridgedKVCache
from kvant.cache import CacheOptions
from kvant.errors import ContextError


def _begin(model: Any, cache: BridgedCache, tokens: list[int]) -> None:
    inputs = mx.array([tokens])
    cache.begin(inputs)
    mx.eval(model(inputs, cache=cache.entries), cache.state)


@pytest.mark.parametrize(("name", "bits"), at_widths(KINDS))
def test_a_step_that_is_not_committed_leaves_no_trace(name: str, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not past a window's ring, in a prefill, in a decode step, or where it failed; else it is mlx-lm's own."""
    model, _ = build(name)
    disturbed, quiet = (make_model_cache(model, 64, CacheOptions(kv_bits=bits)) for _ in range(2))
    theirs = mlx_lm_cache.make_prompt_cache(model)
    assert len(quiet) == len(theirs)
    last = [layer for layer in disturbed.layers if isinstance(layer, BridgedKVCache)][-1]

    def broken(*_: Any) -> None:
        raise InterruptedError

    for tokens in (PROMPT[:20], PROMPT[20:29], PROMPT[29:], [5], [6, 7, 8], [9]):
        _begin(model, disturbed, [90] * len(tokens))
        _begin(model, disturbed, [91, 92, 93])
        with monkeypatch.context() as patch:
            patch.setattr(last, "update_and_fetch", broken)
            with pytest.raises(InterruptedError):
                _begin(model, disturbed, [94] * 18)
        disturbed.end_step()
        assert disturbed.offset == quiet.offset
        given = feed(model, disturbed, tokens)
        assert mx.array_equal(given, feed(model, quiet, tokens))
        assert bits or relative_error(given, feed(model, theirs, tokens)) < 1e-5
    assert disturbed.ids == quiet.ids


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "deepseek_v32", "llama4"])
def test_a_part_of_a_step_can_be_committed(name: str) -> None:
    model, _ = build(name)
    drafted, plain = (make_model_cache(model, 64) for _ in range(2))
    for cache in (drafted, plain):
        feed(model, cache, PROMPT)
    _begin(model, drafted, [5, 6, 70, 71])
    drafted.commit(2)
    for token in (5, 6):
        feed(model, plain, [token])
    assert relative_error(feed(model, drafted, [7]), feed(model, plain, [7])) < 2e-2  # one batch or two steps
    assert drafted.ids == plain.ids


@pytest.mark.parametrize("name", WITH_STATE)
def test_a_state_takes_all_of_a_step_or_nothing(name: str) -> None:
    model, _ = build(name)
    cache, fresh = (make_model_cache(model, 64) for _ in range(2))
    _begin(model, cache, PROMPT)
    with pytest.raises(ValueError, match="num_tokens is 2; the step has 30, and the state of a linear layer"):
        cache.commit(2)
    cache.commit(30)
    assert not can_trim_prompt_cache(cache)
    with pytest.raises(ValueError, match="of 30 tokens the cache can forget all, or the last 0"):
        cache.trim(1)
    assert not cache.can_trim_to(29)
    cache.reset()
    assert not any(isinstance(layer, StateCache) and layer.buffers for layer in cache.layers)
    assert mx.array_equal(*(feed(model, c, PROMPT[:7]) for c in (cache, fresh)))
    assert cache.trim(7) == 7
    fresh.reset()
    assert mx.array_equal(*(feed(model, c, PROMPT[:9]) for c in (cache, fresh)))


@pytest.mark.parametrize("name", [*KINDS, "mamba", "minimax_m3_vl", "plamo3", "longcat_flash_ngram", "jamba"])
def test_bytes_are_known_before_and_the_same_after(name: str) -> None:
    model, _ = build(name)
    for options in (CacheOptions(0), CacheOptions(8, 16), CacheOptions(4)):
        planned = cache_bytes(model, 40, options)
        # constants; nothing of the model is computed
        assert peak_bytes(partial(cache_bytes, model, 40, options)) < 2**16
        cache = make_model_cache(model, 40, options)
        assert cache.used == CacheBytes(planned.keys_values, 0)
        for tokens in (PROMPT[:25], PROMPT[25:], [5]):
            feed(model, cache, tokens)
            assert cache.used == planned
        assert cache.nbytes == planned.total


def test_a_step_copies_nothing_where_a_model_ties_its_arrays_together() -> None:
    """DeepSeek V3.2 makes one array depend on others and puts it back: MLX copied all of it at the next append."""
    model = bridged("deepseek_v32")
    peaks = []
    for max_seq_len in (512, 16384):
        cache = model.make_cache(max_seq_len)
        for tokens in (PROMPT, [5], [6]):
            used = peak_bytes(lambda: mx.eval(model.next_logits(mx.array([tokens]), cache)))  # noqa: B023
            cache.commit(ids=[tokens])
        peaks.append(used)
    assert peaks[1] < peaks[0] + 2**16


def test_a_step_is_begun_before_the_model_is_called() -> None:
    model, _ = build("qwen3")
    cache = make_model_cache(model, 8)
    with pytest.raises(RuntimeError, match="no step was begun"):
        model(mx.array([[1]]), cache=cache)
    cache.begin(mx.array([[1, 2]]))
    model(mx.array([[1, 2]]), cache=cache)
    with pytest.raises(RuntimeError, match="no step was begun"):
        model(mx.array([[1, 2]]), cache=cache)
    cache.commit(2)
    with pytest.raises(ContextError, match="7 more tokens do not fit: 2 of the 8"):
        cache.begin(mx.array([[1] * 7]))
    with pytest.raises(ValueError, match="2 sequences; a cache has one"):
        cache.begin(mx.array([[1], [2]]))
    states, _ = build("mamba")  # a limit, too, though no layer has rows
    cache = make_model_cache(states, 8)
    feed(states, cache, [1] * 6)
    with pytest.raises(ContextError, match="3 more tokens do not fit: 6 of the 8"):
        cache.begin(mx.array([[1] * 3]))


def test_released_memory_is_given_back() -> None:
    model, _ = build("falcon_h1")
    mx.synchronize()
    before = mx.get_active_memory()
    cache = make_model_cache(model, 4096)
    feed(model, cache, PROMPT)
    assert mx.get_active_memory() - before >= cache.nbytes
    cache.release()
    mx.clear_cache()
    assert mx.get_active_memory() - before < 2**16
    with pytest.raises(RuntimeError, match="the cache was released"):
        cache.begin(mx.array([[1]]))

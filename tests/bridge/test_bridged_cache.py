"""The cache of a bridged model in kvant's loop: steps that count when they are committed, exact bytes,
trims.
"""

import gc
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import can_trim_prompt_cache
from support.bridged import KINDS, LONG, PROMPT, WITH_STATE, bridged, feed, make_model_cache
from support.counts import at_widths
from support.numbers import peak_bytes, relative_error
from support.tiny_models import build

from kvant.bridge.layers import BridgedLayer
from kvant.bridge.pool import BridgedCache, CacheBytes, pool_needs
from kvant.bridge.probe import probe
from kvant.bridge.prompt_cache import make_prompt_cache
from kvant.cache import CacheOptions
from kvant.cache.pool import single_sizes
from kvant.errors import ContextError


@pytest.mark.parametrize(("name", "bits"), at_widths(KINDS))
def test_a_step_that_is_not_committed_leaves_no_trace(
    name: str, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where tokens of a window wait, in a prefill, in a decode step, or where it failed; else it is
    mlx-lm's.
    """
    model, _ = build(name)
    disturbed, quiet = (make_model_cache(model, 700, CacheOptions(kv_bits=bits)) for _ in range(2))
    theirs = mlx_lm_cache.make_prompt_cache(model)
    append = BridgedLayer.update_and_fetch

    def broken(layer: BridgedLayer, *given: mx.array) -> tuple[mx.array, mx.array]:
        if layer is disturbed.batch.views[-1]:
            raise InterruptedError
        return append(layer, *given)

    for tokens in (PROMPT[:20], PROMPT[20:29], PROMPT[29:], LONG[30:380], [5], [6, 7, 8], [9]):
        feed(model, disturbed, [90] * len(tokens), commits=False)
        feed(model, disturbed, [91, 92, 93], commits=False)
        with monkeypatch.context() as patch:
            patch.setattr(BridgedLayer, "update_and_fetch", broken)
            with pytest.raises(InterruptedError):
                feed(model, disturbed, [94] * 18, commits=False)
        disturbed.batch.end_step()
        assert disturbed.offset == quiet.offset
        given = feed(model, disturbed, tokens)
        assert mx.array_equal(given, feed(model, quiet, tokens))
        assert bits or relative_error(given, feed(model, theirs, tokens)) < 1e-5
    assert disturbed.ids == quiet.ids


WINDOWS = ["gemma3_text", "gpt_oss", "llama4", "mimo_v2_flash", "plamo3", "recurrent_gemma"]


@pytest.mark.parametrize("name", WINDOWS)
def test_pages_of_windows_move(name: str) -> None:
    """Against the model without a cache, on all tokens. mlx-lm's own cache of PLaMo 3 forgets a token too
    early.
    """
    model, _ = build(name)
    cache = make_model_cache(model, 600, CacheOptions(kv_bits=0))
    expected, given, fed = model(mx.array([LONG])), [], 0
    for count in (100, 300, *[1] * 8, 12, 7, 40, 12, *[1] * 12, 80, 29):
        given.append(feed(model, cache, LONG[fed : fed + count]))
        fed += count
    assert fed == 600
    assert relative_error(mx.concatenate(given, axis=1), expected) < 1e-4
    parts = zip(cache.pool.groups, cache.sequence.tables, strict=True)
    assert [table.first > 256 for part, table in parts if part.window] == [True]


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "deepseek_v32", "llama4"])
def test_a_part_of_a_step_can_be_committed(name: str) -> None:
    model, _ = build(name)
    drafted, plain = (make_model_cache(model, 64) for _ in range(2))
    for cache in (drafted, plain):
        feed(model, cache, PROMPT)
    feed(model, drafted, [5, 6, 70, 71], commits=False)
    drafted.commit(2)
    for token in (5, 6):
        feed(model, plain, [token])
    assert relative_error(feed(model, drafted, [7]), feed(model, plain, [7])) < 2e-2  # one batch or two steps
    assert drafted.ids == plain.ids


@pytest.mark.parametrize("name", WITH_STATE)
def test_a_state_takes_all_of_a_step_or_nothing(name: str) -> None:
    model, _ = build(name)
    cache, fresh = (make_model_cache(model, 64) for _ in range(2))
    feed(model, cache, PROMPT, commits=False)
    with pytest.raises(ValueError, match="num_tokens is 2; expected 30: the state of a linear layer"):
        cache.commit(2)
    cache.commit(30)
    assert not can_trim_prompt_cache(cache)
    with pytest.raises(ValueError, match=r"1 of 30 tokens.* go back no further than to 30 tokens"):
        cache.trim(1)
    assert not cache.can_trim_to(29)
    cache.reset()
    assert not cache.used.state
    assert mx.array_equal(*(feed(model, c, PROMPT[:7]) for c in (cache, fresh)))
    assert cache.trim(7) == 7
    fresh.reset()
    assert mx.array_equal(*(feed(model, c, PROMPT[:9]) for c in (cache, fresh)))


@pytest.mark.parametrize("name", [*KINDS, "mamba", "minimax_m3_vl", "plamo3", "longcat_flash_ngram", "jamba"])
def test_bytes_are_known_before_and_the_same_after(name: str) -> None:
    model, _ = build(name)
    for options in (CacheOptions(0), CacheOptions(8, 16), CacheOptions(4)):
        planned = pool_needs(probe(model), single_sizes(40), options)
        # constants; nothing of the model is computed
        assert peak_bytes(lambda: pool_needs(probe(model), single_sizes(40), options)) < 2**16  # noqa: B023
        cache = make_model_cache(model, 40, options)
        assert cache.used == CacheBytes(planned.keys_values, 0)
        for tokens in (PROMPT[:25], PROMPT[25:], [5]):
            feed(model, cache, tokens)
            assert cache.used == planned
        assert cache.nbytes == sum(planned)


def test_a_step_copies_nothing_where_a_model_ties_its_arrays_together() -> None:
    """DeepSeek V3.2 makes one array depend on others and puts it back: MLX copied all of it at the next
    append.
    """
    model = bridged("deepseek_v32")
    peaks = []
    for max_seq_len in (512, 16384):
        cache = model.make_cache(max_seq_len)
        for tokens in (PROMPT, [5], [6]):
            used = peak_bytes(lambda: mx.eval(model.next_logits(mx.array([tokens]), cache)))  # noqa: B023
            cache.batch.commit(ids=[tokens])
        peaks.append(used)
    assert peaks[1] < peaks[0] + 2**16


def test_a_step_holds_the_floats_of_one_layer_at_a_time() -> None:
    model = bridged("qwen3", num_hidden_layers=12)
    cache = model.make_cache(8200)
    cache.sequence.commit([1] * 8000)  # as if they had been fed: its rows are zeros
    used = peak_bytes(lambda: mx.eval(model.next_logits(mx.array([[5]]), cache)))
    assert used < 6 * 8000 * 2 * 2 * 32 * 4


def test_a_step_is_begun_before_the_model_is_called() -> None:
    model, _ = build("qwen3")
    cache = make_model_cache(model, 8)
    with pytest.raises(RuntimeError, match="no step was begun"):
        model(mx.array([[1]]), cache=cache.batch.entries)
    cache.batch.begin(mx.array([[1, 2]]))
    model(mx.array([[1, 2]]), cache=cache.batch.entries)
    with pytest.raises(RuntimeError, match="twice in one step"):
        model(mx.array([[1, 2]]), cache=cache.batch.entries)
    cache.commit(2)
    with pytest.raises(ContextError, match="7 more tokens do not fit: 2 of the 8"):
        cache.batch.begin(mx.array([[1] * 7]))
    with pytest.raises(ValueError, match="inputs has 2 sequences; expected 1"):
        cache.batch.begin(mx.array([[1], [2]]))
    states, _ = build("mamba")  # a limit, too, though no layer has rows
    cache = make_model_cache(states, 8)
    feed(states, cache, [1] * 6)
    with pytest.raises(ContextError, match="3 more tokens do not fit: 6 of the 8"):
        cache.batch.begin(mx.array([[1] * 3]))


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
    with pytest.raises(RuntimeError, match="was released; expected one that was not"):
        cache.batch.begin(mx.array([[1]]))


@pytest.mark.parametrize("name", ["gemma3n", "deepseek_v32", "falcon_h1"])
@pytest.mark.parametrize("make", [make_model_cache, make_prompt_cache])
def test_a_cache_with_an_abandoned_step_is_freed_at_once(
    make: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector does not know how much memory waits for it."""
    model, _ = build(name)
    mx.eval(model.parameters())
    monkeypatch.setattr(BridgedCache, "commit", lambda _: None)  # the step is abandoned
    gc.collect()
    gc.disable()
    before, cache = mx.get_active_memory(), make(model, 4096)
    feed(model, cache, PROMPT)
    held = mx.get_active_memory()
    del cache
    gc.enable()
    assert held - mx.get_active_memory() > 2**19
    assert mx.get_active_memory() - before < 2**16

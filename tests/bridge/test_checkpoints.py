"""Turns of models with states and windows read only what is new, and the tokens are those of a fresh server."""

import random
from dataclasses import replace
from functools import partial
from typing import Any

import architectures as table
import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bridged import REFUSED, bridged
from support.counts import count
from support.interruption import Interruption
from support.pools import check_pages
from support.turns import SIZES, STOP, run, turn

from kvant.bridge.model import BridgedModel
from kvant.bridge.pool import BridgedPool, pool_needs
from kvant.cache import CacheOptions
from kvant.cache.pages import pages_for
from kvant.cache.pool import PoolSequence
from kvant.engine.cache_scheduler import CacheScheduler
from kvant.engine.request import Request
from kvant.engine.scheduler import Scheduler
from kvant.errors import ArgumentError

# gated delta rule and keys; Mamba alone, and beside keys; convolutions; a recurrence beside latent attention; windows
NAMES = ["qwen3_next", "mamba2", "falcon_h1", "lfm2", "kimi_linear", "gpt_oss", "gemma3_text"]


def _scheduler(
    model: BridgedModel, bits: int = 0, deterministic: bool = False, **changes: Any
) -> tuple[Scheduler, BridgedPool]:
    pool = model.make_pool(**SIZES | {"kv_bits": bits} | changes)
    return Scheduler(model, pool, max_batch=2, deterministic=deterministic), pool


def _answered(model: BridgedModel, cache: Any, text: list[int], *, reset: bool = False) -> list[int | None]:
    if reset:
        cache.reset()
    request = Request(text, 8, stop_tokens=[STOP])
    return [token.token for token in CacheScheduler(model, cache, prefill_step_size=64).answer([request])]


@pytest.mark.parametrize("name", count(NAMES, sorted(set(table.measured()) - REFUSED.keys() - {"gpt2"})))
@pytest.mark.parametrize("bits", [0, 8])
def test_a_turn_reads_only_what_is_new(name: str, bits: int) -> None:
    """Two conversations with the same system prompt, at once."""
    model, rng = bridged(name), random.Random(0)
    (scheduler, pool), (fresh, _) = _scheduler(model, bits), _scheduler(model, bits, checkpoints=0)
    system = turn(rng, 150)
    texts = [[*system, *turn(rng, length)] for length in (61, 200)]
    known = [0, len(system)]
    for _ in range(3):
        answers = run(scheduler, *texts)
        # Where there is no state, fewer than 16 tokens of a page are fed and not copied.
        copied = [each if pool.states or each % 128 >= 16 else each // 128 * 128 for each in known]
        assert [first.cached_tokens for _, first in answers] == copied
        assert [answer for answer, _ in answers] == [answer for answer, _ in run(fresh, *texts)]
        known = [len(text) + len(answer) - 1 for text, (answer, _) in zip(texts, answers, strict=True)]  # but the last
        for text, (answer, _) in zip(texts, answers, strict=True):
            text += [*answer, *turn(rng, 40)]
    check_pages(pool, [])


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "gpt_oss", "recurrent_gemma", "llama4"])
def test_a_conversation_goes_back(name: str) -> None:
    """Another question in place of the last reads the last turn, another talk what is behind the system prompt.

    The answers are those of a cache that was fed from the beginning.
    """
    model, rng = bridged(name), random.Random(0)
    cache, other = (model.make_cache(700, kv_bits=8, checkpoints=places) for places in (6, 0))

    def ask(text: list[int]) -> tuple[int, list[Any]]:
        expected = _answered(model, other, text, reset=True)
        read, answer = cache.keep_common(text), _answered(model, cache, text)
        assert answer == expected
        return read, answer

    text = [*turn(rng, 50), *turn(rng, 100)]
    before, known = [], 0
    for _ in range(3):
        read, answer = ask(text)
        assert read == known
        before.append(text)
        known = len(text) + len(answer) - 1
        text = [*text, *answer, *turn(rng, 40)]
    last_turn = len(before[1]) + 8 - 1  # what was known before the last question
    assert ask(before[2])[0] in (last_turn, len(before[2]) - 1)  # a window goes back a few tokens by itself
    assert ask([*before[2][:-40], *turn(rng, 30)])[0] in (last_turn, last_turn + 1)
    assert ask([*before[2][:50], *turn(rng, 60)])[0] == 50
    assert len(cache.held.kept_arrays) > 0
    assert cache.fork().offset == cache.offset
    cache.reset()
    assert cache.held.kept_arrays == []


@pytest.mark.parametrize("name", ["qwen3_next", "mamba", "gpt_oss"])
@pytest.mark.parametrize("whole_pages", [False, True])
def test_the_logits_are_those_without_a_break(name: str, whole_pages: bool) -> None:
    """Bit for bit, after the same chunks."""
    model, rng = bridged(name), random.Random(1)
    pool = model.make_pool(**SIZES, kv_bits=8)
    text, place = turn(rng, 300), 128 if whole_pages else 150
    whole, behind = pool.sequence(400), ((place, place + 50), (place + 50, place + 60))

    def fed(sequence: PoolSequence, start: int, end: int) -> mx.array:
        batch = pool.batch([sequence])
        logits = model.next_logits(mx.array([text[start:end]]), batch)
        mx.eval(logits, batch.state)
        batch.commit()
        return logits

    for start, end in ((0, 64), (64, 128), *([] if whole_pages else [(128, place)])):
        fed(whole, start, end)
    whole.share_prefix(last_page=not whole_pages)
    expected = [fed(whole, *each) for each in behind]
    resumed = pool.sequence(400, text[: place + 60], whole_pages=whole_pages)
    assert resumed.length == place
    for each, logits in zip(behind, expected, strict=True):
        assert mx.array_equal(fed(resumed, *each), logits)
    whole.release()
    other = pool.sequence(400, [*text[:140], 91], whole_pages=whole_pages)  # no state was kept there
    assert other.length == (128 if whole_pages or name == "gpt_oss" else 0)


@settings(max_examples=count(12, 300), deadline=None, derandomize=count(True, False))
@given(data=st.data())
@pytest.mark.parametrize("name", ["qwen3_next", "gpt_oss"])
def test_any_turns_under_eviction(name: str, data: st.DataObject) -> None:
    """Whatever was given up meanwhile, tokens are a fresh server's, and nothing is lost or held twice."""
    model, rng = bridged(name), random.Random(data.draw(st.integers(0, 9)))
    changes = {
        "tokens": data.draw(st.sampled_from([768, 1152])),
        "checkpoints": data.draw(st.sampled_from([1, 2, 4])),
        "max_seq_len": 512,
    }
    deterministic = data.draw(st.booleans())
    (scheduler, pool), (fresh, _) = (
        _scheduler(model, 8, deterministic, prefill_step_size=128, **changes | each)
        for each in ({}, {"checkpoints": 0})
    )
    systems = [turn(rng, length) for length in (20, 128, 150)]
    texts = [[*system, *turn(rng, 30)] for system in systems] + [[*systems[2], *turn(rng, 50)]]
    for _ in range(data.draw(st.integers(2, 5))):
        chosen = data.draw(st.lists(st.sampled_from(texts), min_size=1, max_size=3))
        chosen = [list(text) for text in chosen]
        answers = run(scheduler, *chosen, max_tokens=5)
        assert [answer for answer, _ in answers] == [answer for answer, _ in run(fresh, *chosen, max_tokens=5)]
        check_pages(pool, [])
        for text in texts:
            if text in chosen and len(text) < 400:
                text += [*answers[chosen.index(text)][0], *turn(rng, data.draw(st.integers(1, 60)))]


@pytest.mark.parametrize("name", ["qwen3_next", "gpt_oss"])
def test_bytes_are_planned_and_counted(name: str) -> None:
    model = bridged(name)
    sizes = {key: value for key, value in SIZES.items() if key != "checkpoints"}
    options = CacheOptions(8, 32, checkpoints=3)
    pool = model.make_pool(**sizes, **options.fields)
    assert pool.nbytes == sum(pool_needs(model.entries, sizes, options))
    more = pool.nbytes - model.make_pool(**sizes, **replace(options, checkpoints=0).fields).nbytes
    page = {layer: layer.nbytes // part.pages.num for part, layer in pool.places}
    seen = {part: 1 if part.window is None else pages_for(part.window) + 1 for part, _ in pool.places}
    assert more == 3 * sum(page[layer] * seen[part] for part, layer in pool.places) + 3 * sum(
        state.nbytes for state in pool.states
    )
    with pytest.raises(ArgumentError, match="checkpoints is -1"):
        model.make_cache(64, checkpoints=-1)


@pytest.mark.parametrize("name", ["qwen3_next", "gpt_oss", "llama4"])
def test_going_back_is_interrupted(name: str) -> None:
    """Anywhere: the cache holds what it held, the place that was kept, or nothing; and what is fed then is right."""
    model, rng = bridged(name), random.Random(2)
    text, behind = turn(rng, 400), turn(rng, 40)

    def fed() -> Any:
        cache = model.make_cache(500, kv_bits=8, checkpoints=2)
        for start in range(0, 400, 50):
            mx.eval(model(mx.array([text[start : start + 50]]), cache=cache))
            if start == 50:
                cache.held.share_prefix(last_page=True)
        return cache

    counted, expected, lengths = Interruption(0), {}, set()
    for length in (0, 100, 400):
        cache = fed()
        assert cache.go_back(length) == length
        expected[length] = model(mx.array([behind]), cache=cache)
    counted.of(partial(fed().go_back, 120))
    for seed in range(count(12, 300)):
        cache = fed()
        Interruption(random.Random(seed).randint(1, counted.lines)).of(partial(cache.go_back, 120))
        length = cache.offset
        lengths.add(length)
        assert mx.array_equal(model(mx.array([behind]), cache=cache), expected[length])
    assert len(lengths) > 1


def test_states_that_went_while_a_sequence_was_opened() -> None:
    """Its last pages are those of the checkpoint: nothing is shared then, and it is still its client's own."""
    model, rng = bridged("qwen3_next"), random.Random(3)
    pool = model.make_pool(256, sequences=2, max_seq_len=384, prefill_step_size=256, checkpoints=1)
    text = turn(rng, 150)
    first = pool.sequence(150, salt=b"a")
    model.next_logits(mx.array([text]), batch := pool.batch([first]))
    batch.commit()
    first.share_prefix(100, last_page=True)  # states are those of all tokens
    (other := pool.sequence(101, [*text[:100], 1], salt=b"a")).release()
    assert other.length == 0
    first.share_prefix(last_page=True)
    first.release()
    other = pool.sequence(128)
    again = pool.sequence(256, [*text, 1], salt=b"a", whole_pages=False)  # the page with the states becomes its own
    assert (again.length, again.salt) == (0, b"a")
    check_pages(pool, [other, again])

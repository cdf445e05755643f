"""Ctrl-C in a step or a prompt, and a changed history: what was not committed is gone, and nothing is ever wrong."""

import random
from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from support.counts import count
from support.interruption import Interruption
from support.kinds import WINDOW, Loaded

from kvant.cache import FullKVCache, ModelCache
from kvant.engine.conversation import Conversation
from kvant.engine.run import Run
from kvant.models import Decoder


def _made(model: Decoder, bits: int | None, split: bool, *steps: list[int]) -> ModelCache:
    grows = bits is None
    layers = [FullKVCache() for _ in model.layers] if grows else model.make_cache(64, kv_bits=bits, bias_split=split)
    return _fed(model, ModelCache.of(layers), *steps)


def _fed(model: Decoder, cache: ModelCache, *steps: list[int]) -> ModelCache:
    for step in steps:
        mx.eval(model(mx.array([step]), cache=cache))
    return cache


def test_interrupted_steps(pocket: tuple[Decoder, Any]) -> None:
    """Steps of 1 to 8 tokens, at any line. The cache afterwards holds all of a step or nothing, and says which."""
    model, _ = pocket
    for seed in range(count(25, 500)):
        rng = random.Random(seed)
        first, second, third = ([rng.randrange(3, 1000) for _ in range(rng.randint(1, 8))] for _ in range(3))
        make = partial(_made, model, rng.choice([8, 4, 0, None]), rng.random() < 0.5)
        cache, counted = make(first), Interruption(0)
        counted.of(partial(_fed, model, make(first), second))
        assert Interruption(rng.randint(1, counted.lines)).of(partial(_fed, model, cache, second))
        assert cache.ids[0] in (first, first + second)
        assert {layer.offset for layer in cache} == {len(cache.ids[0])}
        if cache.ids[0] == first:
            _fed(model, cache, second)
        assert mx.array_equal(*(model(mx.array([third]), cache=each) for each in (cache, make(first, second))))


@pytest.mark.parametrize("loaded", ["mistral"], indirect=True)
@pytest.mark.parametrize(("fed", "left"), [(10, 40), (60, 0)])
def test_an_interrupted_prompt(loaded: Loaded, fed: int, left: int) -> None:
    """A few tokens are taken back exactly. Where the window has moved on, the cache is emptied and can be used."""
    model, _ = loaded
    prompt = [t % 120 + 3 for t in range(90)]

    def progress(done: int, total: int) -> None:
        if done >= fed:
            raise KeyboardInterrupt

    cache = model.make_cache(256)
    list(Run(model, prompt[:40], cache, max_tokens=1))
    run = Run(model, prompt, cache, max_tokens=3, prefill_step_size=5, progress=progress)
    with pytest.raises(KeyboardInterrupt):
        next(run)
    assert cache.offset == left
    after = [token for token, _ in Run(model, prompt[left:], cache, max_tokens=8)]
    assert after == [token for token, _ in Run(model, prompt, model.make_cache(256), max_tokens=8)]


@pytest.mark.parametrize("loaded", ["mistral"], indirect=True)
def test_a_changed_history_is_fed_again(loaded: Loaded) -> None:
    """Behind a window that cannot go back so far."""
    conversation, fresh = (Conversation(*loaded, loaded[0].make_cache(512, kv_bits=0)) for _ in range(2))
    for question in ("w10 w11 w12 w13 w14", "w15 w16", "w17 w18"):
        list(conversation.send(question, max_tokens=12))
    assert conversation.reused_tokens > WINDOW
    conversation.messages[0] = {"role": "user", "content": "w20 w11 w12 w13 w14"}
    fresh.messages = [*conversation.messages]
    answers = [[response.token for response in each.send("w19", max_tokens=12)] for each in (conversation, fresh)]
    assert conversation.reused_tokens == 0
    assert answers[0] == answers[1]

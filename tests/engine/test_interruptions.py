"""Ctrl-C at any line of kvant's code: what was not committed is gone, and the next answer is that of a fresh cache."""

import random
from functools import partial
from typing import Any

import mlx.core as mx
from support.counts import count
from support.interruption import Interruption

from kvant.cache import FullKVCache, ModelCache
from kvant.engine.run import Run
from kvant.models import Decoder

Pocket = tuple[Decoder, Any]
RUNS = count(25, 500)


def _make(model: Decoder, rng: random.Random) -> ModelCache:
    bits = rng.choice([8, 4, 0, None])
    if bits is None:
        return ModelCache([FullKVCache() for _ in model.layers])
    return model.make_cache(64, kv_bits=bits, bias_split=rng.random() < 0.5)


def test_interrupted_steps(pocket: Pocket) -> None:
    """Steps of 1 to 8 tokens. The cache afterwards holds all of a step or nothing, and says which."""
    model, _ = pocket
    interrupted = 0
    for seed in range(RUNS):
        rng = random.Random(seed)
        steps = [[rng.randrange(3, 1000) for _ in range(rng.randint(1, 8))] for _ in range(3)]
        cache = _fed(model, _make(model, rng), steps[:1])
        before = cache.ids[0]
        spare = _copy(model, cache, steps[:1])
        counted = Interruption(0)
        counted.of(partial(_fed, model, spare, steps[1:2]))
        interrupted += Interruption(rng.randint(1, counted.lines)).of(partial(_fed, model, cache, steps[1:2]))
        assert cache.ids[0] in (before, before + steps[1])
        assert {layer.offset for layer in cache} == {len(cache.ids[0])}
        if cache.ids[0] == before:
            model(mx.array([steps[1]]), cache=cache)
        fresh = _copy(model, cache, steps[:2])
        assert mx.array_equal(*(model(mx.array([steps[2]]), cache=c) for c in (cache, fresh)))
    assert interrupted == RUNS


def test_interrupted_runs(pocket: Pocket) -> None:
    """In the prompt or between tokens: the cache holds the tokens handed out but the last, or is as it was."""
    model, _ = pocket
    interrupted = 0
    prompt, first = list(range(30, 41)), [[5, 6, 7]]
    settings = {"max_tokens": 4, "prefill_step_size": 4}
    counted = Interruption(0)
    counted.of(lambda: list(Run(model, prompt, _fed(model, model.make_cache(64), first), **settings)))
    for seed in range(RUNS):
        rng = random.Random(seed)
        cache = _fed(model, _make(model, rng), first)
        run = Run(model, prompt, cache, **settings)
        heard: list[int] = []

        def listen(run: Run = run, heard: list[int] = heard) -> None:
            for token, _ in run:
                heard.append(token)

        interrupted += Interruption(rng.randint(1, int(0.6 * counted.lines))).of(listen)
        ids = cache.ids[0]
        allowed = [first[0] + prompt + heard[:-1] if heard else first[0]]
        if len(run.generated) > len(heard):  # between the end of the step and the hand of its caller
            allowed.append(first[0] + prompt + run.generated[:-1])
        assert ids in allowed
        question = [8, 9, 10]
        fresh = _copy(model, cache, _steps(ids, len(first[0]), prompt))
        again, expected = (Run(model, question, c, max_tokens=3) for c in (cache, fresh))
        assert [t for t, _ in again] == [t for t, _ in expected]
    assert interrupted > 0.9 * RUNS


def _steps(ids: list[int], first: int, prompt: list[int]) -> list[list[int]]:
    """The steps in which the tokens were fed: a product of several rows differs from that of one in its last bits."""
    steps = [ids[:first]]
    steps += [ids[first : first + len(prompt)][i : i + 4] for i in range(0, len(prompt), 4)] if len(ids) > first else []
    return steps + [[token] for token in ids[first + len(prompt) :]]


def _fed(model: Decoder, cache: ModelCache, steps: list[list[int]]) -> ModelCache:
    for step in steps:
        mx.eval(model(mx.array([step]), cache=cache))
    return cache


def _copy(model: Decoder, cache: ModelCache, steps: list[list[int]]) -> ModelCache:
    """A fresh cache of the same kind, fed with these steps."""
    layer: Any = cache[0]
    if isinstance(layer, FullKVCache):
        return _fed(model, ModelCache([FullKVCache() for _ in model.layers]), steps)
    split = any(other.bias_split is not None for other in cache)
    return _fed(model, model.make_cache(64, kv_bits=layer.kv_bits, bias_split=split), steps)

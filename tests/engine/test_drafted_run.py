"""Drafts: the text and the cache of a run without them."""

import random
from typing import Any

import mlx.core as mx
import pytest
from support.drafts import KnownDrafts

from kvant.engine.drafted_run import DraftedRun
from kvant.engine.run import Run
from kvant.models import Decoder
from kvant.sample_utils import make_logits_processors, make_sampler

Pocket = tuple[Decoder, Any]
PROMPT = [(7 * i) % 1000 + 20 for i in range(40)]
TOKENS = 30
SAMPLERS = {"greedy": {}, "seeded": {"temp": 0.9, "seed": 3}, "filtered": {"temp": 1.3, "top_p": 0.95, "seed": 8}}


def _settings(sampler: str, *, processed: bool) -> dict[str, Any]:
    processors = make_logits_processors({30: 1.0}, repetition_penalty=1.2, frequency_penalty=0.3) if processed else []
    return {"sampler": make_sampler(**SAMPLERS[sampler]), "logits_processors": processors}


@pytest.mark.parametrize(
    ("bits", "sampler", "processed"),
    [(bits, sampler, sampler == "seeded" and bits != 8) for bits in (0, 8, 4) for sampler in SAMPLERS],
)
def test_the_same_text_and_cache(pocket: Pocket, bits: int, sampler: str, *, processed: bool) -> None:
    model, _ = pocket
    plain_cache, cache = (model.make_cache(128, kv_bits=bits) for _ in range(2))
    settings = _settings(sampler, processed=processed)
    plain_run = Run(model, PROMPT, plain_cache, max_tokens=TOKENS, **settings)
    plain = list(plain_run)
    text = [*PROMPT, *(token for token, _ in plain)]
    run = DraftedRun(model, PROMPT, cache, max_tokens=TOKENS, drafts=KnownDrafts(text=text), **settings)
    for number, (token, logprobs) in enumerate(run):
        assert token == plain[number][0]
        assert cache.ids[0] == text[: len(PROMPT) + number]
        assert mx.abs(mx.exp(logprobs) - mx.exp(plain[number][1])).max() < 0.05
    counts = run.drafts
    assert counts is not None
    assert counts.steps < 0.6 * TOKENS
    assert 0 < counts.accepted < counts.drafted
    run.keep_last()
    plain_run.keep_last()
    assert cache.ids[0] == plain_cache.ids[0] == text
    after, expected = (mx.softmax(model(mx.array([[5, 6, 7]]), cache=each)) for each in (cache, plain_cache))
    assert mx.abs(after - expected).max() < {0: 1e-5, 8: 0.01, 4: 0.1}[bits]


def test_whoever_samples_sees_every_token_in_order(pocket: Pocket) -> None:
    """A processor and a sampler of the caller's, which keep state, are called as without drafts."""
    model, _ = pocket

    def heard(drafts: KnownDrafts | None) -> tuple[list[int], list[list[int]], list[int]]:
        seen: list[list[int]] = []
        picked: list[int] = []

        def seeing(tokens: mx.array, logits: mx.array) -> mx.array:
            seen.append(tokens.tolist())  # type: ignore[arg-type]
            return logits + 0.5 * (len(seen) % 3) * (mx.arange(logits.shape[-1]) % 2)

        def sampler(logprobs: mx.array) -> mx.array:
            token = mx.random.categorical(logprobs)
            picked.append(int(token.item()))  # type: ignore[arg-type]
            return token

        mx.random.seed(5)
        settings: dict[str, Any] = {"max_tokens": TOKENS, "sampler": sampler, "logits_processors": [seeing]}
        cache = model.make_cache(128, kv_bits=0)
        made = Run(model, PROMPT, cache, **settings)
        if drafts is not None:
            made = DraftedRun(model, PROMPT, cache, drafts=drafts, **settings)
        return [token for token, _ in made], seen, picked

    plain = heard(None)
    assert heard(KnownDrafts(text=[*PROMPT, *plain[0]])) == plain
    assert plain[1] == [[*PROMPT, *plain[0][:n]] for n in range(TOKENS)]


def test_a_stop_token_and_limits(pocket: Pocket) -> None:
    model, _ = pocket
    plain = [token for token, _ in Run(model, PROMPT, model.make_cache(128), max_tokens=TOKENS)]
    for end in range(1, 20, 3):
        stop = plain[end]
        first = plain.index(stop)
        for options in ({"stop_tokens": {stop}}, {"max_tokens": first + 1}):
            cache = model.make_cache(128)
            drafts = KnownDrafts(text=[*PROMPT, *plain], mistakes=0.1, seed=end)
            run = DraftedRun(model, PROMPT, cache, drafts=drafts, **options)  # type: ignore[arg-type]
            assert [token for token, _ in run] == plain[: first + 1]
            assert run.finish_reason == ("stop" if "stop_tokens" in options else "length")
            assert cache.ids[0] == [*PROMPT, *plain[:first]]
            run.keep_last()
            assert cache.ids[0] == [*PROMPT, *plain[: first + 1]]


def test_a_full_reservation(pocket: Pocket) -> None:
    model, _ = pocket
    cache = model.make_cache(60)
    plain = [token for token, _ in Run(model, PROMPT, cache)]
    drafts = KnownDrafts(text=[*PROMPT, *plain, *[1] * 20], mistakes=0)
    run = DraftedRun(model, PROMPT, model.make_cache(60), drafts=drafts)
    assert [token for token, _ in run] == plain
    assert run.finish_reason == "context"


def test_another_run_ends_it(pocket: Pocket) -> None:
    model, _ = pocket
    rng = random.Random(1)
    plain = [token for token, _ in Run(model, PROMPT, model.make_cache(128), max_tokens=TOKENS)]
    for seed in range(3):
        cache = model.make_cache(256)
        run = DraftedRun(model, PROMPT, cache, max_tokens=TOKENS, drafts=KnownDrafts(text=PROMPT + plain, seed=seed))
        taken = rng.randrange(1, 20)
        for _ in range(taken):
            next(run)
        held = cache.ids[0]
        assert held == [*PROMPT, *plain[: taken - 1]]
        other = [token for token, _ in Run(model, [5, 6], cache, max_tokens=4)]
        with pytest.raises(RuntimeError, match="the run was ended"):
            next(run)
        fresh = model.make_cache(256)
        list(Run(model, PROMPT, fresh, max_tokens=taken))
        assert fresh.ids[0] == held
        assert other == [token for token, _ in Run(model, [5, 6], fresh, max_tokens=4)]

"""Drafts side by side, of known texts and of a draft model: every answer is as alone, and both pools are whole."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import mlx.core as mx
import pytest
from support.batches import OPTIONS, PAGES, alone, ids_of, run_all, scheduler_of
from support.counts import count
from support.drafts import KnownDrafts, draft_by_chance
from support.pools import check_pages, tiny_model

from kvant.cache.pool import Pool
from kvant.cache.pool_sequence import PoolSequence
from kvant.engine.model_drafts import ModelDrafts
from kvant.engine.pooled_drafts import PooledDrafts
from kvant.engine.request import Request, Token
from kvant.engine.run import CacheScheduler
from kvant.engine.scheduler import Scheduler
from kvant.models import Decoder, LanguageModel
from kvant.sample_utils import make_sampler

Pocket = tuple[Decoder, Any]
Told = dict[Request, list[Token]]


def _beside(pool: Pool, model: LanguageModel, draft_model: LanguageModel) -> PooledDrafts:
    return ModelDrafts(model=draft_model, vocab_size=model.config.vocab_size, num_draft_tokens=7).beside(pool)


def _with_known(model: Decoder, requests: Sequence[Request], bits: int = 0, mistakes: float = 0.2) -> list[Request]:
    """The requests, three of four with drafts of what each gives alone."""
    made = list(requests)
    for number, request in enumerate(requests):
        if number % 4:
            text = [*request.prompt, *alone(model, replace(request, answers=1), bits), 1, 2, 3]
            made[number] = replace(request, drafts=KnownDrafts(text=text, seed=number, mistakes=mistakes))
    return made


def _answered(scheduler: Scheduler, requests: Sequence[Request], gone: Sequence[Request], rng: Random) -> Told:
    """Requests that come in turns, some of them cancelled when they have a few tokens."""
    waiting, told = list(requests), Told()
    while waiting or not scheduler.idle:
        for _ in range(min(rng.randrange(3), len(waiting))):
            scheduler.submit(waiting.pop(0))
        for token in scheduler.step():
            told.setdefault(token.request, []).append(token)
        for request in gone:
            if len(told.get(request, ())) > 5:
                scheduler.cancel(request)
        for request, number, sequence in scheduler.held:
            if got := ids_of(told.get(request, ()), number):
                assert sequence.ids in ([*request.prompt, *got[:-1]], [*request.prompt, *got])
    return told


def _check(scheduler: Scheduler, told: Told, plain: dict[Request, list[int]], gone: Sequence[Request] = ()) -> None:
    """Tokens as alone, reasons, and what the counts say of drafts."""
    for request, answer in plain.items():
        tokens = [token for token in told[request] if token.answer == 0]
        assert ids_of(tokens) == (answer[: len(ids_of(tokens))] if request in gone else answer)
        assert [token.finish_reason for token in tokens[:-1]] == [None] * (len(tokens) - 1)
        ended = "stop" if request.stop_tokens else "length"
        assert tokens[-1].finish_reason == ("cancelled" if request in gone else ended)
        assert (request.drafts is not None) or not any(token.from_draft for token in tokens)
        assert {len(token.top_logprobs) for token in tokens if token.token is not None} == {request.top_logprobs}
    counts, answers = scheduler.drafts, sum(request.answers for request in plain)
    given = [token for tokens in told.values() for token in tokens if token.token is not None]
    assert counts.accepted == sum(token.from_draft for token in given)
    assert counts.accepted < counts.tokens <= len(given) - answers  # an answer's first is none
    assert 0 <= counts.steps - (counts.tokens - counts.accepted) <= len(gone)


@pytest.mark.parametrize(
    ("kind", "bits"), [("known", 0), ("known", 8), ("own", 0), ("small", 0), *count([], [("own", 8)])]
)
def test_every_answer_as_alone(
    pocket: Pocket, small: LanguageModel, heldout_ids: list[int], monkeypatch: pytest.MonkeyPatch, kind: str, bits: int
) -> None:
    """They come, go and are cancelled; some share a prompt, some are past the draft model's context."""
    draft_by_chance(monkeypatch, bits)
    model, rng = pocket[0], Random(kind)
    scheduler, pool = scheduler_of(model, bits, max_batch=6, pool={"max_seq_len": 400})
    requests = [
        Request(heldout_ids[43 * n % 700 :][: 5 + 37 * n % 150], **{"max_tokens": 12 + n % 5} | options)
        for n, options in enumerate(OPTIONS * count(1, 10))
    ]
    stop = alone(model, requests[0], bits)[6]
    requests += [
        replace(requests[0], stop_tokens={stop}),
        Request(heldout_ids[:140], 12, make_sampler(1.0, seed=3), answers=3),
        Request(heldout_ids[:130], 20),
        Request(heldout_ids[500:540], 60),
    ]
    drafts = None
    if kind == "known":
        made = _with_known(model, requests, bits)
    else:
        drafts = _beside(pool, model, model if kind == "own" else small)
        made = [replace(request, drafts=drafts if n % 7 else None) for n, request in enumerate(requests)]
    plain = {each: alone(model, replace(each, answers=1, drafts=None), bits) for each in made}
    told = _answered(scheduler, made, made[-1:], rng)
    if bits:  # rounding may flip a stored value, and so a text
        alike = [ids_of(told[each]) == answer for each, answer in plain.items() if each is not made[-1]]
        assert sum(alike) >= 0.97 * len(made) - 1
    else:
        _check(scheduler, told, plain, made[-1:])
        third = replace(requests[-3], answers=1, sampler=make_sampler(1.0, seed=5))
        assert ids_of(told[made[-3]], 2) == alone(model, third)
    counts = scheduler.drafts
    assert counts.drafted > 40
    assert kind == "small" or 0.4 * counts.drafted < counts.accepted
    check_pages(pool, [])
    if drafts is not None:
        assert not drafts.drafters
        check_pages(drafts.pool, [])


@pytest.mark.parametrize("kind", ["known", "own"])
def test_windows_and_whoever_comes_and_goes(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A pool that is always full; what left a draft model's window is read again where a draft is taken back."""
    model = tiny_model(tmp_path, (None, 40, 200), hidden_size=64)
    draft_by_chance(monkeypatch, 3)
    rng, back = Random(4), []
    can_trim_to = PoolSequence.can_trim_to
    monkeypatch.setattr(PoolSequence, "can_trim_to", lambda own, n: back.append(can_trim_to(own, n)) or back[-1])
    scheduler, pool = scheduler_of(model, 0, 7, max_batch=4, pool={"max_seq_len": 512, "prefill_step_size": 64})
    drafts, hot = _beside(pool, model, model), make_sampler(6.0, seed=3)  # most of a model's drafts are wrong
    ids = [(7 + 31 * i) % 290 for i in range(600)]
    requests = [
        Request(
            ids[(s := rng.randrange(300)) : s + rng.randrange(1, 190)], rng.choice([3, 20, 60]), hot if n % 2 else None
        )
        for n in range(6)
    ]
    requests += [Request(ids[:n], 40, hot) for n in (140, 150, 160)]  # a page leaves the window while they draft
    if kind == "known":
        made = _with_known(model, requests, mistakes=0.1)
    else:
        made = [replace(request, drafts=drafts) for request in requests]
    plain = {each: alone(model, replace(each, drafts=None)) for each in made}
    gone = made[2:4]
    told = _answered(scheduler, made, gone, rng)
    _check(scheduler, told, plain, [each for each in gone if told[each][-1].finish_reason == "cancelled"])
    assert scheduler.drafts.drafted > 40
    assert kind == "known" or not all(back)
    for each in (pool, drafts.pool):
        check_pages(each, [])


def test_forks_and_caches(pocket: Pocket, heldout_ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Several answers of a prompt share its pages; a cache that is kept has what the answer has."""
    draft_by_chance(monkeypatch, 5)
    scheduler, _ = scheduler_of(pocket[0])
    sampler = make_sampler(1.0, seed=2)
    single = Request(heldout_ids[:70], 24, sampler)
    text = [*single.prompt, *alone(pocket[0], single)]
    # It ends in the middle of what is drafted.
    drafts = KnownDrafts(text=text, mistakes=0.0)
    request = replace(single, answers=3, keep_cache=True, stop_tokens={text[70 + 17]}, drafts=drafts)
    (told,) = run_all(scheduler, [request]).values()
    plain, _ = scheduler_of(pocket[0])
    (expected,) = run_all(plain, [replace(request, drafts=None)]).values()
    for answer in range(3):
        assert ids_of(told, answer) == ids_of(expected, answer)
        (cache,) = [token.cache for token in told if token.answer == answer and token.cache is not None]
        assert cache.ids[0] == [*request.prompt, *ids_of(told, answer)]
    assert any(token.from_draft for token in told)


@pytest.mark.parametrize("is_alone", [True, False])
def test_whoever_samples_sees_every_token_in_order(
    pocket: Pocket, heldout_ids: list[int], monkeypatch: pytest.MonkeyPatch, is_alone: bool
) -> None:
    """What keeps state is called as without drafts, until it fails: the tokens before came, and the others go on."""
    draft_by_chance(monkeypatch, 6)
    model, seen, cache = pocket[0], list[list[int]](), pocket[0].make_cache(64, kv_bits=0)

    def seeing(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())  # type: ignore[arg-type]
        if len(tokens) == 25:
            raise ZeroDivisionError("by zero")
        return logits + 0.5 * (len(seen) % 3) * (mx.arange(logits.shape[-1]) % 2)

    plain = [Request(heldout_ids[s : s + 10], 30) for s in (20, 0, 40)][: 1 if is_alone else 3]
    plain[0] = replace(plain[0], sampler=mx.random.categorical, logits_processors=[seeing])
    requests = plain
    for drafting in (False, True):
        seen.clear()
        mx.random.seed(5)
        scheduler = CacheScheduler(model, cache) if is_alone else scheduler_of(model)[0]
        told = run_all(scheduler, requests)
        error, found = told[requests[0]][-1].error, [ids_of(told[request]) for request in requests]
        if not drafting:
            texts = [[*request.prompt, *answer, 1, 2] for request, answer in zip(plain, found, strict=True)]
            requests = [replace(plain[n], drafts=KnownDrafts(text=text, seed=n)) for n, text in enumerate(texts)]
        assert found == [text[10:-2] for text in texts]
        assert seen == [texts[0][: 10 + n] for n in range(16)]
        assert isinstance(error, ZeroDivisionError)
        assert [len(answer) for answer in found] == [15, 30, 30][: len(found)]
        assert scheduler.counts.free_pages == (1 if is_alone else PAGES)
        assert cache.ids[0] == (texts[0][:24] if is_alone else [])
    assert scheduler.drafts.accepted > 5

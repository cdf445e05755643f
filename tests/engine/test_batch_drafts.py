"""Drafts side by side, of known texts and of a draft model: every answer is as alone, and both pools are
whole.
"""

import operator
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
from kvant.engine.cache_scheduler import CacheScheduler
from kvant.engine.drafts import Drafts
from kvant.engine.head_drafts import HeadDrafts
from kvant.engine.model_drafts import ModelDrafts
from kvant.engine.request import Request, Token
from kvant.engine.scheduler import Scheduler
from kvant.models import Decoder
from kvant.sample_utils import make_sampler

Pocket = tuple[Decoder, Any]
Told = dict[Request, list[Token]]


def _answered(
    scheduler: Scheduler, requests: Sequence[Request], gone: Sequence[Request], rng: Random
) -> Told:
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
        for request, number, sequence in scheduler.reserved_answers:
            if got := ids_of(told.get(request, ()), number):
                assert sequence.ids in ([*request.prompt, *got[:-1]], [*request.prompt, *got])
    return told


def _check(scheduler: Scheduler, told: Told, plain: dict[Request, list[int]]) -> None:
    """Tokens as alone, caches, reasons, and what the counts say of drafts."""
    gone = 0
    for request, answer in plain.items():
        for number, expected in enumerate([answer, *([None] * (request.answers - 1))]):
            tokens = [token for token in told[request] if token.answer == number]
            *others, last = tokens
            ids = ids_of(tokens, number)
            assert expected is None or ids == expected[: len(ids)]
            ended = (
                "cancelled"
                if last.token is None
                else "stop"
                if last.token in request.stop_tokens
                else "length"
            )
            assert [token.finish_reason for token in tokens] == [None] * len(others) + [ended]
            assert last.token is None or expected is None or ids == expected
            assert (last.cache is not None) == request.keep_cache
            assert last.cache is None or last.cache.ids == [*request.prompt, *ids]
            assert (request.drafts is not None) or not any(token.from_draft for token in tokens)
            assert {len(token.top_logprobs) for token in tokens if token.token is not None} == {
                request.top_logprobs
            }
            gone += last.token is None
    counts, answers = scheduler.drafts, sum(request.answers for request in plain)
    given = [token for tokens in told.values() for token in tokens if token.token is not None]
    assert counts.accepted == sum(token.from_draft for token in given)
    assert counts.accepted < counts.tokens <= len(given) - answers  # an answer's first is none
    assert 0 <= counts.steps - (counts.tokens - counts.accepted) <= gone


def _draft(
    kind: str, models: Sequence[Decoder], requests: list[Request], gone: int, bits: int = 0, **options: Any
) -> Told:
    """Answer all, most of them with drafts of what each gives alone or of the second model; the last may be
    cancelled.

    Returns what the requests were told, in their order.
    """
    model, draft_model = models
    scheduler, pool = scheduler_of(model, bits, **options)
    drafts: Any
    if kind == "mtp":
        drafts = HeadDrafts.of(model, 7).for_pool(pool)
    else:
        drafts = ModelDrafts(model=draft_model, num_draft_tokens=7).for_pool(pool)
    plain: dict[Request, list[int]] = {}
    for number, request in enumerate(requests):
        answer = alone(model, request, bits)
        known = KnownDrafts(text=[*request.prompt, *answer, 1, 2, 3], seed=number)
        plain[replace(request, drafts=None if number % 4 == 0 else known if kind == "known" else drafts)] = (
            answer
        )
    cancelled = [*plain][len(plain) - gone :]
    told = _answered(scheduler, [*plain], cancelled, Random(kind))
    if bits:  # rounding may flip a stored value, and so a text
        alike = [ids_of(told[each]) == answer for each, answer in plain.items() if each not in cancelled]
        assert sum(alike) >= 0.97 * len(plain) - 1
    else:
        _check(scheduler, told, plain)
    assert {request for request in plain if told[request][-1].finish_reason == "cancelled"} <= {*cancelled}
    assert scheduler.drafts.drafted > 40
    assert kind != "small" or scheduler.drafts.off == "the draft model's context, 146 tokens, is full"
    assert kind != "known" or 0.4 * scheduler.drafts.drafted < scheduler.drafts.accepted
    for each in (pool, getattr(drafts, "pool", pool)):
        assert isinstance(each, Pool)
        check_pages(each, [])
    assert not getattr(drafts, "drafters", ())
    return {request: told[each] for request, each in zip(requests, plain, strict=True)}


@pytest.fixture(scope="module")
def ragged(heldout_ids: list[int]) -> list[Request]:
    """Some share a prompt, some are past the draft model's context."""
    requests = [
        Request(heldout_ids[43 * n % 700 :][: 5 + 37 * n % 150], **{"max_tokens": 12 + n % 5} | options)
        for n, options in enumerate(OPTIONS * count(1, 10))
    ]
    forked = Request(heldout_ids[:140], 12, make_sampler(1.0, seed=3), answers=3, keep_cache=True)
    return [*requests, Request(heldout_ids[:130], 20), forked, Request(heldout_ids[500:540], 60)]


@pytest.mark.parametrize(
    ("kind", "bits"),
    [("known", 0), ("known", 8), ("own", 0), ("small", 0), ("mtp", 0), ("mtp", 8), *count([], [("own", 8)])],
)
def test_every_answer_as_alone(
    pocket: Pocket,
    headed: Pocket,
    small: Decoder,
    ragged: list[Request],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    bits: int,
) -> None:
    """They come, go and are cancelled."""
    draft_by_chance(monkeypatch, bits)
    model = headed[0] if kind == "mtp" else pocket[0]
    *_, forked, _ = ragged
    stopped = replace(ragged[0], stop_tokens={alone(model, ragged[0], bits)[6]})
    requests = [*ragged[:-2], stopped, *ragged[-2:]]
    models = model, model if kind == "own" else small
    told = _draft(kind, models, requests, 1, bits, max_batch=6, pool={"max_seq_len": 400})
    if not bits:
        third = replace(forked, answers=1, sampler=make_sampler(1.0, seed=5))
        assert ids_of(told[forked], 2) == alone(model, third)
    assert told[requests[-1]][-1].finish_reason == "cancelled"
    assert kind == "small" or sum(token.from_draft for tokens in told.values() for token in tokens) > 20


def test_prompt_lookup_past_an_exact_tail(
    pocket: Pocket, heldout_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 4 bits, past the first and the last tokens that are exact: each alone and in company, the same
    tokens as without drafts.
    """
    draft_by_chance(monkeypatch, 4)
    model = pocket[0]
    scheduler, pool = scheduler_of(model, 4, max_batch=6, pool={"max_seq_len": 512})
    plain, drafted = [], []
    for number in range(44):
        first = 29 * number % 600
        ids = heldout_ids[first : first + 70 + 53 * number % 130]
        ids += ids[: 20 + number % 40]  # it repeats itself
        request = Request(ids, 24)
        plain.append(alone(model, request, 4))
        drafted.append(replace(request, drafts=Drafts()))
    told = run_all(scheduler, drafted)
    own = CacheScheduler(model, model.make_cache(512, kv_bits=4))
    for each in (
        [ids_of(told[request]) for request in drafted],
        [ids_of([*own.answer([r])]) for r in drafted],
    ):
        assert sum(map(operator.eq, each, plain)) >= 43  # rounding may flip a stored value, and so a text
    assert min(len(request.prompt) for request in drafted) < 113
    assert sum(len(request.prompt) > 150 for request in drafted) > 20
    for counts in (scheduler.drafts, own.drafts):
        assert 50 < counts.accepted < counts.drafted
    check_pages(pool, [])


@pytest.mark.parametrize("kind", ["known", "own"])
def test_windows_and_whoever_comes_and_goes(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A pool that is always full; the slack of a draft model's windows takes every draft back."""
    model = tiny_model(tmp_path, (None, 40, 200), hidden_size=64)
    draft_by_chance(monkeypatch, 3)
    rng, back = Random(4), []
    can_trim_to = PoolSequence.can_trim_to
    monkeypatch.setattr(
        PoolSequence, "can_trim_to", lambda own, n: back.append(can_trim_to(own, n)) or back[-1]
    )
    hot = make_sampler(6.0, seed=3)  # most of a model's drafts are wrong
    ids = [(7 + 31 * i) % 290 for i in range(600)]
    # a page leaves the window while they draft
    requests = [Request(ids[:n], 40, hot) for n in (140, 150, 160)]
    for n in range(6):
        start, tokens, most = rng.randrange(300), rng.randrange(1, 190), rng.choice([3, 20, 60])
        requests.append(Request(ids[start : start + tokens], most, hot if n % 2 else None))
    _draft(
        kind,
        (model, model),
        requests,
        2,
        pages=7,
        max_batch=4,
        pool={"max_seq_len": 512, "prefill_step_size": 64},
    )
    assert all(back)
    assert kind == "known" or back


@pytest.mark.parametrize("is_alone", [True, False])
def test_whoever_samples_sees_every_token_in_order(
    pocket: Pocket, heldout_ids: list[int], monkeypatch: pytest.MonkeyPatch, is_alone: bool
) -> None:
    """What keeps state is called as without drafts, until it fails: the tokens before came, and the others
    go on.
    """
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
            requests = [
                replace(plain[n], drafts=KnownDrafts(text=text, seed=n)) for n, text in enumerate(texts)
            ]
        assert found == [text[10:-2] for text in texts]
        assert seen == [texts[0][: 10 + n] for n in range(16)]
        assert isinstance(error, ZeroDivisionError)
        assert [len(answer) for answer in found] == [15, 30, 30][: len(found)]
        assert scheduler.counts.free_pages == (0 if is_alone else PAGES)
        assert cache.ids == (texts[0][:24] if is_alone else [])
    assert scheduler.drafts.accepted > 5

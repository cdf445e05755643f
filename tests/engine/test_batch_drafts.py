"""Drafts in batches: every answer has the tokens that it has alone and without drafts."""

from dataclasses import replace
from random import Random
from typing import Any

import mlx.core as mx
import pytest
from support.batches import PAGES, alone, ids_of, run_all, scheduler_of
from support.counts import count
from support.drafts import KnownDrafts, draft_by_chance
from support.pools import check_pages, tiny_model
from support.tiny_models import build

from kvant import batch_generate
from kvant.bridge.config import BridgedConfig
from kvant.bridge.model import BridgedModel
from kvant.cache import ModelCache
from kvant.engine.drafting.batch_choice import BatchChoice, StepKind
from kvant.engine.drafting.drafts import Drafts
from kvant.engine.request import Request
from kvant.engine.scheduler import Scheduler
from kvant.errors import ArgumentError
from kvant.models import Decoder
from kvant.sample_utils import make_logits_processors, make_sampler

Pocket = tuple[Decoder, Any]


def _drafting(model: Decoder, requests: list[Request], bits: int = 0, **options: Any) -> tuple[list[Any], list[Any]]:
    """What each request gives alone, and the same requests, three of four with drafts of that."""
    plain = [alone(model, request, bits) for request in requests]
    made = [
        replace(
            request,
            drafts=KnownDrafts(text=[*request.prompt, *answer, 1, 2, 3], seed=number, **options)
            if number % 4
            else None,
        )
        for number, (request, answer) in enumerate(zip(requests, plain, strict=True))
    ]
    return plain, made


def _own(logprobs: mx.array) -> mx.array:
    return mx.argsort(-logprobs, axis=-1)[:, 1]


OPTIONS: list[dict[str, Any]] = [
    {},
    {},
    {"sampler": make_sampler(1.0, seed=3), "top_logprobs": 2},
    {"sampler": make_sampler(0.7, 0.9, top_k=40, min_p=0.01, seed=4)},
    {"sampler": make_sampler(1.0, seed=9)},
    {"stop": 6},
    {"max_tokens": 9},
]
SEEING: list[dict[str, Any]] = [
    {"logits_processors": make_logits_processors({5: -9.0}, 1.3)},
    {"sampler": make_sampler(1.2, seed=5), "logits_processors": make_logits_processors(None, 1.1, 20)},
    {"logits_processors": [lambda tokens, logits: logits.at[:, tokens[-3:]].add(-2.0)]},
    {"sampler": _own},
]


@pytest.mark.parametrize(("bits", "seeing"), [(0, False), (8, False), (0, True), *count([], [(8, True)])])
def test_every_answer_as_alone(
    pocket: Pocket, heldout_ids: list[int], monkeypatch: pytest.MonkeyPatch, bits: int, *, seeing: bool
) -> None:
    draft_by_chance(monkeypatch, bits)
    scheduler, pool = scheduler_of(pocket[0], bits, max_batch=6)
    requests = []
    for number, options in enumerate((OPTIONS + SEEING if seeing else OPTIONS) * count(1, 20)):
        prompt = heldout_ids[43 * number % 900 :][: 5 + 37 * number % 160]
        request = Request(prompt, **{"max_tokens": 12 + number, **{k: v for k, v in options.items() if k != "stop"}})
        if "stop" in options:
            request = replace(request, stop_tokens={alone(pocket[0], request, bits)[options["stop"]]})
        requests.append(request)
    plain, made = _drafting(pocket[0], requests, bits)
    told = run_all(scheduler, made)
    same = sum(ids_of(told[request]) == answer for request, answer in zip(made, plain, strict=True))
    assert same >= (len(made) if not bits else 0.97 * len(made) - 1)
    for request, answer in zip(made, plain, strict=True):
        tokens = told[request]
        assert [token.finish_reason for token in tokens[:-1]] == [None] * (len(tokens) - 1)
        assert tokens[-1].finish_reason == ("stop" if request.stop_tokens else "length")
        assert (request.drafts is not None) or not any(token.from_draft for token in tokens)
        if not bits:
            assert {len(token.top_logprobs) for token in tokens} == {request.top_logprobs}, answer
    counts = scheduler.drafts
    assert 0 < counts.accepted < counts.drafted
    assert counts.accepted == sum(token.from_draft for tokens in told.values() for token in tokens)
    assert counts.steps == sum(map(len, told.values())) - len(made) - counts.accepted
    assert counts.steps < 0.8 * sum(map(len, plain))
    assert pool.num_free == PAGES


def test_what_a_prompt_repeats_is_drafted(pocket: Pocket, heldout_ids: list[int]) -> None:
    """By the costs of this machine, and beside one that does not draft: the same tokens in fewer steps."""
    prompts = [pocket[1].encode(" ".join(str(1 + (i + n) % 5) for i in range(18))) for n in range(2)]
    biases = make_logits_processors(dict.fromkeys(range(1280), 0.0))
    requests = [Request(prompt, 80, logits_processors=biases if n else ()) for n, prompt in enumerate(prompts)]
    plain = [alone(pocket[0], request) for request in requests]
    made = [replace(request, drafts=Drafts()) for request in requests] + [Request(heldout_ids[:9], 30)]
    scheduler, _ = scheduler_of(pocket[0])
    told = run_all(scheduler, made)
    assert [ids_of(told[request]) for request in made] == [*plain, alone(pocket[0], made[2])]
    counts = scheduler.drafts
    assert (
        counts.off is not None or counts.accepted > 40
    )  # on a machine that is busy with something else they may be off


def test_windows_reservations_and_whoever_comes_and_goes(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers end at any time, some are cancelled, and a pool that is always full is whole at the end."""
    model = tiny_model(tmp_path, (None, 40, 200), hidden_size=64)
    draft_by_chance(monkeypatch, 3)
    random = Random(4)
    scheduler, pool = scheduler_of(model, 0, 12, max_batch=4, pool={"max_seq_len": 256})
    ids = [(7 + 31 * i) % 290 for i in range(600)]
    requests = [
        Request(ids[(s := random.randrange(300)) : s + random.randrange(1, 220)], random.choice([-1, 3, 20, 31]))
        for _ in range(9)
    ]
    requests = [
        replace(r, max_tokens=min(r.max_tokens, 60) if r.max_tokens > 0 else 257 - len(r.prompt)) for r in requests
    ]
    plain, made = _drafting(model, requests, mistakes=0.1)
    waiting, told, cancelled = list(made), {}, []
    while waiting or not scheduler.idle:
        for _ in range(min(random.randrange(3), len(waiting))):
            scheduler.submit(waiting.pop())
        for token in scheduler.step():
            told.setdefault(token.request, []).append(token)
        if told and random.random() < 0.03:
            cancelled.append(random.choice(list(told)))
            scheduler.cancel(cancelled[-1])
        for request, number, sequence in scheduler.held:
            got = ids_of(told.get(request, ()), number)
            if got:
                assert sequence.ids in ([*request.prompt, *got[:-1]], [*request.prompt, *got])
    for request, answer in zip(made, plain, strict=True):
        got = ids_of(told[request])
        assert got == (answer[: len(got)] if request in cancelled else answer)
    assert scheduler.drafts.accepted > 40
    check_pages(pool, [])


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


def test_an_error_of_one(pocket: Pocket, heldout_ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor fails in the middle of a draft: the others go on, and its own tokens before it came."""
    draft_by_chance(monkeypatch, 6)
    scheduler, pool = scheduler_of(pocket[0])
    seen: list[list[int]] = []

    def fails(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())  # type: ignore[arg-type]
        if len(tokens) == 25:
            raise ZeroDivisionError("by zero")
        return logits

    requests = [Request(heldout_ids[s : s + 10], 30) for s in (0, 20, 40)]
    plain, made = _drafting(pocket[0], requests, mistakes=0.0)
    made[1] = replace(made[1], logits_processors=(fails,))
    told = run_all(scheduler, made)
    assert isinstance(told[made[1]][-1].error, ZeroDivisionError)
    assert ids_of(told[made[1]]) == plain[1][:15]
    assert seen == [[*made[1].prompt, *plain[1][:n]] for n in range(16)]
    assert [ids_of(told[made[n]]) for n in (0, 2)] == [plain[0], plain[2]]
    assert pool.num_free == PAGES


def test_stops_and_kept_caches_of_batch_generate(pocket: Pocket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that ends within accepted tokens: its cache ends there too."""
    draft_by_chance(monkeypatch, 7)
    prompts = [" ".join(str(1 + i % 5) for i in range(18)), "Once upon a time"]
    options: dict[str, Any] = {"max_tokens": 40, "return_prompt_caches": True, "return_token_ids": True, "kv_bits": 0}
    plain = batch_generate(*pocket, prompts, **options)
    after = 0
    for end in (24, 33):
        stop = plain.texts[0][end : end + 4]
        with monkeypatch.context() as counting:
            trim = ModelCache.trim

            def counted(cache: ModelCache, num_tokens: int, trim: Any = trim) -> Any:
                nonlocal after
                after += num_tokens
                return trim(cache, num_tokens)

            counting.setattr(ModelCache, "trim", counted)
            drafted = batch_generate(*pocket, prompts, stop=stop, draft="prompt", **options)
        expected = batch_generate(*pocket, prompts, stop=stop, **options)
        assert drafted.texts == expected.texts
        assert drafted.token_ids == expected.token_ids
        assert [cache.ids for cache in drafted.caches or ()] == [cache.ids for cache in expected.caches or ()]
        assert drafted.stats.drafts is not None
        assert drafted.stats.drafts.accepted
        assert expected.stats.drafts is None
    assert after  # tokens were accepted behind the end of a text


def test_refusals(pocket: Pocket) -> None:
    with pytest.raises(ArgumentError, match=r"draft is 'prompt'.*deterministic"):
        batch_generate(*pocket, ["a"], draft="prompt", deterministic=True)
    with pytest.raises(ArgumentError, match="draft is 'suffix'; expected 'none' or 'prompt'"):
        batch_generate(*pocket, ["a"], draft="suffix")
    bridged = BridgedModel(build("qwen3_next")[0], BridgedConfig("qwen3_next", 100_000, None), mx.float32)
    states = bridged.make_pool(256, sequences=1, max_seq_len=64, kv_bits=0)
    with pytest.raises(
        ArgumentError, match="draft is 'prompt'; side by side drafts are for models that kvant computes"
    ):
        Scheduler(bridged, states, max_batch=1).submit(Request([5], drafts=Drafts()))
    pool = pocket[0].make_pool(256, sequences=1)
    scheduler = Scheduler(pocket[0], pool, max_batch=1, deterministic=True)
    with pytest.raises(ArgumentError, match=r"draft is 'prompt'.*deterministic"):
        scheduler.submit(Request([5], drafts=Drafts()))


def test_later_answers_draft_where_earlier_ones_were_switched_off() -> None:
    """The counts do not say that drafts are off while tokens are drafted."""

    class Model:
        pass

    choice, kind = BatchChoice(Model(), "pool"), StepKind(at_once=True)
    for _ in range(3):
        choice.stepped(2, 0.01, kind=kind, ahead=True)
    while choice.verified(2, 7, 2, 0.09, kind=kind) is None:
        pass
    assert "cost the time of" in str(choice.counts.off)
    assert choice.verified(2, 7, 16, 0.09, kind=kind) is None
    assert choice.counts.off is None

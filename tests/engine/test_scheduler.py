"""Many requests in one batch: each is answered as if it were alone, and the pool's pages add up."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from support.batches import OPTIONS, PAGES, alone, ids_of, run_all, scheduler_of

from kvant import stream_generate
from kvant.engine.head_drafts import drafts_of
from kvant.engine.request import Request
from kvant.errors import ContextError, QueueFullError
from kvant.models import Decoder
from kvant.sample_utils import make_sampler

Pocket = tuple[Decoder, Any]
TEXTS = [
    "Once upon a time",
    "Why is the sky blue?",
    "A fox named Pip",
    "The",
    "My name is Ann. Hello! What is my name?",
]


@pytest.fixture(scope="module")
def prompts(pocket: Pocket, heldout_ids: list[int]) -> list[list[int]]:
    texts = [pocket[1].encode(text) for text in TEXTS]
    return [*texts, heldout_ids[:300], heldout_ids[300:428], heldout_ids[500:501]]


def test_every_request_as_alone(pocket: Pocket, prompts: list[list[int]]) -> None:
    scheduler, pool = scheduler_of(pocket[0])
    given = {"max_tokens": 12, "stop_tokens": pocket[1].eos_token_ids}
    requests = [Request(prompt, **given | options) for prompt, options in zip(prompts, OPTIONS, strict=True)]
    told = run_all(scheduler, requests)
    for request in requests:
        tokens = told[request]
        settings: dict[str, Any] = {
            "sampler": request.sampler,
            "logits_processors": request.logits_processors,
        }
        expected = list(stream_generate(*pocket, request.prompt, request.max_tokens, kv_bits=0, **settings))
        assert [(t.token, t.finish_reason) for t in tokens] == [(r.token, r.finish_reason) for r in expected]
        for token, response in zip(tokens, expected, strict=True):
            assert token.logprob == pytest.approx(response.logprobs[response.token].item(), abs=1e-4)
            order = mx.argsort(-response.logprobs)[: request.top_logprobs]
            assert [top for top, _ in token.top_logprobs] == order.tolist()
            assert [value for _, value in token.top_logprobs] == pytest.approx(
                response.logprobs[order].tolist(), abs=1e-4
            )
    assert pool.num_free == PAGES


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"answers": 9}, ValueError, "answers is 9; the batch has room for 8"),
    ({"top_logprobs": -1}, ValueError, "top_logprobs is -1"),
    ({"salt": "me"}, ValueError, "salt is 'me'"),
    ({"sampler": 0.7}, ValueError, "0.7 is neither a sampler"),
    ({"logits_processors": ["x"]}, ValueError, "'x' is neither a sampler nor a logits processor"),
    ({"sampler": make_sampler(1.0, top_k=99_999)}, ValueError, "top_k"),
    ({"stop_tokens": ["</s>"]}, ValueError, "stop_tokens is"),
    ({"prompt": [5] * 3000}, ContextError, "the prompt has 3000 tokens"),
    (
        {"prompt": [5] * 500, "max_tokens": 600},
        ContextError,
        "1 answers of up to 600 need 9 pages .*; the pool has 8",
    ),
]


@pytest.mark.parametrize(("options", "kind", "words"), REFUSED)
def test_what_is_refused_when_it_is_submitted(
    pocket: Pocket, options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    scheduler, pool = scheduler_of(pocket[0], pages=8, pool={"max_seq_len": 2048})
    with pytest.raises(kind, match=words):
        scheduler.submit(Request(**({"prompt": [5]} | options)))
    assert scheduler.idle
    assert pool.num_free == 8


def test_admission_is_first_come_first_served_and_by_pages(pocket: Pocket) -> None:
    """A large request holds up the small one behind it, and comes to its turn, unless it is cancelled."""
    for gone in (0, 1):
        scheduler, pool = scheduler_of(pocket[0], pages=8)
        requests = first, _, small = [Request([5, 6], max_tokens=n) for n in (600, 700, 3)]
        for request in requests:
            scheduler.submit(request)
        scheduler.step()
        assert scheduler.counts == (2, 0, 1, 3)
        for _ in range(20):
            assert {token.request for token in scheduler.step()} == {first}
        scheduler.cancel(requests[gone])
        told = scheduler.step()
        assert (requests[gone], "cancelled") in [(token.request, token.finish_reason) for token in told]
        assert [token.request for token in told if token.finish_reason is None] == [requests[1 - gone], small]
        assert scheduler.counts == (0, 0, 2, 1 if gone == 0 else 2)
        scheduler.cancel(requests[1 - gone])
        assert len(run_all(scheduler)[small]) == 2
        assert pool.num_free == 8


def test_the_batch_and_the_queue_are_bounded(pocket: Pocket) -> None:
    scheduler, _ = scheduler_of(pocket[0], max_batch=2, max_queue=3)
    requests = [Request([5 + i], max_tokens=4) for i in range(6)]
    for request in requests[:3]:
        scheduler.submit(request)
    with pytest.raises(QueueFullError, match="the queue is full: 3 requests wait, and 0 answers run"):
        scheduler.submit(requests[3])
    with pytest.raises(ValueError, match="was submitted before and has not ended"):
        scheduler.submit(requests[0])
    most = 0
    told = scheduler.step()
    assert scheduler.counts[:3] == (1, 0, 2)
    scheduler.submit(requests[3])
    while not scheduler.idle:
        told += scheduler.step()
        most = max(most, scheduler.counts.running)
    assert most == 2
    assert [sum(token.request is request for token in told) for request in requests[:4]] == [4, 4, 4, 4]
    assert len(run_all(scheduler, [requests[0]])[requests[0]]) == 4  # a request that has ended may come again


@pytest.mark.parametrize(
    ("runs", "lengths", "begun"),
    [
        pytest.param(
            True, (40, 60, 28, 1, 200, 5), [[0, 1, 2], [3], [], [4, 5]], id="beside an answer a chunk a step"
        ),
        pytest.param(
            True, (700,), [[], [], [], [], [], [0]], id="a long one in chunks between the tokens of another"
        ),
        pytest.param(False, (200, 300, 12, 1), [[0, 1, 2]], id="beside none a long chunk"),
        pytest.param(
            False, (200,) * 6, [[0, 1], [2, 3], [4], [], [5]], id="two long chunks before the first go on"
        ),
    ],
)
def test_which_prompts_are_fed_in_a_step(
    pocket: Pocket, heldout_ids: list[int], runs: bool, lengths: Sequence[int], begun: list[list[int]]
) -> None:
    scheduler, _ = scheduler_of(pocket[0])
    requests = [Request(heldout_ids[i : i + length], max_tokens=9) for i, length in enumerate(lengths)]
    other = Request([5], max_tokens=50)
    if runs:
        scheduler.submit(other)
        scheduler.step()
    for request in requests:
        scheduler.submit(request)
    seen: list[int] = []
    for expected in begun:
        tokens = scheduler.step()
        assert (tokens[0].request is other) == runs
        told = [requests.index(token.request) for token in tokens[runs:]]
        assert [number for number in told if number not in seen] == expected
        assert all(told.count(number) == 1 for number in told)
        if not runs and len(seen) < 5:
            assert told == expected, "the first go on before the others are fed"
        seen += expected


@pytest.mark.parametrize("length", [5, 128, 200])
def test_several_answers_of_one_prompt(pocket: Pocket, heldout_ids: list[int], length: int) -> None:
    scheduler, pool = scheduler_of(pocket[0], pages=7)
    request = Request(heldout_ids[:length], max_tokens=12, sampler=make_sampler(1.2, seed=6), answers=4)
    scheduler.submit(request)
    told = scheduler.step()
    assert scheduler.counts[:3] == (0, 0, 4)
    assert pool.num_free == 7 - {5: 4, 128: 5, 200: 5}[length]
    scheduler.cancel(request, 2)
    while not scheduler.idle:
        told += scheduler.step()
    for answer in range(4):
        single = replace(request, sampler=make_sampler(1.2, seed=6 + answer), answers=1)
        reason = [token.finish_reason for token in told if token.answer == answer][-1]
        assert reason == ("cancelled" if answer == 2 else "length")
        assert ids_of(told, answer) == alone(pocket[0], single)[: 1 if answer == 2 else 12]
    assert pool.num_free == 7


def test_answers_that_are_cancelled_before_they_begin(pocket: Pocket, heldout_ids: list[int]) -> None:
    scheduler, pool = scheduler_of(pocket[0])
    scheduler.submit(Request([5], max_tokens=30))
    request = Request(heldout_ids[:200], max_tokens=10, answers=3)
    scheduler.step()
    scheduler.submit(request)
    scheduler.cancel(request, 1)
    scheduler.step()  # the first chunk
    scheduler.cancel(request, 0)
    told = run_all(scheduler)[request]
    assert [t.answer for t in told if t.finish_reason == "cancelled"] == [0]  # and 1, before the first step
    assert ids_of(told, 2) == alone(pocket[0], request)
    assert pool.num_free == PAGES


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_prompt_whose_client_left_is_gone_on_with(
    pocket: Pocket, heldout_ids: list[int], deterministic: bool
) -> None:
    """Each try begins where the one before was cancelled, and the last one's answer is that of a request
    alone.
    """
    scheduler, pool = scheduler_of(pocket[0], deterministic=deterministic)
    other = Request([5], max_tokens=40)
    scheduler.submit(other)
    scheduler.step()
    for cached in (0, 128, 256):
        request = Request(heldout_ids[:420], max_tokens=6)
        scheduler.submit(request)
        scheduler.step()  # a chunk of 128 tokens, beside the other one's token
        scheduler.cancel(request)
        (told,) = [token for token in scheduler.step() if token.request is request]
        assert (told.finish_reason, told.cached_tokens) == ("cancelled", cached)
    request = Request(heldout_ids[:420], max_tokens=6)
    told = run_all(scheduler, [request])[request]
    assert told[0].cached_tokens == 384
    assert ids_of(told) == alone(pocket[0], request)
    assert pool.num_free == PAGES


@pytest.mark.parametrize("answers", [1, 2])
@pytest.mark.parametrize("source", ["none", "prompt", "mtp"])
def test_pages_that_are_only_promised_throw_out_no_beginning(
    pocket: Pocket, headed: Pocket, heldout_ids: list[int], answers: int, source: Any
) -> None:
    """With several answers, and drafts: what is stored goes where a token needs its page, and not before."""
    model = headed[0] if source == "mtp" else pocket[0]
    scheduler, pool = scheduler_of(model, pages=8 if answers == 1 else 12)
    stored, other = heldout_ids[:410], heldout_ids[500:630]
    run_all(scheduler, [Request(stored, max_tokens=1)])
    drafts = drafts_of(source, model)
    request = Request(
        other, max_tokens=600, answers=answers, drafts=None if drafts is None else drafts.for_pool(pool)
    )
    scheduler.submit(request)
    told = [token for _ in range(6) for token in scheduler.step()]
    assert pool.num_free < 3  # no other request could have them
    assert all(part.prefix.num_idle == 4 for part in pool.groups)
    scheduler.cancel(request)
    told += run_all(scheduler)[request]
    for answer in range(answers):
        ids = ids_of(told, answer)
        assert ids == alone(pocket[0], replace(request, answers=1, drafts=None, max_tokens=len(ids)))
    again = run_all(scheduler, [Request(stored, max_tokens=4)]).popitem()[1]
    assert again[0].cached_tokens == 409
    assert ids_of(again) == alone(pocket[0], Request(stored, max_tokens=4))


def test_a_cache_that_was_changed_since(pocket: Pocket) -> None:
    scheduler, pool = scheduler_of(pocket[0])
    cache = pocket[0].make_cache(100, kv_bits=0)
    pocket[0](mx.array([[5, 6, 7]]), cache=cache)
    request, other = Request([8], cache=cache, max_tokens=3), Request([9], max_tokens=3)
    scheduler.submit(request)
    scheduler.submit(other)
    cache.trim(1)
    told = run_all(scheduler)
    assert [(t.finish_reason, str(t.error)) for t in told[request]] == [
        ("error", "the request's cache was changed after it was submitted")
    ]
    assert ids_of(told[other]) == alone(pocket[0], other)
    assert pool.num_free == PAGES


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_second_turn_feeds_what_is_new(pocket: Pocket, heldout_ids: list[int], deterministic: bool) -> None:
    """With determinism only what a prompt's chunks computed."""
    scheduler, _ = scheduler_of(pocket[0], deterministic=deterministic)
    first = Request(heldout_ids[:240], max_tokens=20)
    told = run_all(scheduler, [first])[first]
    turn = [*first.prompt, *ids_of(told), 11, 12]
    again, salted = Request(turn, max_tokens=5), Request(turn, max_tokens=5, salt=b"another")
    for request, shared in ((again, 128 if deterministic else 256), (salted, 0)):
        tokens = run_all(scheduler, [request])[request]
        assert {token.cached_tokens for token in tokens} == {shared}
        assert ids_of(tokens) == alone(pocket[0], request)

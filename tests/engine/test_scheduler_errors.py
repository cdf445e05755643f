"""Errors and interruptions of requests in a batch: whose they are, and what is left."""

import math
from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from support.batches import PAGES, alone, ids_of, run_all, scheduler_of
from support.counts import count
from support.drafts import draft_by_chance
from support.interruption import Interruption

from kvant.engine.model_drafts import ModelDrafts
from kvant.engine.request import Request
from kvant.engine.scheduler import Scheduler
from kvant.models import Decoder
from kvant.sample_utils import make_sampler

Pocket = tuple[Decoder, Any]


def _fails(*arguments: mx.array) -> mx.array:
    raise ZeroDivisionError("mine")


FAILING: dict[str, tuple[dict[str, Any], str]] = {
    "a sampler": ({"sampler": _fails}, "mine"),
    "a processor": ({"logits_processors": [_fails]}, "mine"),
    "two tokens": ({"sampler": lambda logprobs: mx.array([3, 4])}, "expected"),
    "an unknown token": ({"sampler": lambda logprobs: mx.array([99_999])}, "the sampler picked token 99999"),
    "a negative token": ({"sampler": lambda logprobs: mx.array([-1])}, "the sampler picked token -1"),
    "no numbers": ({"logits_processors": [lambda tokens, logits: logits * math.nan]}, "NaN"),
    "logits of another shape": ({"logits_processors": [lambda tokens, logits: logits[:, :5]]}, "expected"),
    "no logits": ({"logits_processors": [lambda tokens, logits: None]}, "returned a NoneType"),
    "no array": ({"sampler": lambda logprobs: 5}, ""),
}


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(("options", "message"), FAILING.values(), ids=FAILING)
def test_a_request_that_fails_fails_alone(pocket: Pocket, options: dict[str, Any], message: str, later: bool) -> None:
    (name, given), calls = next(iter(options.items())), []
    fails = given if callable(given) else given[0]

    def works_first(*arguments: mx.array) -> mx.array:
        calls.append(1)
        if len(calls) > 2 * later:
            return fails(*arguments)
        return mx.argmax(arguments[-1], axis=-1) if name == "sampler" else arguments[-1]

    options = {name: works_first if callable(given) else [works_first]}
    scheduler, pool = scheduler_of(pocket[0])
    others = [Request(prompt, max_tokens=12, sampler=make_sampler(1.0, seed=1)) for prompt in ([5, 6], [7])]
    others.append(Request([8], max_tokens=12, logits_processors=[lambda tokens, logits: logits + 0.0]))
    failing = Request([5, 9], max_tokens=9, answers=2, **options)
    told = run_all(scheduler, [*others[:2], failing, others[2]])
    for answer in range(2):
        (*before, last) = [token for token in told[failing] if token.answer == answer]
        assert len(before) <= 2 * later
        assert (last.token, last.finish_reason) == (None, "error")
        assert message in str(last.error)
    for other in others:
        assert ids_of(told[other]) == alone(pocket[0], other)
    assert pool.num_free == PAGES


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6, 7])
def test_a_step_that_fails_ends_the_requests_in_it(pocket: Pocket, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    model, _ = pocket
    scheduler, pool = scheduler_of(model)
    real, calls = model.next_logits, [0]

    def next_logits(inputs: mx.array, cache: Any) -> mx.array:
        calls[0] += 1
        if calls[0] == at:
            raise RuntimeError("no memory")
        return real(inputs, cache)

    monkeypatch.setattr(model, "next_logits", next_logits)
    # No two prompts fit into one step: 1 feeds the first, 2 the second, 3 tokens of both, 4 the third, 5 tokens of all,
    # and 6 the next ones, before those were read.
    requests = [Request([5 + i] * length, max_tokens=6) for i, length in enumerate((450, 450, 100))]
    told = run_all(scheduler, requests)
    failed = requests[slice(*{1: (0, 1), 2: (1, 2), 3: (0, 2), 4: (2, 3)}.get(at, (0, 3)))]
    assert [request for request in requests if str(told[request][-1].error) == "no memory"] == failed
    for request in requests:
        assert told[request][-1].finish_reason == ("error" if request in failed else "length")
    assert pool.num_free == PAGES
    monkeypatch.undo()
    again = run_all(scheduler, requests)
    assert all(ids_of(again[request]) == alone(pocket[0], request) for request in requests)


@pytest.mark.parametrize("drafting", [False, True])
def test_an_interruption_ends_all_and_the_scheduler_goes_on(
    pocket: Pocket, heldout_ids: list[int], monkeypatch: pytest.MonkeyPatch, drafting: bool
) -> None:
    """At any line. In the middle of a pool's own bookkeeping a page may be lost, but no sequence stays open."""
    model = pocket[0]
    pools: list[Any] = []

    def made() -> tuple[Scheduler, list[Request]]:
        draft_by_chance(monkeypatch, 4)
        scheduler, pool = scheduler_of(model, max_batch=4)
        drafts = ModelDrafts(model=model).beside(pool) if drafting else None
        pools[:] = [pool, drafts.pool] if drafts else [pool]
        options: list[tuple[list[int], int, int]] = [(heldout_ids[:140], 6, 2), ([5, 6], 9, 1)]
        return scheduler, [Request(ids, tokens, answers=answers, drafts=drafts) for ids, tokens, answers in options]

    counting = Interruption(0)
    counting.of(partial(run_all, *made()))
    for at in range(1, counting.lines, count(counting.lines // 8, 37)):
        scheduler, requests = made()
        assert Interruption(at).of(partial(run_all, scheduler, requests))
        scheduler.close()
        scheduler.step()
        assert scheduler.idle
        assert [pool.num_sequences for pool in pools] == [0] * len(pools), at
        told = run_all(scheduler, requests[1:])
        assert ids_of(told[requests[1]]) == alone(model, requests[1])

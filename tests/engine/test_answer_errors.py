"""Errors and interruptions of answers: whose they are, and what is left; logits that are no numbers among
them.
"""

import math
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from support.batches import PAGES, alone, ids_of, run_all, scheduler_of
from support.counts import count
from support.drafts import draft_by_chance
from support.interruption import Interruption

from kvant import batch_generate, generate, stream_generate
from kvant.engine.model_drafts import ModelDrafts
from kvant.engine.request import Request
from kvant.engine.scheduler import Scheduler
from kvant.errors import LogitsError
from kvant.models import Decoder
from kvant.sample_utils import make_sampler
from kvant.text.grammar import Grammars

Pocket = tuple[Decoder, Any]


def _fails(*arguments: mx.array) -> mx.array:
    raise ZeroDivisionError("mine")


def _ends(*arguments: mx.array) -> mx.array:
    raise StopIteration  # would be taken for the answer's end


OTHERS = [Request(prompt, max_tokens=12, sampler=make_sampler(1.0, seed=1)) for prompt in ([5, 6], [7])]
OTHERS.append(Request([8], max_tokens=12, logits_processors=[lambda tokens, logits: logits + 0.0]))
# No two of these prompts fit into one step.
LONG = [Request([5 + i] * length, max_tokens=6) for i, length in enumerate((450, 450, 100))]
FAILING: dict[str, tuple[dict[str, Any], str]] = {
    "a sampler": ({"sampler": _fails}, "mine"),
    "a processor": ({"logits_processors": [_fails]}, "mine"),
    "an iterator's end": ({"sampler": _ends}, "raised StopIteration"),
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
def test_a_request_that_fails_fails_alone(
    pocket: Pocket, options: dict[str, Any], message: str, later: bool
) -> None:
    (name, given), calls = next(iter(options.items())), []
    fails = given if callable(given) else given[0]

    def works_first(*arguments: mx.array) -> mx.array:
        calls.append(1)
        if len(calls) > 2 * later:
            return fails(*arguments)
        return mx.argmax(arguments[-1], axis=-1) if name == "sampler" else arguments[-1]

    options = {name: works_first if callable(given) else [works_first]}
    scheduler, pool = scheduler_of(pocket[0])
    failing = Request([5, 9], max_tokens=9, answers=2, **options)
    told = run_all(scheduler, [*OTHERS[:2], failing, OTHERS[2]])
    for answer in range(2):
        (*before, last) = [token for token in told[failing] if token.answer == answer]
        assert len(before) <= 2 * later
        assert (last.token, last.finish_reason) == (None, "error")
        assert message in str(last.error)
    for other in OTHERS:
        assert ids_of(told[other]) == alone(pocket[0], other)
    assert pool.num_free == PAGES


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6, 7])
def test_a_step_that_fails_ends_the_requests_in_it(
    pocket: Pocket, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    model, _ = pocket
    scheduler, pool = scheduler_of(model)
    real, calls = model.next_logits, [0]

    def next_logits(inputs: mx.array, cache: Any) -> mx.array:
        calls[0] += 1
        if calls[0] == at:
            raise RuntimeError("no memory")
        return real(inputs, cache)

    monkeypatch.setattr(model, "next_logits", next_logits)
    # 1 feeds the first, 2 the second, 3 tokens of both, 4 the third, 5 tokens of all, and 6 the next ones,
    # before those were read.
    told = run_all(scheduler, LONG)
    failed = LONG[slice(*{1: (0, 1), 2: (1, 2), 3: (0, 2), 4: (2, 3)}.get(at, (0, 3)))]
    assert [request for request in LONG if str(told[request][-1].error) == "no memory"] == failed
    for request in LONG:
        assert told[request][-1].finish_reason == ("error" if request in failed else "length")
    assert pool.num_free == PAGES
    monkeypatch.undo()
    again = run_all(scheduler, LONG)
    assert all(ids_of(again[request]) == alone(pocket[0], request) for request in LONG)


@pytest.mark.parametrize("drafting", [False, True])
def test_an_interruption_ends_all_and_the_scheduler_goes_on(
    pocket: Pocket, heldout_ids: list[int], monkeypatch: pytest.MonkeyPatch, drafting: bool
) -> None:
    """At any line. In the middle of a pool's own bookkeeping a page may be lost, but no sequence stays
    open.
    """
    model = pocket[0]
    pools: list[Any] = []

    def made() -> tuple[Scheduler, list[Request]]:
        draft_by_chance(monkeypatch, 4)
        scheduler, pool = scheduler_of(model, max_batch=4)
        drafts = ModelDrafts(model=model).for_pool(pool) if drafting else None
        pools[:] = [pool, drafts.pool] if drafts else [pool]
        options: list[tuple[list[int], int, int]] = [(heldout_ids[:140], 6, 2), ([5, 6], 9, 1)]
        return scheduler, [
            Request(ids, tokens, answers=answers, drafts=drafts) for ids, tokens, answers in options
        ]

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


PROMPT = [300, 301, 302, 300, 301, 302, 300, 301]
SAMPLERS = {
    "greedy": None,
    "drawn": make_sampler(1.0, seed=1),
    "filtered": make_sampler(0.7, 0.9, top_k=5, seed=1),
}


@pytest.fixture(params=[math.nan, math.inf])
def damaged(pocket: Pocket, request: pytest.FixtureRequest) -> Pocket:
    """A model one of whose norms has such a number."""
    model = copy(pocket[0])
    *layers, last = model.layers
    norms = {role: weight * request.param for role, weight in last.norms.items()}
    model.layers = (*layers, replace(last, norms=norms))
    return model, pocket[1]


def no_numbers(tokens: mx.array, logits: mx.array) -> mx.array:
    return logits * math.nan if tokens.size > len(PROMPT) else logits


def none_possible(tokens: mx.array, logits: mx.array) -> mx.array:
    return mx.full(logits.shape, -math.inf)


@pytest.mark.parametrize("draft", ["none", "prompt"])
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_damaged_weights_are_one_error(damaged: Pocket, sampler: Any, draft: str) -> None:
    for call, prompt in ((generate, PROMPT), (batch_generate, [PROMPT, [4]])):
        with pytest.raises(LogitsError, match=r"NaN.*weights"):
            call(*damaged, prompt, max_tokens=5, sampler=sampler, draft=draft)  # type: ignore[operator]


def test_a_grammar_makes_no_answer_of_them(damaged: Pocket) -> None:
    model, tokenizer = damaged
    grammar = Grammars(tokenizer, len(tokenizer)).compile("json_schema", {})
    request = Request(PROMPT, max_tokens=9, stop_tokens=tokenizer.eos_token_ids, logits_processors=[grammar])
    (token,) = run_all(scheduler_of(model)[0], [request])[request]
    assert isinstance(token.error, LogitsError)


@pytest.mark.parametrize("draft", ["none", "prompt"])
@pytest.mark.parametrize("processor", [no_numbers, none_possible])
def test_a_processor_that_makes_them_is_named(pocket: Pocket, processor: Any, draft: str) -> None:
    model, tokenizer = pocket
    cache = model.make_cache(64)
    options: dict[str, Any] = {"logits_processors": [processor], "max_tokens": 9, "draft": draft}
    with pytest.raises(LogitsError, match=processor.__name__):
        list(stream_generate(model, tokenizer, PROMPT, prompt_cache=cache, **options))
    assert cache.offset == (len(PROMPT) if processor is no_numbers else 0)


def test_a_prompt_cache_with_them(pocket: Pocket) -> None:
    model, tokenizer = pocket
    cache = model.make_cache(64)
    generate(model, tokenizer, PROMPT, max_tokens=2, prompt_cache=cache)
    cache[0].layer.arrays[:] = [
        a * math.nan if mx.issubdtype(a.dtype, mx.floating) else a for a in cache[0].layer.arrays
    ]
    with pytest.raises(LogitsError, match="cache"):
        generate(model, tokenizer, [9], max_tokens=2, prompt_cache=cache)


def _without_seven(tokens: mx.array, logits: mx.array) -> mx.array:
    return mx.where(mx.arange(logits.shape[-1]) == 7, -math.inf, logits)


def test_what_no_sampler_of_kvants_picks_may_be_picked(pocket: Pocket) -> None:
    """A caller's sampler may pick a token that its processors made impossible."""
    options: dict[str, Any] = {
        "sampler": lambda logprobs: mx.array([7]),
        "logits_processors": [_without_seven],
    }
    assert [r.token for r in stream_generate(*pocket, PROMPT, max_tokens=3, **options)] == [7] * 3

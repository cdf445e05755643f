"""Logits that are no numbers end an answer with one error, which names what may have made them."""

import math
from copy import copy
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from support.batches import run_all, scheduler_of

from kvant import batch_generate, generate, stream_generate
from kvant.engine.request import Request
from kvant.errors import LogitsError
from kvant.models import Decoder
from kvant.sample_utils import make_sampler
from kvant.text.grammar import Grammars

Pocket = tuple[Decoder, Any]
PROMPT = [300, 301, 302, 300, 301, 302, 300, 301]
SAMPLERS = {"greedy": None, "drawn": make_sampler(1.0, seed=1), "filtered": make_sampler(0.7, 0.9, top_k=5, seed=1)}


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


def ends(logprobs: mx.array) -> mx.array:
    raise StopIteration


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
    cache[0].arrays[:] = [a * math.nan if mx.issubdtype(a.dtype, mx.floating) else a for a in cache[0].arrays]
    with pytest.raises(LogitsError, match="cache"):
        generate(model, tokenizer, [9], max_tokens=2, prompt_cache=cache)


def _without_seven(tokens: mx.array, logits: mx.array) -> mx.array:
    return mx.where(mx.arange(logits.shape[-1]) == 7, -math.inf, logits)


def test_what_no_sampler_of_kvants_picks_may_be_picked(pocket: Pocket) -> None:
    """A caller's sampler may pick a token that its processors made impossible."""
    options: dict[str, Any] = {"sampler": lambda logprobs: mx.array([7]), "logits_processors": [_without_seven]}
    assert [r.token for r in stream_generate(*pocket, PROMPT, max_tokens=3, **options)] == [7] * 3


def test_a_sampler_that_raises_stop_iteration(pocket: Pocket) -> None:
    """It would be taken for the answer's end."""
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(stream_generate(*pocket, PROMPT, max_tokens=3, sampler=ends))

"""Answers under grammars, of models: alone, in a batch, at any number of bits; and what fails fails alone."""

import json
import random
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support.batches import alone, asked, ids_of, run_all, scheduler_of
from support.counts import count
from support.pools import tiny_model
from support.schemas import problem, random_root

from kvant import stream_generate
from kvant.cache import CacheOptions
from kvant.engine.batch_engine import BatchEngine
from kvant.engine.conversation import Conversation
from kvant.engine.request import Request, Token
from kvant.errors import GrammarError
from kvant.models import Decoder
from kvant.sample_utils import make_logits_processors, make_sampler
from kvant.text.grammar import Grammar, Grammars
from kvant.text.tokenizer import Tokenizer

Pocket = tuple[Decoder, Tokenizer]
PADDED = 1300  # tokens of the random model; pocket's tokenizer has 1,280
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars(pocket: Pocket) -> Grammars:
    return Grammars(pocket[1], len(pocket[1]))


@pytest.fixture(scope="module")
def person(grammars: Grammars) -> Grammar:
    return grammars.compile("json_schema", PERSON)


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_model(tmp_path_factory.mktemp("random"), vocab_size=PADDED)


def _request(tokenizer: Tokenizer, grammar: Any, prompt: str = "Once upon", **options: Any) -> Request:
    processors = [*options.pop("processors", ()), grammar]
    options = {"max_tokens": 120, "stop_tokens": tokenizer.eos_token_ids} | options
    return Request(tokenizer.encode(prompt), logits_processors=processors, **options)


def _check(tokenizer: Tokenizer, tokens: list[Token], schema: Any, answers: int = 1) -> int:
    """Each answer that ended by itself satisfies the schema. Returns how many did."""
    ended = 0
    for answer in range(answers):
        last = [token for token in tokens if token.answer == answer][-1]
        assert last.finish_reason in ("stop", "length"), last.error
        if last.finish_reason == "stop":
            text = tokenizer.decode(ids_of(tokens, answer)[:-1])
            assert problem(json.loads(text), schema) is None, f"{schema}: {text}"
            ended += 1
    return ended


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_random_schemas(pocket: Pocket, grammars: Grammars, random_model: Decoder, bits: int) -> None:
    tokenizer = pocket[1]
    rng = random.Random(bits)
    for model, compiler in ((pocket[0], grammars), (random_model, Grammars(tokenizer, PADDED))):
        scheduler, _ = scheduler_of(model, bits, kv_group_size=16)
        schemas = [random_root(rng) for _ in range(count(6, 100))]
        requests = {}
        for schema in schemas:
            sampler = make_sampler(
                rng.choice([0.0, 0.7, 1.5]), rng.choice([0.0, 0.9]), seed=rng.randrange(1000)
            )
            prompt = rng.choice(["Once", "The fox said: ", "{"])
            options: dict[str, Any] = {"answers": rng.choice([1, 3]), "sampler": sampler}
            if rng.random() < 0.5:
                options["processors"] = make_logits_processors({5: 2.0}, 1.1, 20, 0.1, 20, 0.1, 20)
            requests[_request(tokenizer, compiler.compile("json_schema", schema), prompt, **options)] = schema
        free = Request(tokenizer.encode("Once upon a time"), max_tokens=30)
        told = run_all(scheduler, [*requests, free])
        assert bits or ids_of(told[free]) == alone(model, free)
        ended = sum(_check(tokenizer, told[each], schema, each.answers) for each, schema in requests.items())
        assert ended >= len(schemas) / 2
        if bits == 0:
            for request in requests:
                if request.answers == 1:
                    assert ids_of(told[request]) == alone(model, request)


def test_log_probabilities_are_those_of_allowed_tokens(pocket: Pocket, grammars: Grammars) -> None:
    tokenizer = pocket[1]
    grammar = grammars.compile("regex", "a|b")
    request = _request(tokenizer, grammar, top_logprobs=20)
    scheduler, _ = scheduler_of(pocket[0])
    first, end = run_all(scheduler, [request])[request]
    assert {tokenizer.decode([token]) for token, _ in first.top_logprobs} == {"a", "b"}
    assert sum(mx.exp(mx.array([value for _, value in first.top_logprobs])).tolist()) == pytest.approx(
        1, abs=1e-5
    )
    assert {token for token, _ in end.top_logprobs} == tokenizer.eos_token_ids


def test_a_conversation_that_forgets_in_the_middle_of_an_answer(pocket: Pocket, grammars: Grammars) -> None:
    model, tokenizer = pocket
    talk = Conversation(model, tokenizer, model.make_cache(110), overflow="forget")
    for _ in range(2):
        list(talk.send("Tell me of the river.", max_tokens=12))
    grammar = grammars.compile("regex", "([a-z ]{5}!){20}")
    pieces = list(talk.send("And then?", logits_processors=[grammar], max_tokens=200))
    assert talk.forgotten
    assert re.fullmatch("([a-z ]{5}!){20}", "".join(piece.text for piece in pieces))


def test_refused(
    pocket: Pocket, person: Grammar, random_model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = pocket
    scheduler, _ = scheduler_of(model)
    with pytest.raises(ValueError, match="2 grammars"):
        scheduler.submit(_request(tokenizer, person, processors=[person]))
    with pytest.raises(ValueError, match="2 grammars"):
        stream_generate(model, tokenizer, "Once", logits_processors=[person, person])
    with pytest.raises(ValueError, match="1280 tokens; the model has 1300"):
        scheduler_of(random_model)[0].submit(_request(tokenizer, person))
    with pytest.raises(ValueError, match="ends with an end-of-text token"):
        scheduler.submit(_request(tokenizer, person, stop_tokens=sorted(tokenizer.eos_token_ids)[:1]))
    monkeypatch.setattr(tokenizer, "eos_token_ids", ())
    with pytest.raises(ValueError, match="ends with an end-of-text token"):
        stream_generate(model, tokenizer, "Once", logits_processors=[person])


def test_an_answer_that_cannot_go_on_fails_alone(pocket: Pocket, grammars: Grammars, person: Grammar) -> None:
    """A step has limits: so many properties are too many, and show behind the first key. The engine goes
    on.
    """
    model, tokenizer = pocket
    inner = {"type": "object", "properties": {f"p{i}": {} for i in range(900)}, "additionalProperties": False}
    schema = {"type": "object", "properties": {"a": inner}, "required": ["a"], "additionalProperties": False}
    large = grammars.compile("json_schema", schema)

    def disobedient(logprobs: mx.array) -> mx.array:
        return mx.array([7])

    with BatchEngine(
        model, model.make_pool(128 * 32, sequences=8, options=CacheOptions(kv_bits=8)), max_batch=8
    ) as engine:
        good = asked(engine, _request(tokenizer, person, sampler=make_sampler(1.0, seed=1)))
        failing = asked(engine, _request(tokenizer, large, answers=2))
        told = list(good)
        with pytest.raises(GrammarError, match="max is 2000"):
            list(failing)
        wrong = asked(engine, _request(tokenizer, person, sampler=disobedient))
        with pytest.raises(GrammarError, match="token 7 does not follow the grammar"):
            list(wrong)
        assert _check(tokenizer, told, PERSON) == 1
        assert engine.alive
        assert engine.counts.free_pages == 32
        assert _check(tokenizer, list(asked(engine, _request(tokenizer, person))), PERSON) == 1


def test_a_grammar_without_the_library(
    pocket: Pocket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(GrammarError, match=r"need llguidance; pip install .*\[serve\]"):
        Grammars(pocket[1], len(pocket[1])).compile("json_object")

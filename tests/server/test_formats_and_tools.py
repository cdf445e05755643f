"""Formats and tools of chat completions: what an answer has to follow, and the calls that come out of it."""

import json
import re
from typing import Any

import pytest
from support.interfaces import CHAT, COMPLETIONS, pieces, text_of
from support.schemas import problem
from support.server import Running

ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]
TAGS = {"type": "array", "items": {"enum": ["red", "blue", "gr\u00fcn"]}, "maxItems": 2}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMA = {"type": "object", "properties": {"n": NUMBER, "tags": TAGS}, "required": ["n", "tags"]}
SCHEMA["additionalProperties"] = False
WANTED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
AT = {"type": "object", "properties": {"at": {"enum": ["fox", "bear"]}}, "required": ["at"]}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {**AT, "additionalProperties": False}}}
NOTHING = {"type": "object", "additionalProperties": False}
WAIT = {"type": "function", "function": {"name": "wait", "parameters": NOTHING}}


def ask(server: Running, tokens: int = 80, **fields: Any) -> dict[str, Any]:
    return CHAT.ask(server, ASKED, tokens, **{"temperature": 1, "seed": 1, **fields})


def refused(server: Running, **fields: Any) -> str:
    answered = CHAT.post(server, ASKED, 2, **fields)
    assert answered.status_code == 400, answered.text
    return str(answered.json()["error"]["message"])


def content_of(choice: dict[str, Any]) -> Any:
    """What an answer under SCHEMA says."""
    found = json.loads(choice["message"]["content"])
    assert problem(found, SCHEMA) is None
    return found


def test_every_answer_under_a_schema_parses(server: Running) -> None:
    answer = ask(server, n=4, temperature=2, response_format=WANTED, logprobs=True, top_logprobs=3)
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        assert content_of(choice)
        assert not re.search(r"\s", choice["message"]["content"])
        for token in choice["logprobs"]["content"]:  # JSON has no infinity, and what cannot come is not told
            assert all(each["logprob"] > -9999 for each in token["top_logprobs"])
    assert len({choice["message"]["content"] for choice in answer["choices"]}) > 1
    alone = ask(server, temperature=2, seed=4, response_format=WANTED)
    assert alone["choices"][0]["message"] == answer["choices"][3]["message"]
    cut = ask(server, tokens=3, response_format=WANTED)
    assert (cut["choices"][0]["finish_reason"], cut["usage"]["completion_tokens"]) == ("length", 3)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_object"}, "logit_bias": {"95": 100}}, r"\{.*\}"),
        ({"structured_outputs": {"json": NUMBER}}, "[0-9]{1,2}"),
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-c]!"}}, r"[0-9]{3}-[a-c]!"),
        ({"structured_outputs": {"choice": ["a/b.c", "(d) #\u00e9"]}}, r"a/b\.c|\(d\) #\u00e9"),
        ({"structured_outputs": {"grammar": 'start: "fox " ("and " "bear")?'}}, "fox (and bear)?"),
    ],
)
def test_other_formats(server: Running, fields: dict[str, Any], pattern: str) -> None:
    for to in (CHAT, COMPLETIONS) if "structured_outputs" in fields else (CHAT,):
        answer = to.ask(server, tokens=80, temperature=1, seed=1, **fields)
        assert re.fullmatch(pattern, text_of(answer), re.S)
        assert answer["choices"][0]["finish_reason"] == "stop"


def test_formats_that_cannot_be_had(server: Running) -> None:
    for schema, part in [({"type": "robot"}, "robot"), ({"not": {}}, "not"), ({"$ref": "http://x/y"}, "http")]:
        error = refused(server, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
        assert error.startswith("the json_schema cannot be used: ")
        assert part in error
    assert refused(server, structured_outputs={"regex": "("}).startswith("the regex cannot be used: ")
    assert "ignore_eos" in refused(server, response_format={"type": "json_object"}, ignore_eos=True)


def calls_of(answer: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = [piece for piece in pieces(answer) if "name" in piece]
    assert len({call["id"] for call in calls}) == len(calls)
    assert {call["type"] for call in calls} <= {"function"}
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def test_which_calls_are_made_and_which_tools_are_told(server: Running) -> None:
    named = {"type": "function", "function": {"name": "wait"}}
    answer = ask(server, 150, tools=[LOOK, WAIT], tool_choice=named, parallel_tool_calls=False)
    assert calls_of(answer) == [("wait", {})]
    told = ask(server, 5, tools=[LOOK])["usage"]["prompt_tokens"]
    assert ask(server, 5, tools=[LOOK], tool_choice="none")["usage"]["prompt_tokens"] < told - 50


def test_a_format_beside_tools(server: Running) -> None:
    fields = {"tools": [LOOK], "response_format": WANTED, "tokens": 150, "parallel_tool_calls": False}
    first = server.service.tokenizer.detokenizer.token_bytes
    never = {sign: {str(i): -100 for i in range(1280) if first(i)[:1] == sign} for sign in (b"{", b"<")}
    for choice in ({"logit_bias": never[b"<"]}, {"tool_choice": "none"}):
        answer = ask(server, **fields, **choice)
        assert content_of(answer["choices"][0])
        assert calls_of(answer) == []
    for choice in ({"logit_bias": never[b"{"]}, {"tool_choice": "required"}):
        answer = ask(server, **fields, **choice)
        assert [name for name, _ in calls_of(answer)] == ["look"]
        assert answer["choices"][0]["message"]["content"] is None

"""Formats and tools of chat completions: what an answer has to follow, and the calls that come out of it."""

import json
import re
from typing import Any

import pytest
from support.schemas import problem
from support.server import Running

PATH = "/v1/chat/completions"
ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "blue", "gr\u00fcn"]}, "maxItems": 2},
    },
    "required": ["n", "tags"],
    "additionalProperties": False,
}
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["fox", "bear"]}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}
WAIT = {
    "type": "function",
    "function": {"name": "wait", "parameters": {"type": "object", "additionalProperties": False}},
}


def ask(server: Running, **fields: Any) -> dict[str, Any]:
    body = {"model": "pocket", "messages": ASKED, "max_tokens": 80, "temperature": 1, "seed": 1} | fields
    answered = server.client.post(PATH, json=body)
    assert answered.status_code == 200, answered.text
    return dict(answered.json())


def refused(server: Running, **fields: Any) -> dict[str, Any]:
    answered = server.client.post(PATH, json={"model": "pocket", "messages": ASKED, "max_tokens": 2} | fields)
    assert answered.status_code == 400, answered.text
    return dict(answered.json()["error"])


def test_every_answer_under_a_schema_parses(server: Running) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    answer = ask(server, n=4, temperature=2, response_format=wanted, logprobs=True, top_logprobs=3)
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        found = json.loads(choice["message"]["content"])
        assert problem(found, SCHEMA) is None
        assert not re.search(r"\s", choice["message"]["content"])
        for token in choice["logprobs"]["content"]:  # JSON has no infinity, and what cannot come is not told
            assert all(each["logprob"] > -9999 for each in token["top_logprobs"])
    assert len({choice["message"]["content"] for choice in answer["choices"]}) > 1
    # Alone, the last one is the same.
    alone = ask(server, temperature=2, seed=4, response_format=wanted)
    assert alone["choices"][0]["message"] == answer["choices"][3]["message"]
    cut = ask(server, max_tokens=3, response_format=wanted)
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_object"}, "logit_bias": {"95": 100}}, r"\{.*\}"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, "true|false"),
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-c]!"}}, r"[0-9]{3}-[a-c]!"),
        ({"structured_outputs": {"choice": ["a/b.c", "(d) #\u00e9"]}}, r"a/b\.c|\(d\) #\u00e9"),
        ({"structured_outputs": {"grammar": 'start: "fox " ("and " "bear")?'}}, "fox (and bear)?"),
    ],
)
def test_other_formats(server: Running, fields: dict[str, Any], pattern: str) -> None:
    choice = ask(server, **fields)["choices"][0]
    assert re.fullmatch(pattern, choice["message"]["content"], re.S)
    assert choice["finish_reason"] == "stop"


def test_formats_that_cannot_be_had(server: Running) -> None:
    for schema, part in [({"type": "robot"}, "robot"), ({"not": {}}, "not"), ({"$ref": "http://x/y"}, "http")]:
        error = refused(server, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
        assert error["message"].startswith("the json_schema cannot be used: ")
        assert part in error["message"]
    for wrong in ({"required": 5, "properties": {}}, {"type": "number", "exclusiveMinimum": 10**400}):
        assert "json_schema" in refused(server, structured_outputs={"json": wrong})["message"]
    assert refused(server, structured_outputs={"regex": "("})["message"].startswith("the regex cannot be used: ")
    assert "ignore_eos" in refused(server, response_format={"type": "json_object"}, ignore_eos=True)["message"]


def calls_of(answer: dict[str, Any]) -> list[tuple[str, Any]]:
    message = answer["choices"][0]["message"]
    calls = message.get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    assert {call["type"] for call in calls} <= {"function"}
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def test_calls_that_are_asked_for(server: Running) -> None:
    named = {"type": "function", "function": {"name": "wait"}}
    only_one = {"parallel_tool_calls": False, "max_tokens": 150}
    answer = ask(server, tools=[LOOK, WAIT], tool_choice=named, **only_one)
    assert calls_of(answer) == [("wait", {})]
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert answer["choices"][0]["message"]["content"] is None
    answer = ask(server, tools=[LOOK], tool_choice="required", **only_one)
    (name, arguments), *more = calls_of(answer)
    assert (name, more) == ("look", [])
    assert arguments in ({"at": "fox"}, {"at": "bear"})
    # The model is told of no tools that it must not call.
    told = ask(server, tools=[LOOK], max_tokens=5)["usage"]["prompt_tokens"]
    assert ask(server, tools=[LOOK], max_tokens=5, tool_choice="none")["usage"]["prompt_tokens"] < told - 50


def test_a_call_in_a_stream_and_its_result(server: Running) -> None:
    fields = {"tools": [LOOK, WAIT], "tool_choice": "required", "temperature": 0, "parallel_tool_calls": False}
    whole = ask(server, max_tokens=150, **fields)["choices"][0]["message"]
    body = {"model": "pocket", "messages": ASKED, "max_tokens": 150, "stream": True, **fields}
    with server.client.stream("POST", PATH, json=body) as answered:
        lines = [line.removeprefix("data: ") for line in answered.iter_lines() if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    (call,) = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert call.pop("index") == 0
    assert {**call, "id": ""} == {**whole["tool_calls"][0], "id": ""}
    messages = [*ASKED, whole, {"role": "tool", "tool_call_id": whole["tool_calls"][0]["id"], "content": "A red fox."}]
    tokenizer = server.service.tokenizer
    answer = ask(server, messages=messages, tools=[LOOK, WAIT], max_tokens=5)
    shaped = [*messages]
    function = whole["tool_calls"][0]["function"]
    function = {**function, "arguments": json.loads(function["arguments"])}
    shaped[1] = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    ids = tokenizer.apply_chat_template(shaped, [LOOK, WAIT], add_generation_prompt=True)
    assert answer["usage"]["prompt_tokens"] == len(ids)


def test_a_format_beside_tools(server: Running) -> None:
    """An answer is a call, or text of the format; logit_bias tells pocket which."""
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    fields = {"tools": [LOOK], "response_format": wanted, "max_tokens": 150, "parallel_tool_calls": False}
    detokenizer = server.service.tokenizer.detokenizer
    begins = {sign: [i for i in range(1280) if detokenizer.token_bytes(i)[:1] == sign] for sign in (b"{", b"<")}
    never = {sign: {str(token): -100 for token in tokens} for sign, tokens in begins.items()}
    answer = ask(server, logit_bias=never[b"<"], **fields)
    assert problem(json.loads(answer["choices"][0]["message"]["content"]), SCHEMA) is None
    assert calls_of(answer) == []
    answer = ask(server, logit_bias=never[b"{"], **fields)
    assert [name for name, _ in calls_of(answer)] == ["look"]
    assert answer["choices"][0]["message"]["content"] is None
    forced = ask(server, tool_choice="required", **fields)
    assert [name for name, _ in calls_of(forced)] == ["look"]
    told = ask(server, tool_choice="none", **fields)
    assert problem(json.loads(told["choices"][0]["message"]["content"]), SCHEMA) is None


def test_a_part_has_what_its_type_says(server: Running) -> None:
    part = {"type": "text", "text": "x", "image_url": {"url": "data:,"}}
    assert "image_url" in refused(server, messages=[{"role": "user", "content": [part]}])["message"]

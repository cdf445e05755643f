"""Four interfaces of one endpoint: the same texts, streams, ends, calls and errors; formats and tools."""

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from pydantic import BaseModel, SecretStr
from support.interfaces import (
    CHAT,
    COMPLETIONS,
    FOX,
    INTERFACES,
    MESSAGES,
    RESPONSES,
    Interface,
    counts_of,
    pieces,
    text_of,
)
from support.schemas import problem
from support.server import Running, failing, sse_events
from transformers import AutoTokenizer

from kvant.engine.load import find_model
from kvant.server import endpoint
from kvant.server.left_out import MAX_LENGTH, MAX_NAMES
from kvant.server.metrics import MAX_IGNORED

SYSTEM = {"role": "system", "content": "You are kind."}
CITY = {"type": "string", "enum": ["Rome", "Oslo"]}
SCHEMA = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}
FUNCTION = {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}
LONG = "fox " * 600
each = pytest.mark.parametrize("to", INTERFACES, ids=str)
chats = pytest.mark.parametrize("to", [CHAT, MESSAGES, RESPONSES], ids=str)
# How an answer says that it reached its limit, a stop text or a tool.
CUT = {CHAT: "length", COMPLETIONS: "length", MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}
STOPPED = {CHAT: "stop", COMPLETIONS: "stop", MESSAGES: "stop_sequence", RESPONSES: "completed"}
CALLED = {CHAT: "tool_calls", MESSAGES: "tool_use", RESPONSES: "completed"}


def reason_of(answer: dict[str, Any]) -> Any:
    if "choices" in answer:
        return answer["choices"][0]["finish_reason"]
    return (
        answer.get("stop_reason") or (answer["incomplete_details"] or {"reason": answer["status"]})["reason"]
    )


def reference_ids(messages: Any, **options: Any) -> list[int]:
    """transformers' ids of a conversation."""
    tokenizer = AutoTokenizer.from_pretrained(find_model("pocket"))
    options |= {"add_generation_prompt": True, "return_dict": False}
    return list(tokenizer.apply_chat_template(messages, **options))


@each
def test_the_text_is_mlx_lms(exact: Running, pocket_mlx_lm: nn.Module, to: Interface) -> None:
    why = {"role": "user", "content": "Why?"}
    said = {"role": "assistant", "content": "No."}
    ids = reference_ids([SYSTEM, {"role": "user", "content": "Tell me a story\nof a fox."}, said, why])
    tokens = [token for token, _ in generate_step(mx.array(ids), pocket_mlx_lm, max_tokens=12)]
    kind = "input_text" if to is RESPONSES else "text"
    parts = [{"type": kind, "text": text} for text in ("Tell me a story", "of a fox.")]
    no = {"type": "output_text" if to is RESPONSES else "text", "text": "No."}
    asked: Any = [{"role": "user", "content": parts}, {"role": "assistant", "content": [no]}, why]
    apart = {MESSAGES: {"system": SYSTEM["content"]}, RESPONSES: {"instructions": SYSTEM["content"]}}
    if to is CHAT:
        asked = [SYSTEM, *asked]
    answered = to.post(exact, ids if to is COMPLETIONS else asked, 12, **apart.get(to, {}))
    answer = answered.json()
    tokenizer = AutoTokenizer.from_pretrained(find_model("pocket"))
    assert text_of(answer) == tokenizer.decode(tokens, skip_special_tokens=True)
    prompt, _, generated = counts_of(answer["usage"])
    assert (prompt, generated, reason_of(answer), answer["model"]) == (len(ids), 12, CUT[to], "pocket")
    assert answered.headers["request-id"] == answered.headers["x-request-id"]


@pytest.mark.parametrize("to", [MESSAGES, RESPONSES], ids=str)
def test_a_stream_has_the_same_text(server: Running, to: Interface) -> None:
    events = sse_events(server, to.path, to.body())
    deltas = [each["delta"] for each in events if each["type"].endswith(("block_delta", "output_text.delta"))]
    texts = [delta if isinstance(delta, str) else delta["text"] for delta in deltas]
    whole = to.ask(server)
    assert len(texts) > 5
    assert "".join(texts) == text_of(whole)
    usage = events[-1]["response"]["usage"] if to is RESPONSES else events[-2]["usage"]
    assert counts_of(usage)[::2] == counts_of(whole["usage"])[::2]


@pytest.mark.parametrize("to", [CHAT, COMPLETIONS, MESSAGES], ids=str)
def test_stop_texts(server: Running, to: Interface) -> None:
    name = "stop_sequences" if to is MESSAGES else "stop"
    whole = text_of(to.ask(server, tokens=40))
    first, second = whole[10:14], whole[20:23]
    for stop in ([second, "never there"], [second, first]):
        answer = to.ask(server, tokens=40, **{name: stop})
        ends = {at: text for text in stop if (at := whole.find(text)) >= 0}
        assert (text_of(answer), reason_of(answer)) == (whole[: min(ends)], STOPPED[to])
        assert to is not MESSAGES or answer["stop_sequence"] == ends[min(ends)]
    assert to is MESSAGES or text_of(to.ask(server, tokens=40, stop=first)) == whole[: whole.find(first)]


@chats
def test_a_second_turn_reads_only_what_is_new(server: Running, to: Interface) -> None:
    asked: list[Any] = [{"role": "user", "content": f"A {to.path} fox and a blue bear. " * 16}]
    first = to.ask(server, asked, 4)
    said = first.get("output") or [{"role": "assistant", "content": text_of(first)}]
    after = to.ask(server, [*asked, *said, {"role": "user", "content": "And then?"}], 4)
    # The last token of an answer is not fed.
    assert counts_of(after["usage"])[1] == sum(counts_of(first["usage"])[::2]) - 1 > 128


@chats
def test_a_call_and_its_result(server: Running, to: Interface) -> None:
    fields: Any = {"tool_choice": "required", "parallel_tool_calls": False}
    tools: Any = [{"type": "function", "strict": True, **FUNCTION}]
    if to is MESSAGES:
        tools = [{"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}]
        fields = {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    if to is CHAT:
        tools = [{"type": "function", "function": FUNCTION}]
    asked = [{"role": "user", "content": FOX}]
    answer = to.ask(server, asked, 90, tools=tools, **fields)
    (call,) = pieces(answer)
    given = json.loads(call["arguments"]) if "arguments" in call else call["input"]
    assert (call["name"], given) in [("weather", {"city": city}) for city in CITY["enum"]]
    assert reason_of(answer) == CALLED[to]
    again = to.ask(server, asked, 90, tools=tools, **fields)  # after a prefix that was hit, the same
    assert counts_of(again["usage"])[1] >= counts_of(again["usage"])[0] - 1
    (call_again,) = pieces(again)
    assert {**call_again, "id": "", "call_id": ""} == {**call, "id": "", "call_id": ""}
    if to is MESSAGES:
        result: Any = {"type": "tool_result", "tool_use_id": call["id"], "content": "Snow."}
        turns = [
            *asked,
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": [result]},
        ]
    elif to is RESPONSES:
        turns = [
            *asked,
            call,
            {"type": "function_call_output", "call_id": call["call_id"], "output": "Snow."},
        ]
    else:
        message = answer["choices"][0]["message"]
        assert message["content"] is None
        events = sse_events(server, to.path, to.body(asked, 90, tools=tools, **fields))
        (delta,) = [told for event in events for told in event["choices"][0]["delta"].get("tool_calls", ())]
        assert delta == {"index": 0, **message["tool_calls"][0], "id": delta["id"]}
        turns = [*asked, message, {"role": "tool", "tool_call_id": call["id"], "content": "Snow."}]
    after = to.ask(server, turns, 5, tools=tools)
    said = {"type": "function", "id": "", "function": {"name": "weather", "arguments": given}}
    shaped = [*asked, {"role": "assistant", "content": "", "tool_calls": [said]}]
    shaped.append({"role": "tool", "name": "weather", "content": "Snow."})
    ids = reference_ids(shaped, tools=[{"type": "function", "function": FUNCTION}])
    assert counts_of(after["usage"])[0] == len(ids)
    assert "text" in pieces(after)[0]


@chats
def test_a_forced_call_that_is_cut_is_no_text(server: Running, to: Interface) -> None:
    tools: Any = [{"type": "function", **FUNCTION}]
    if to is MESSAGES:
        tools = [{"name": "weather", "input_schema": SCHEMA}]
    if to is CHAT:
        tools = [{"type": "function", "function": FUNCTION}]
    named: Any = (
        {"type": "tool", "name": "weather"} if to is MESSAGES else {"type": "function", "name": "weather"}
    )
    named = {"type": "function", "function": {"name": "weather"}} if to is CHAT else named
    for choice in (named, {"type": "any"} if to is MESSAGES else "required"):
        for tokens in range(1, 16, 2):
            fields: Any = {"tools": tools, "tool_choice": choice}
            answer = to.ask(server, FOX, tokens, **fields)
            assert (text_of(answer), reason_of(answer)) == ("", CUT[to])
            assert not any("name" in piece for piece in pieces(answer))
        told = sse_events(server, to.path, to.body(FOX, 15, **fields))
        assert "tool_call>" not in json.dumps(told)


@pytest.mark.parametrize("choice", ["required", {"type": "custom", "name": "say"}], ids=["required", "named"])
def test_a_tool_that_takes_text(server: Running, choice: Any) -> None:
    """Its text follows its grammar and is not JSON; the call and its result come back as they were."""
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "a \\"fox\\"\\n" /[a-c\\n]{3}/'}
    tool = {"type": "custom", "name": "say", "description": "Speaks.", "format": form}
    fields: Any = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
    asked = [{"role": "user", "content": FOX}]
    answer = RESPONSES.ask(server, asked, 90, **fields)
    (call,) = answer["output"]
    assert re.fullmatch('a "fox"\n[a-c\n]{3}', call["input"])
    assert (call["type"], call["name"], call["status"]) == ("custom_tool_call", "say", "completed")
    told = answer["tools"][0]
    assert (told["type"], told["name"], told["format"]) == ("custom", "say", form)
    events = sse_events(server, RESPONSES.path, RESPONSES.body(asked, 90, **fields))
    delta, done = (event for event in events if event["type"].startswith("response.custom_tool_call_input."))
    assert delta["delta"] == done["input"] == call["input"]
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Said."}
    assert text_of(RESPONSES.ask(server, [*asked, call, result], 5, tools=[tool], tool_choice="none"))


@each
def test_an_answer_that_fails(server: Running, monkeypatch: pytest.MonkeyPatch, to: Interface) -> None:
    """Before its first byte it is a status; afterwards an event that clients raise."""
    monkeypatch.setattr(endpoint, "answer", failing)
    refused = to.post(server)
    assert (refused.status_code, refused.json()["error"]["message"]) == (503, "the engine failed")
    events = sse_events(server, to.path, to.body())
    if to is RESPONSES:
        assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events.pop()["response"]["error"]["message"] == "the engine failed"
    assert events[-1]["error"]["message"] == "the engine failed"
    if to is MESSAGES:
        assert events[-1]["error"]["type"] == "overloaded_error"
        assert events[-1]["request_id"].startswith("req_")


@each
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_the_interfaces_shape(server: Running, to: Interface, stream: bool) -> None:
    for fields, status, param, code, said in (
        ({"model": "gpt-4o"}, 404, "model", "model_not_found", "'gpt-4o'"),
        ({"stream": 5}, 400, "stream", None, "`bool | null`"),
        ({"draft": "suffix"}, 400, "draft", None, '"model" or "mtp" or "none" or "prompt"'),
        ({to.asked: to.body(LONG)[to.asked]}, 400, to.asked, "context_length_exceeded", ""),
    ):
        answered = to.post(server, **{"stream": stream, **fields})
        told = answered.json()
        error = told["error"]
        assert answered.status_code == status
        assert said in error["message"]
        assert "\n" not in error["message"]
        if to is MESSAGES:
            assert (told["type"], told["request_id"]) == ("error", answered.headers["request-id"])
            assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
        else:
            assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert ("prompt is too long" if to is MESSAGES else "maximum context length") in error["message"]


@each
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_left_out_is_said(server: Running, strict: Running, to: Interface, stream: bool) -> None:
    fields = {"stream": stream, "colour\n\u00e9": "red", "colours": [1, 2]}
    answered = to.post(server, tokens=2, **fields)
    assert answered.status_code == 200
    assert answered.headers["x-kvant-ignored"] == r"colour\n\xe9, colours"
    assert 'kvant_ignored_fields_total{name="colours"} ' in server.client.get("/metrics").text
    refused = to.post(strict, tokens=2, **fields)
    assert refused.status_code == 400
    assert "unknown or not supported" in refused.json()["error"]["message"]


def test_names_that_are_left_out_are_bounded(
    server: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients choose them: in the header, in the log and among the counters."""
    monkeypatch.setattr(server.registry.metrics, "_names", set())

    def ignored() -> set[str]:
        lines = server.client.get("/metrics").text.splitlines()
        return {line.rpartition(" ")[0] for line in lines if line.startswith("kvant_ignored_fields_total{")}

    before = ignored()  # other tests' on the same server
    for first in range(0, 200, 50):
        names = {f"{number}{'x' * 200}": 1 for number in range(first, first + 50)}
        answered = CHAT.post(server, tokens=1, **names)
        assert len(answered.headers["x-kvant-ignored"]) <= MAX_NAMES * (MAX_LENGTH + 2)
    logged = [line for line in caplog.messages if line.startswith("left out of requests to /v1/chat")]
    assert len(logged) == MAX_IGNORED
    assert len(ignored() - before) <= MAX_IGNORED + 1  # and "other"


def counted(server: Running, **fields: Any) -> Any:
    return server.client.post(
        f"{MESSAGES.path}/count_tokens", json=MESSAGES.body(tokens=None, temperature=None, **fields)
    )


def test_tokens_are_counted_as_transformers_counts_them(server: Running) -> None:
    tool = {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}
    for ours, theirs in ((None, None), ([tool], [{"type": "function", "function": FUNCTION}])):
        ids = reference_ids([SYSTEM, {"role": "user", "content": FOX}], tools=theirs)
        assert counted(server, system="You are kind.", tools=ours).json() == {"input_tokens": len(ids)}
    # more than fits
    assert counted(server, messages=[{"role": "user", "content": LONG}]).json()["input_tokens"] > 600
    assert counted(server, max_tokens=8, colour="red").headers["x-kvant-ignored"] == "max_tokens, colour"
    for fields, kind in (({"model": "gpt-4o"}, "not_found_error"), ({"system": 5}, "invalid_request_error")):
        assert counted(server, **fields).json()["error"]["type"] == kind


def test_a_response_says_what_was_in_force(server: Running) -> None:
    answer = RESPONSES.ask(server, temperature=None)
    assert (answer["temperature"], answer["top_p"]) == (server.service.sampling["temp"], 0.95)
    assert (RESPONSES.ask(server)["temperature"], RESPONSES.ask(server)["top_p"]) == (0, 1)


ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]
TAGS = {"type": "array", "items": {"enum": ["red", "blue", "gr\u00fcn"]}, "maxItems": 2}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
TAGGED = {"type": "object", "properties": {"n": NUMBER, "tags": TAGS}, "required": ["n", "tags"]}
TAGGED["additionalProperties"] = False
WANTED = {"type": "json_schema", "json_schema": {"name": "x", "schema": TAGGED, "strict": True}}
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
    """What an answer under TAGGED says."""
    found = json.loads(choice["message"]["content"])
    assert problem(found, TAGGED) is None
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
    for schema, part in [
        ({"type": "robot"}, "robot"),
        ({"not": {}}, "not"),
        ({"$ref": "http://x/y"}, "http"),
    ]:
        error = refused(
            server, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        )
        assert error.startswith("the json_schema cannot be used: ")
        assert part in error
    assert refused(server, structured_outputs={"regex": "("}).startswith("the regex cannot be used: ")
    assert "ignore_eos" in refused(server, response_format={"type": "json_object"}, ignore_eos=True)


class Stored(BaseModel):
    """Fields whose formats nobody holds a text to."""

    path: Path
    secret: SecretStr
    content: bytes


STORED = Stored.model_json_schema()
PATHS = {"type": "function", "function": {"name": "store", "parameters": STORED, "strict": True}}


@pytest.mark.parametrize(
    ("to", "fields"),
    [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": STORED}}}),
        (CHAT, {"tools": [PATHS]}),
        (COMPLETIONS, {"structured_outputs": {"json": STORED}}),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": STORED}}}),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": STORED}}}),
    ],
)
def test_formats_that_are_annotations(server: Running, to: Interface, fields: dict[str, Any]) -> None:
    for more in ({}, {"stream": True}):
        answered = to.post(server, tokens=2, **fields, **more)
        assert answered.status_code == 200, answered.text
        assert answered.headers["x-kvant-ignored"] == "format binary, format password, format path"
    unbound = {"tools": [{"type": "function", "function": {"name": "store", "parameters": STORED}}]}
    assert "x-kvant-ignored" not in CHAT.post(server, tokens=2, **unbound).headers


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

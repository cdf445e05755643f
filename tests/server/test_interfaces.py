"""Anthropic's messages and OpenAI's responses over HTTP: the answers of chat completions in their own shapes."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from support.server import Running, chat_text, failing, sse_events
from transformers import AutoTokenizer

from kvant.engine.load import find_model
from kvant.server import endpoint

FOX = "Tell me a story about a fox."
ASKED = [{"role": "user", "content": FOX}]
CITY = {"type": "string", "enum": ["Rome", "Oslo"]}
SCHEMA = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}


@dataclass(frozen=True)
class Interface:
    """What its requests and answers are called."""

    path: str
    messages: str
    system: str
    limit: str

    def body(self, messages: Any = ASKED, tokens: int = 24, **fields: Any) -> dict[str, Any]:
        return {"model": "pocket", self.messages: messages, self.limit: tokens, "temperature": 0} | fields

    def ask(self, server: Running, *given: Any, **fields: Any) -> Any:
        body = self.body(*given, **fields)
        return server.client.post(self.path, json={name: value for name, value in body.items() if value is not None})


MESSAGES = Interface("/v1/messages", "messages", "system", "max_tokens")
RESPONSES = Interface("/v1/responses", "input", "instructions", "max_output_tokens")
both = pytest.mark.parametrize("to", [MESSAGES, RESPONSES], ids=["messages", "responses"])


def pieces(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The texts and calls of an answer."""
    if "content" in answer:
        return list(answer["content"])
    return [item["content"][0] if item["type"] == "message" else item for item in answer["output"]]


def prompt_tokens(usage: dict[str, Any]) -> tuple[int, int]:
    """All, and those from the cache."""
    if "input_tokens_details" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]


def counted(server: Running, **fields: Any) -> int:
    body = {"model": "pocket", "messages": ASKED} | {name: value for name, value in fields.items() if value}
    answered = server.client.post("/v1/messages/count_tokens", json=body)
    assert list(answered.json()) == ["input_tokens"], answered.text
    return int(answered.json()["input_tokens"])


@both
def test_the_text_is_that_of_chat(server: Running, to: Interface) -> None:
    kind = "text" if to is MESSAGES else "input_text"
    parts = [{"type": kind, "text": text} for text in ("Tell me a story", "of a fox.")]
    answered = to.ask(server, [{"role": "user", "content": parts}], 6, **{to.system: "You are kind."})
    plain = [{"role": "system", "content": "You are kind."}, {"role": "user", "content": "Tell me a story\nof a fox."}]
    answer = answered.json()
    assert pieces(answer)[0]["text"] == chat_text(server, plain, max_tokens=6, temperature=0)
    assert (answer["usage"]["output_tokens"], answer["model"]) == (6, "pocket")
    assert answered.headers["request-id"] == answered.headers["x-request-id"]
    if to is RESPONSES:
        assert (answer["status"], answer["incomplete_details"]["reason"]) == ("incomplete", "max_output_tokens")
        assert (answer["temperature"], answer["top_p"]) == (0, 1)
        assert to.ask(server, temperature=None).json()["temperature"] == server.service.sampling["temp"]
    else:
        assert answer["stop_reason"] == "max_tokens"


@both
def test_a_stream_has_the_same_text(server: Running, to: Interface) -> None:
    events = sse_events(server, to.path, to.body())
    deltas = [event["delta"] for event in events if event["type"].endswith(("block_delta", "output_text.delta"))]
    assert len(deltas) > 5
    texts = [delta if isinstance(delta, str) else delta["text"] for delta in deltas]
    whole = to.ask(server).json()
    assert "".join(texts) == pieces(whole)[0]["text"]
    last = events[-1]["response"] if to is RESPONSES else events[-2]
    assert last["usage"] == whole["usage"]


def test_a_stop_sequence(server: Running) -> None:
    text = pieces(MESSAGES.ask(server).json())[0]["text"]
    stop = text[8:12]
    message = MESSAGES.ask(server, stop_sequences=["never", stop]).json()
    assert pieces(message)[0]["text"] == text[: text.index(stop)]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)


def test_tokens_are_counted_as_transformers_counts_them(server: Running) -> None:
    tokenizer = AutoTokenizer.from_pretrained(find_model("pocket"))
    messages = [{"role": "system", "content": "You are kind."}, *ASKED]
    function = {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}
    tool = {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}
    for ours, theirs in ((None, None), ([tool], [{"type": "function", "function": function}])):
        ids = tokenizer.apply_chat_template(messages, tools=theirs, add_generation_prompt=True, return_dict=False)
        assert counted(server, system="You are kind.", tools=ours) == len(ids)
    usage = MESSAGES.ask(server, system="You are kind.").json()["usage"]
    assert prompt_tokens(usage)[0] == counted(server, system="You are kind.")
    assert counted(server, messages=[{"role": "user", "content": "fox " * 600}]) > 600  # more than fits


@both
def test_a_second_turn_reads_the_first_one_from_the_cache(server: Running, to: Interface) -> None:
    turns = [{"role": "user", "content": f"A {to.messages} fox and a blue bear. " * 30}]
    first = to.ask(server, turns, 4).json()
    said = first.get("output") or [{"role": "assistant", "content": first["content"]}]
    after = to.ask(server, [*turns, *said, {"role": "user", "content": "And then?"}], 4).json()
    tokens, cached = prompt_tokens(after["usage"])
    assert prompt_tokens(first["usage"])[0] <= cached < tokens < cached + 30


def test_errors_have_the_interfaces_shape(server: Running) -> None:
    long = [{"role": "user", "content": "fox " * 600}]
    for path in (MESSAGES.path, f"{MESSAGES.path}/count_tokens"):
        for fields, status, kind, said in (
            ({"model": "claude"}, 404, "not_found_error", "'claude'"),
            ({"colour": "red"}, 400, "invalid_request_error", "`colour`"),
        ):
            needed = {"max_tokens": 1} if path == MESSAGES.path else {}
            answered = server.client.post(path, json={"model": "pocket", "messages": ASKED, **needed, **fields})
            told = answered.json()
            assert (answered.status_code, told["type"], told["error"]["type"]) == (status, "error", kind)
            assert said in told["error"]["message"]
            assert told["request_id"] == answered.headers["request-id"]
    assert MESSAGES.ask(server, long).json()["error"]["message"].startswith("prompt is too long: the prompt has 6")
    for fields, status, param, code in (
        ({"model": "gpt-5"}, 404, "model", "model_not_found"),
        ({"previous_response_id": "resp_1"}, 400, "previous_response_id", None),
        ({"input": "fox " * 600}, 400, "input", "context_length_exceeded"),
    ):
        answered = RESPONSES.ask(server, **fields)
        error = answered.json()["error"]
        assert (answered.status_code, error["type"]) == (status, "invalid_request_error")
        assert (error["param"], error["code"]) == (param, code)
    assert "maximum context length" in error["message"]


def test_versions_and_betas_are_taken(server: Running) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "interleaved-thinking-2025-05-14"}
    answered = server.client.post(f"{MESSAGES.path}?beta=true", json=MESSAGES.body(tokens=1), headers=headers)
    assert answered.status_code == 200


@both
def test_a_call_and_its_result(server: Running, to: Interface) -> None:
    """The call is forced, and keeps to the schema; what comes back goes to the template as a tool's answer."""
    if to is MESSAGES:
        tools: Any = [{"name": "weather", "input_schema": SCHEMA}]
        fields: Any = {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    else:
        tools = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]
        fields = {"tool_choice": "required", "parallel_tool_calls": False}
    answer = to.ask(server, ASKED, 64, tools=tools, **fields).json()
    (call,) = pieces(answer)
    given = json.loads(call["arguments"]) if "arguments" in call else call["input"]
    assert (call["name"], given) in [("weather", {"city": city}) for city in CITY["enum"]]
    assert answer.get("status") == "completed" or answer["stop_reason"] == "tool_use"
    if to is MESSAGES:
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "Snow."}
        turns = [*ASKED, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
    else:
        turns = [*ASKED, call, {"type": "function_call_output", "call_id": call["call_id"], "output": "Snow."}]
    after = to.ask(server, turns, tools=tools).json()
    assert prompt_tokens(after["usage"])[1] > 0
    assert "text" in pieces(after)[0]


@both
def test_an_answer_under_a_schema(server: Running, to: Interface) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    fields: Any = {"text": {"format": form | {"name": "n"}}} if to is RESPONSES else {"output_config": {"format": form}}
    answer = to.ask(server, **fields).json()
    assert pieces(answer)[0]["text"] in ('{"city":"Rome"}', '{"city":"Oslo"}')


@both
def test_an_answer_that_fails(server: Running, monkeypatch: pytest.MonkeyPatch, to: Interface) -> None:
    """Before its first byte it is a status; afterwards an event that clients raise."""
    monkeypatch.setattr(endpoint, "answer", failing)
    refused = to.ask(server)
    assert (refused.status_code, refused.json()["error"]["message"]) == (503, "the engine failed")
    events = sse_events(server, to.path, to.body())
    if to is MESSAGES:
        assert len(events) == 4
        assert events[3]["error"] == {"type": "overloaded_error", "message": "the engine failed"}
        assert events[3]["request_id"].startswith("req_")
    else:
        assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
        assert events[-2]["error"]["message"] == events[-1]["response"]["error"]["message"] == "the engine failed"

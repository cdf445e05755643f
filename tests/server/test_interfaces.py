"""Four interfaces of one endpoint: the same texts, streams, ends, calls and errors, each in its own shape."""

import json
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
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
from support.server import Running, failing, sse_events
from transformers import AutoTokenizer

from kvant.engine.load import find_model
from kvant.server import endpoint

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
    return answer.get("stop_reason") or (answer["incomplete_details"] or {"reason": answer["status"]})["reason"]


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
    if to is MESSAGES:
        result: Any = {"type": "tool_result", "tool_use_id": call["id"], "content": "Snow."}
        turns = [*asked, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
    elif to is RESPONSES:
        turns = [*asked, call, {"type": "function_call_output", "call_id": call["call_id"], "output": "Snow."}]
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
        ({"colour": "red"}, 400, "colour", None, "`colour`"),
        ({"draft": "suffix"}, 400, "draft", None, '"model" or "none" or "prompt"'),
        ({to.asked: to.body(LONG)[to.asked]}, 400, to.asked, "context_length_exceeded", ""),
    ):
        answered = to.post(server, **{**fields, "stream": stream})
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


def counted(server: Running, **fields: Any) -> Any:
    return server.client.post(
        f"{MESSAGES.path}/count_tokens", json=MESSAGES.body(tokens=None, temperature=None, **fields)
    )


def test_tokens_are_counted_as_transformers_counts_them(server: Running) -> None:
    tool = {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}
    for ours, theirs in ((None, None), ([tool], [{"type": "function", "function": FUNCTION}])):
        ids = reference_ids([SYSTEM, {"role": "user", "content": FOX}], tools=theirs)
        assert counted(server, system="You are kind.", tools=ours).json() == {"input_tokens": len(ids)}
    assert counted(server, messages=[{"role": "user", "content": LONG}]).json()["input_tokens"] > 600  # more than fits
    for fields, kind in (({"model": "gpt-4o"}, "not_found_error"), ({"colour": "red"}, "invalid_request_error")):
        assert counted(server, **fields).json()["error"]["type"] == kind


def test_a_response_says_what_was_in_force(server: Running) -> None:
    answer = RESPONSES.ask(server, temperature=None)
    assert (answer["temperature"], answer["top_p"]) == (server.service.sampling["temp"], 0.95)
    assert (RESPONSES.ask(server)["temperature"], RESPONSES.ask(server)["top_p"]) == (0, 1)

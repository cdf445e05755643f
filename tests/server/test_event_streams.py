"""Streams of messages and responses: the order of events, and that a client which adds them up has the
answer.
"""

import copy
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from support.counts import count
from support.interfaces import answers, pieces, service, streamed

from kvant.server.anthropic import MessageStream
from kvant.server.body import decode
from kvant.server.generation import Begun, Call, End, Event, Generation, Text, TokenLogprob
from kvant.server.left_out import LeftOut
from kvant.server.openai import ChatAnswers, ChatBody
from kvant.server.responses import ResponsesBody, ResponseStream, responses_generation

CALL = '{"city": "Łódź"}'
ANSWER = [
    Begun(20), Text(0, "Hm", True), Text(0, "m.", True), Text(0, "I "), Text(0, ""), Text(0, "look."),
    Call(0, 0, "weather", CALL), Call(0, 1, "weather", "{}"), End(0, "tool_calls", 12, 4, None, 16),
]  # fmt: skip
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
SUMMARY = {"reasoning": {"summary": "auto"}}


def _stream(**fields: Any) -> ResponseStream:
    body = decode(json.dumps({"model": "pocket", "input": "Hi", **fields}).encode(), ResponsesBody)
    generation = responses_generation(body, service(thinks=True), LeftOut())
    return ResponseStream("pocket", body, [generation], SimpleNamespace(sampling={"temp": 0.5}))


def _items(told: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a client makes of a stream, by OpenAI's description of the events; each `done` repeats what
    came before.
    """
    items: list[dict[str, Any]] = []
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    for event in told[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(copy.deepcopy(event["item"]))
            continue
        item = items[-1]
        assert event["output_index"] == len(items) - 1
        if kind == "output_item.done":
            assert event["item"] == {**item, "status": event["item"]["status"]} | {
                name: value for name, value in event["item"].items() if name == "encrypted_content"
            }
            items[-1] = copy.deepcopy(event["item"])
            continue
        assert event["item_id"] == item["id"]
        summary = "reasoning_summary" in kind
        parts = item.get("summary" if summary else "content", [])
        assert event.get("summary_index" if summary else "content_index", 0) == 0
        match kind.rpartition(".")[2], kind:
            case "added", _:
                parts.append(copy.deepcopy(event["part"]))
            case "delta", "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "done", "function_call_arguments.done":
                assert event["arguments"] == item["arguments"]
            case "delta", _:
                parts[0]["text"] += event["delta"]
                if kind == "output_text.delta":
                    parts[0]["logprobs"] += event["logprobs"]
            case "done", "content_part.done" | "reasoning_summary_part.done":
                assert event["part"] == parts[0]
            case "done", _:
                assert event["text"] == parts[0]["text"]
    return items


def test_the_order_of_events() -> None:
    told = streamed(_stream(), ANSWER)
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert [event["type"].removeprefix("response.") for event in told] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        *call, *call, "completed",
    ]  # fmt: skip
    for event in told[:2]:
        assert (event["response"]["status"], event["response"]["output"]) == ("in_progress", [])
    assert told[-1]["response"]["status"] == "completed"


def test_a_whole_response() -> None:
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}
    stream = _stream(
        tools=[tool], instructions="Be brief.", metadata={"a": "b"}, max_output_tokens=64, top_p=0.9, user="u",
        include=["reasoning.encrypted_content"], tool_choice={"type": "function", "name": "weather"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}, prompt_cache_key="k",
    )  # fmt: skip
    streamed(stream, ANSWER)
    response = stream.whole()
    ids = [response.pop("id"), *[item.pop("id") for item in response["output"]]]
    assert [each.partition("_")[0] for each in ids] == ["resp", "rs", "msg", "fc", "fc"]
    calls = {item.pop("call_id") for item in response["output"][2:]}
    assert len(calls) == 2
    assert len({*ids, *calls}) == 7
    times = [response.pop("created_at"), response.pop("completed_at")]
    assert times[0] <= times[1]
    thought = {"type": "reasoning_text", "text": "Hmm."}
    said = {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}
    call = {"type": "function_call", "status": "completed", "name": "weather"}
    assert response.pop("output") == [
        {
            "type": "reasoning", "status": "completed", "summary": [], "content": [thought],
            "encrypted_content": "kvant:SG1tLg==",
        },
        {"type": "message", "status": "completed", "role": "assistant", "content": [said]},
        call | {"arguments": CALL},
        call | {"arguments": "{}"},
    ]  # fmt: skip
    assert response.pop("usage") == {
        "input_tokens": 20, "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0}, "total_tokens": 32,
        "output_tokens": 12, "output_tokens_details": {"reasoning_tokens": 4},
    }  # fmt: skip
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    assert response == {
        "object": "response", "status": "completed", "background": False, "error": None, "incomplete_details": None,
        "instructions": "Be brief.", "max_output_tokens": 64, "max_tool_calls": None, "metadata": {"a": "b"},
        "model": "pocket", "parallel_tool_calls": True, "previous_response_id": None, "prompt_cache_key": "k",
        "reasoning": {"effort": None, "summary": None}, "safety_identifier": None, "service_tier": "default",
        "store": False, "temperature": 0.5, "text": {"format": form, "verbosity": "medium"},
        "tool_choice": {"type": "function", "name": "weather"}, "tools": [{**tool, "description": ""}],
        "top_logprobs": 0, "top_p": 0.9, "truncation": "disabled", "user": "u",
    }  # fmt: skip


def test_calls_of_tools_in_a_namespace_and_of_tools_that_take_text() -> None:
    """The client knows a tool by its namespace and its own name. Without one a name may have its marks in
    it.
    """
    space = {"type": "namespace", "name": "a", "tools": [{"type": "function", "name": "b__c"}]}
    inner = {"type": "namespace", "name": "x", "tools": [{"type": "custom", "name": "say"}]}
    stream = _stream(tools=[space, inner, {"type": "custom", "name": "x__tell"}])
    called = [
        Call(0, 0, "a__b__c", "{}"),
        Call(0, 1, "x__say", '{"input":"Hi"}'),
        Call(0, 2, "x__tell", '{"input":1}'),
    ]
    told = streamed(stream, [Begun(3), *called, End(0, "tool_calls", 9)])
    items = [
        {name: value for name, value in item.items() if "id" not in name} for item in stream.whole()["output"]
    ]
    function, custom = (
        {"type": f"{kind}_call", "status": "completed"} for kind in ("function", "custom_tool")
    )
    assert items == [
        function | {"name": "b__c", "namespace": "a", "arguments": "{}"},
        custom | {"name": "say", "namespace": "x", "input": "Hi"},
        custom | {"name": "x__tell", "input": '{"input":1}'},
    ]
    assert [event["item"] for event in told if event["type"].endswith("item.done")] == stream.whole()[
        "output"
    ]
    done = [event for event in told if event["type"].endswith("call_input.done")]
    assert [event["input"] for event in done] == ["Hi", '{"input":1}']
    (done,) = (event for event in told if event["type"].endswith("arguments.done"))
    assert (done["name"], done["arguments"]) == ("b__c", "{}")
    begun = [event["item"] for event in told if event["type"].endswith("item.added")]
    assert [(item["status"], item.get("namespace")) for item in begun] == [
        ("in_progress", at) for at in ("a", "x", None)
    ]


def test_a_search_for_tools_is_an_item_of_its_own() -> None:
    """Its arguments are an object; there are no events of them."""
    stream = _stream(tools=[{"type": "tool_search", "execution": "client", "parameters": {}}])
    called = Call(0, 0, "tool_search", '{"query":"sky"}')
    told = streamed(stream, [Begun(3), Text(0, "So"), called, End(0, "tool_calls", 9)])
    item = stream.whole()["output"][1]
    assert {name: value for name, value in item.items() if "id" not in name} == {
        "type": "tool_search_call", "execution": "client", "status": "completed", "arguments": {"query": "sky"},
    }  # fmt: skip
    kinds = [event["type"] for event in told if event.get("output_index") == 1]
    assert kinds == ["response.output_item.added", "response.output_item.done"]
    assert [event["item"]["status"] for event in told if event.get("output_index") == 1] == [
        "in_progress",
        "completed",
    ]
    assert item["call_id"]
    assert stream.whole()["tools"][0]["type"] == "tool_search"


def test_log_probabilities() -> None:
    byte = TokenLogprob("\ufffd", -0.5, b"\xc3", (TokenLogprob("a", -0.25, b"a"),))
    events = [Begun(3), Text(0, "", logprobs=[byte]), Text(0, "é", logprobs=[byte]), End(0, "stop", 2)]
    stream = _stream(top_logprobs=1)
    told = streamed(stream, events)
    shaped = {"token": "\ufffd", "bytes": [0xC3], "logprob": -0.5}
    shaped["top_logprobs"] = [{"token": "a", "bytes": [97], "logprob": -0.25}]
    assert stream.whole()["output"][0]["content"][0]["logprobs"] == [shaped, shaped]
    assert [event["logprobs"] for event in told if event["type"].endswith("text.delta")] == [
        [shaped],
        [shaped],
    ]


def _message(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of a stream, by Anthropic's description of the events."""
    message: dict[str, Any] = {}
    inputs = ""
    for event in told:
        match event:
            case {"type": "message_start"}:
                assert not message
                message = copy.deepcopy(event["message"])
                assert (message["content"], message["stop_reason"]) == ([], None)
            case {"type": "content_block_start"}:
                assert event["index"] == len(message["content"])
                message["content"].append(copy.deepcopy(event["content_block"]))
                inputs = ""
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                block = message["content"][index]
                assert index == len(message["content"]) - 1
                match delta:
                    case {"type": "text_delta"}:
                        block["text"] += delta["text"]
                    case {"type": "thinking_delta"}:
                        block["thinking"] += delta["thinking"]
                    case {"type": "signature_delta"}:
                        block["signature"] = delta["signature"]
                    case {"type": "input_json_delta"}:
                        inputs += delta["partial_json"]
            case {"type": "content_block_stop", "index": index}:
                assert index == len(message["content"]) - 1
                if message["content"][index]["type"] == "tool_use":
                    message["content"][index]["input"] = json.loads(inputs)
            case {"type": "message_delta"}:
                message |= event["delta"]
                message["usage"] |= event["usage"]
            case {"type": "message_stop"}:
                assert event is told[-1]
    return message


def test_a_whole_message() -> None:
    stream = MessageStream("pocket")
    streamed(stream, ANSWER)
    message = stream.whole()
    ids = [message.pop("id"), *[block.pop("id") for block in message["content"][2:]]]
    assert [each.partition("_")[0] for each in ids] == ["msg", "toolu", "toolu"]
    assert len(set(ids)) == 3
    usage = {
        "input_tokens": 4,
        "cache_read_input_tokens": 16,
        "cache_creation_input_tokens": 0,
        "output_tokens": 12,
    }
    content = [
        {"type": "thinking", "thinking": "Hmm.", "signature": "kvant:"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "name": "weather", "input": {"city": "Łódź"}},
        {"type": "tool_use", "name": "weather", "input": {}},
    ]
    assert message == {
        "type": "message", "role": "assistant", "model": "pocket", "content": content, "stop_reason": "tool_use",
        "stop_sequence": None, "usage": usage | {"output_tokens_details": {"thinking_tokens": 4}},
    }  # fmt: skip


def test_thinking_that_is_not_shown_comes_in_the_signature() -> None:
    stream = MessageStream("pocket", shows_thinking=False)
    told = streamed(stream, [Begun(3), Text(0, "secret", True), Text(0, "Yes."), End(0, "stop", 5, 2)])
    assert _message(told) == stream.whole()
    assert "secret" not in json.dumps(told)
    assert stream.whole()["content"][0] == {"type": "thinking", "thinking": "", "signature": "kvant:c2VjcmV0"}


def test_text_before_and_after_a_call_has_a_line_each() -> None:
    """A chat completion's message has one text; the other interfaces have two."""
    body = decode(
        json.dumps({"model": "pocket", "messages": [{"role": "user", "content": "Hi"}]}).encode(), ChatBody
    )
    before, after = (
        [Text(0, "Hm", True), Text(0, "Let me"), Text(0, " see.")],
        [Text(0, "That"), Text(0, " was it.")],
    )
    calls = [Call(0, 0, "weather", CALL), Call(0, 1, "weather", "{}")]
    for said, text in (
        ([*before, *calls, *after], "Let me see.\nThat was it."),
        ([*calls, *after], "That was it."),
        ([*before, *calls], "Let me see."),
    ):
        events: list[Event] = [Begun(3), *said, End(0, "tool_calls", 9)]
        encoder = ChatAnswers("pocket", body, [Generation(field="messages")], service())
        deltas = [told["choices"][0]["delta"] for told in streamed(encoder, events)]
        assert "".join(delta.get("content", "") for delta in deltas) == text
        assert encoder.whole()["choices"][0]["message"]["content"] == text
        for stream in (MessageStream("pocket"), _stream()):
            streamed(stream, events)
            texts = [piece["text"] for piece in pieces(stream.whole()) if "text" in piece]
            assert texts == text.split("\n")


@given(answers())
@settings(max_examples=count(30, 2000))
def test_a_client_adds_up_the_answer(events: list[Event]) -> None:
    said = "".join(event.text for event in events if isinstance(event, Text) and not event.thinking)
    calls = sum(isinstance(event, Call) for event in events)
    message = MessageStream("pocket")
    assert _message(streamed(message, events)) == message.whole()
    content, end = message.whole()["content"], events[-1]
    assert isinstance(end, End)
    reason = "stop_sequence" if end.stop else REASONS[end.reason]
    assert (message.whole()["stop_reason"], message.whole()["stop_sequence"]) == (reason, end.stop)
    assert "".join(block.get("text", "") for block in content) == said
    assert sum(block["type"] == "tool_use" for block in content) == calls
    for fields in ({}, SUMMARY):
        response = _stream(**fields)
        told = streamed(response, events)
        assert _items(told) == response.whole()["output"] == told[-1]["response"]["output"]
        output = response.whole()["output"]
        assert "".join(item["content"][0]["text"] for item in output if item["type"] == "message") == said
        assert sum(item["type"] == "function_call" for item in output) == calls
        assert output  # clients look for a message
        status = "incomplete" if end.reason == "length" else "completed"
        assert told[-1]["type"] == f"response.{status}"
        assert response.whole()["status"] == output[-1]["status"] == status or calls

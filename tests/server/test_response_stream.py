"""OpenAI's stream of a response: the order of its events, and that a client which adds them up has the answer."""

import copy
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from support.counts import count
from support.interfaces import answers, service, streamed

from kvant.server.body import decode
from kvant.server.errors import ApiError
from kvant.server.generation import Begun, Call, End, Event, Text, TokenLogprob
from kvant.server.responses import ResponsesBody, ResponseStream, responses_generation

CALL = '{"city": "Łódź"}'
ANSWER = [
    Begun(20, 16), Text(0, "Hm", True), Text(0, "m.", True), Text(0, "I "), Text(0, ""), Text(0, "look."),
    Call(0, 0, "weather", CALL), Call(0, 1, "weather", "{}"), End(0, "tool_calls", 12, 4),
]  # fmt: skip
SUMMARY = {"reasoning": {"summary": "auto"}}


def _stream(**fields: Any) -> ResponseStream:
    body = decode(json.dumps({"model": "pocket", "input": "Hi", **fields}).encode(), ResponsesBody)
    generation = responses_generation(body, service(thinks=True))
    return ResponseStream("pocket", body, [generation], SimpleNamespace(sampling={"temp": 0.5}))


def _client(told: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that a client makes of a stream's parts and deltas, by OpenAI's description of the events.

    Each `done` has to say what the parts before it made.
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
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
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


def test_thinking_as_a_summary() -> None:
    told = streamed(_stream(**SUMMARY), [Begun(3, 0), Text(0, "Hm.", True), Text(0, "Yes."), End(0, "stop", 5, 2)])
    assert [event["type"].removeprefix("response.") for event in told[2:8]] == [
        "output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta",
        "reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done",
    ]  # fmt: skip
    item = told[-1]["response"]["output"][0]
    assert item["summary"] == [{"type": "summary_text", "text": "Hm."}]
    assert "content" not in item


def test_the_whole_response() -> None:
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


@given(answers())
@settings(max_examples=count(30, 2000), deadline=None)
def test_a_client_adds_up_the_answer(events: list[Event]) -> None:
    for fields in ({}, SUMMARY):
        stream = _stream(**fields)
        told = streamed(stream, events)
        assert _client(told) == stream.whole()["output"] == told[-1]["response"]["output"]
        assert stream.whole()["output"]
        texts = [item["content"][0]["text"] for item in stream.whole()["output"] if item["type"] == "message"]
        assert "".join(texts) == "".join(each.text for each in events if isinstance(each, Text) and not each.thinking)


def test_an_answer_that_was_cut() -> None:
    stream = _stream()
    told = streamed(stream, [Begun(3, 0), Text(0, "Once"), End(0, "length", 1)])
    assert told[-1]["type"] == "response.incomplete"
    assert stream.whole()["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (stream.whole()["status"], stream.whole()["output"][0]["status"]) == ("incomplete", "incomplete")


def test_log_probabilities() -> None:
    byte = TokenLogprob("\ufffd", -0.5, b"\xc3", (TokenLogprob("a", -0.25, b"a"),))
    events = [Begun(3, 0), Text(0, "", logprobs=[byte]), Text(0, "é", logprobs=[byte]), End(0, "stop", 2)]
    stream = _stream(top_logprobs=1)
    told = streamed(stream, events)
    shaped = {"token": "\ufffd", "bytes": [0xC3], "logprob": -0.5}
    shaped["top_logprobs"] = [{"token": "a", "bytes": [97], "logprob": -0.25}]
    assert stream.whole()["output"][0]["content"][0]["logprobs"] == [shaped, shaped]
    assert [event["logprobs"] for event in told if event["type"].endswith("text.delta")] == [[shaped], [shaped]]


def test_an_answer_that_failed() -> None:
    stream = _stream()
    told = streamed(stream, [Begun(3, 0), Text(0, "Once")])
    last = list(stream.failed(ApiError("the engine failed", status=503), "req_1"))
    assert [event["type"] for event in last] == ["error", "response.failed"]
    assert [event["sequence_number"] for event in last] == [len(told), len(told) + 1]
    assert last[0]["error"] == {"message": "the engine failed", "type": "server_error", "param": None, "code": None}
    assert last[1]["response"]["error"] == {"code": "server_error", "message": "the engine failed"}

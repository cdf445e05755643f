"""Anthropic's stream: the order of its events, and that a client which adds them up has the answer."""

import copy
import json
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from support.counts import count
from support.interfaces import answers, streamed

from kvant.server.anthropic import MessageStream
from kvant.server.generation import Begun, Call, End, Event, Text

CALL = '{"city": "Łódź"}'
ANSWER = [
    Begun(20, 16), Text(0, "Hm", True), Text(0, "m.", True), Text(0, "I "), Text(0, ""), Text(0, "look."),
    Call(0, 0, "weather", CALL), Call(0, 1, "weather", "{}"), End(0, "tool_calls", 12, 4),
]  # fmt: skip


def _client(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of a stream, by Anthropic's description of the events."""
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


def test_the_whole_message() -> None:
    stream = MessageStream("pocket")
    streamed(stream, ANSWER)
    message = stream.whole()
    ids = [message.pop("id"), *[block.pop("id") for block in message["content"][2:]]]
    assert [each.partition("_")[0] for each in ids] == ["msg", "toolu", "toolu"]
    assert len(set(ids)) == 3
    usage = {"input_tokens": 4, "cache_read_input_tokens": 16, "cache_creation_input_tokens": 0, "output_tokens": 12}
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


@given(answers())
@settings(max_examples=count(30, 2000), deadline=None)
def test_a_client_adds_up_the_answer(events: list[Event]) -> None:
    stream = MessageStream("pocket")
    told = streamed(stream, events)
    assert _client(told) == stream.whole()
    told_texts = "".join(event.text for event in events if isinstance(event, Text) and not event.thinking)
    assert "".join(block.get("text", "") for block in stream.whole()["content"]) == told_texts
    kinds = [block["type"] for block in stream.whole()["content"]]
    assert kinds.count("tool_use") == sum(isinstance(event, Call) for event in events)


def test_thinking_that_is_not_shown_comes_in_the_signature() -> None:
    stream = MessageStream("pocket", shows_thinking=False)
    told = streamed(stream, [Begun(3, 0), Text(0, "secret", True), Text(0, "Yes."), End(0, "stop", 5, 2)])
    assert _client(told) == stream.whole()
    assert "secret" not in json.dumps(told)
    assert stream.whole()["content"][0] == {"type": "thinking", "thinking": "", "signature": "kvant:c2VjcmV0"}


def test_why_an_answer_ended() -> None:
    for end, told in (
        (End(0, "stop", 1), ("end_turn", None)),
        (End(0, "stop", 1, stop="\n\n"), ("stop_sequence", "\n\n")),
        (End(0, "length", 1), ("max_tokens", None)),
        (End(0, "tool_calls", 1), ("tool_use", None)),
    ):
        stream = MessageStream("pocket")
        streamed(stream, [Begun(3, 0), end])
        assert (stream.whole()["stop_reason"], stream.whole()["stop_sequence"]) == told
        assert stream.whole()["content"] == []

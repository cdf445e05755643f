"""Anthropic's messages over HTTP: the answers of the other interfaces in Anthropic's shapes."""

from typing import Any

import pytest
from support.server import Running, chat_text, failing, sse_events
from transformers import AutoTokenizer

from kvant.engine.load import find_model
from kvant.server import endpoint

PATH = "/v1/messages"
ASKED = [{"role": "user", "content": "Tell me a story about a fox."}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}


def _ask(server: Running, path: str = PATH, **fields: Any) -> Any:
    body = {"model": "pocket", "messages": ASKED, "max_tokens": 24, "temperature": 0} | fields
    return server.client.post(path, json={name: value for name, value in body.items() if value is not None})


def _count(server: Running, **fields: Any) -> int:
    answered = _ask(server, f"{PATH}/count_tokens", max_tokens=None, temperature=None, **fields)
    assert answered.status_code == 200, answered.text
    assert list(answered.json()) == ["input_tokens"]
    return int(answered.json()["input_tokens"])


def test_the_text_is_that_of_the_other_interface(server: Running) -> None:
    texts = ({"type": "text", "text": text} for text in ("Tell me a story", "of a fox."))
    blocks = [{**text, "cache_control": {"type": "ephemeral"}} for text in texts]
    answered = _ask(server, system="You are kind.", messages=[{"role": "user", "content": blocks}], max_tokens=6)
    plain = [{"role": "system", "content": "You are kind."}, {"role": "user", "content": "Tell me a story\nof a fox."}]
    message = answered.json()
    assert message["content"] == [{"type": "text", "text": chat_text(server, plain, max_tokens=6, temperature=0)}]
    assert message["stop_reason"] == "max_tokens"
    assert message["usage"]["output_tokens"] == 6
    assert message["model"] == "pocket"
    assert answered.headers["request-id"].startswith("req_")


def test_a_stream_has_the_same_text(server: Running) -> None:
    events = sse_events(server, PATH, {"model": "pocket", "messages": ASKED, "max_tokens": 24, "temperature": 0})
    pieces = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert len(pieces) > 5
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    whole = _ask(server).json()
    assert (events[-2]["usage"], events[-2]["delta"]["stop_reason"]) == (whole["usage"], whole["stop_reason"])
    assert "".join(pieces) == whole["content"][0]["text"]


def test_a_stop_sequence(server: Running) -> None:
    text = _ask(server).json()["content"][0]["text"]
    stop = text[8:12]
    message = _ask(server, stop_sequences=["never", stop]).json()
    assert message["content"][0]["text"] == text[: text.index(stop)]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)


def test_tokens_are_counted_as_transformers_counts_them(server: Running) -> None:
    tokenizer = AutoTokenizer.from_pretrained(find_model("pocket"))
    messages = [{"role": "system", "content": "You are kind."}, *ASKED]
    function = {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}
    tools = [{"type": "function", "function": function}]
    for given in (None, tools):
        ids = tokenizer.apply_chat_template(messages, tools=given, add_generation_prompt=True, return_dict=False)
        counted = _count(server, system="You are kind.", tools=[TOOL] if given else None)
        assert counted == len(ids)
    usage = _ask(server, system="You are kind.").json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == _count(server, system="You are kind.")


def test_a_second_turn_reads_the_first_one_from_the_cache(server: Running) -> None:
    turns = [{"role": "user", "content": "A red fox and a blue bear. " * 30}]
    first = _ask(server, messages=turns, max_tokens=4).json()
    turns += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": "And then?"}]
    usage = _ask(server, messages=turns, max_tokens=4).json()["usage"]
    assert usage["cache_read_input_tokens"] >= _count(server, messages=turns[:1])
    assert usage["input_tokens"] < 30
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == _count(server, messages=turns)


@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens"])
def test_errors_have_anthropics_shape(server: Running, path: str) -> None:
    own = {} if path == PATH else {"max_tokens": None, "temperature": None}
    for fields, status, kind, said in (
        ({"model": "claude"}, 404, "not_found_error", "'claude'"),
        ({"colour": "red"}, 400, "invalid_request_error", "`colour`"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error", "'image'"),
    ):
        answered = _ask(server, path, **{**own, **fields})
        assert answered.status_code == status
        told = answered.json()
        assert (told["type"], told["error"]["type"]) == ("error", kind)
        assert said in told["error"]["message"]
        assert told["request_id"] == answered.headers["request-id"]


def test_versions_and_betas_are_taken(server: Running) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "interleaved-thinking-2025-05-14"}
    body = {"model": "pocket", "messages": ASKED, "max_tokens": 1}
    assert server.client.post(f"{PATH}?beta=true", json=body, headers=headers).status_code == 200


def test_more_than_fits(server: Running) -> None:
    long = [{"role": "user", "content": "fox " * 600}]
    answered = _ask(server, messages=long)
    assert (answered.status_code, answered.json()["error"]["type"]) == (400, "invalid_request_error")
    assert answered.json()["error"]["message"].startswith("prompt is too long: the prompt has 6")
    assert _count(server, messages=long) > 600


def test_a_call_and_its_result(server: Running) -> None:
    """The call is forced; what comes back goes to the template as a tool's answer."""
    city = {"type": "string", "enum": ["Rome", "Oslo"]}
    schema = {"type": "object", "properties": {"city": city}, "required": ["city"], "additionalProperties": False}
    tool = {**TOOL, "input_schema": schema}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    message = _ask(server, tools=[tool], tool_choice=choice, max_tokens=64).json()
    (block,) = message["content"]
    assert (message["stop_reason"], block["type"], block["name"]) == ("tool_use", "tool_use", "weather")
    assert block["input"] in ({"city": "Rome"}, {"city": "Oslo"})
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "Snow."}
    turns = [*ASKED, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": [result]}]
    after = _ask(server, messages=turns, tools=[tool]).json()
    assert after["usage"]["cache_read_input_tokens"] > 0
    assert after["content"][0]["type"] == "text"


def test_an_answer_under_a_schema(server: Running) -> None:
    schema = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
    schema["additionalProperties"] = False
    message = _ask(server, output_config={"format": {"type": "json_schema", "schema": schema}}).json()
    assert message["content"][0]["text"] in ('{"sure":true}', '{"sure":false}')
    assert message["stop_reason"] == "end_turn"


def test_an_answer_that_fails(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first byte it is a status; afterwards an event that clients raise."""
    monkeypatch.setattr(endpoint, "answer", failing)
    assert _ask(server).status_code == 503
    assert _ask(server).json()["error"] == {"type": "overloaded_error", "message": "the engine failed"}
    events = sse_events(server, PATH, {"model": "pocket", "messages": ASKED, "max_tokens": 24})
    assert [event["type"] for event in events[:3]] == ["message_start", "content_block_start", "content_block_delta"]
    assert len(events) == 4
    assert events[3]["error"] == {"type": "overloaded_error", "message": "the engine failed"}
    assert events[3]["request_id"].startswith("req_")

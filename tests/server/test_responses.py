"""OpenAI's responses over HTTP: the answers of the other interfaces in their own shapes."""

from typing import Any

import pytest
from support.server import Running, chat_text, failing, sse_events

from kvant.server import endpoint

PATH = "/v1/responses"
ASKED = "Tell me a story about a fox."


def _body(**fields: Any) -> dict[str, Any]:
    return {"model": "pocket", "input": ASKED, "max_output_tokens": 24, "temperature": 0} | fields


def _ask(server: Running, **fields: Any) -> Any:
    return server.client.post(PATH, json=_body(**fields))


def test_the_text_is_that_of_the_other_interface(server: Running) -> None:
    answered = _ask(server, instructions="You are kind.")
    response = answered.json()
    plain = [{"role": "system", "content": "You are kind."}, {"role": "user", "content": ASKED}]
    text = chat_text(server, plain, max_tokens=24, temperature=0)
    assert response["output"][0]["content"][0]["text"] == text
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["usage"]["output_tokens"] == 24
    assert (response["temperature"], response["top_p"], response["model"]) == (0, 1, "pocket")
    assert answered.headers["x-request-id"].startswith("req_")


def test_a_stream_has_the_same_text(server: Running) -> None:
    events = sse_events(server, PATH, _body())
    pieces = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert len(pieces) > 5
    whole = _ask(server).json()
    assert "".join(pieces) == whole["output"][0]["content"][0]["text"]
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["usage"] == whole["usage"]


def test_the_models_own_sampling_is_told(server: Running) -> None:
    response = _ask(server, temperature=None).json()
    assert response["temperature"] == server.service.sampling["temp"]


def test_log_probabilities_are_those_of_the_other_interface(server: Running) -> None:
    told = _ask(server, top_logprobs=2).json()["output"][0]["content"][0]["logprobs"]
    asked = {"model": "pocket", "messages": [{"role": "user", "content": ASKED}], "max_tokens": 24, "temperature": 0}
    chat = server.client.post("/v1/chat/completions", json={**asked, "logprobs": True, "top_logprobs": 2}).json()
    assert [each["token"] for each in told] == [each["token"] for each in chat["choices"][0]["logprobs"]["content"]]
    assert all(len(each["top_logprobs"]) == 2 for each in told)


def test_a_second_turn_reads_the_first_one_from_the_cache(server: Running) -> None:
    turns = [{"role": "user", "content": "A green fox and a grey bear. " * 30}]
    first = _ask(server, input=turns, max_output_tokens=4).json()
    turns += [*first["output"], {"role": "user", "content": "And then?"}]
    usage = _ask(server, input=turns, max_output_tokens=4).json()["usage"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    assert first["usage"]["input_tokens"] <= cached < usage["input_tokens"] < cached + 30


def test_errors_have_openais_shape(server: Running) -> None:
    for fields, status, param, code in (
        ({"model": "gpt-5"}, 404, "model", "model_not_found"),
        ({"previous_response_id": "resp_1"}, 400, "previous_response_id", None),
        ({"colour": "red"}, 400, "colour", None),
        ({"input": "fox " * 600}, 400, "input", "context_length_exceeded"),
    ):
        answered = _ask(server, **fields)
        assert answered.status_code == status
        error = answered.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert "maximum context length" in error["message"]


def test_a_call_and_its_result(server: Running) -> None:
    """The call is forced, and keeps to the schema; what comes back goes to the template as a tool's answer."""
    city = {"type": "string", "enum": ["Rome", "Oslo"]}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"], "additionalProperties": False}
    tools = [{"type": "function", "name": "weather", "parameters": parameters, "strict": True}]
    fields = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 64}
    events = sse_events(server, PATH, _body(**fields))
    (item,) = events[-1]["response"]["output"]
    assert (events[-1]["type"], item["type"], item["name"]) == ("response.completed", "function_call", "weather")
    assert item["arguments"].replace(" ", "") in ('{"city":"Rome"}', '{"city":"Oslo"}')
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "Snow."}
    turns = [{"role": "user", "content": ASKED}, item, result]
    after = _ask(server, input=turns, tools=tools).json()
    assert after["output"][0]["type"] == "message"
    assert after["usage"]["input_tokens_details"]["cached_tokens"] > 0


def test_an_answer_under_a_schema(server: Running) -> None:
    schema = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    response = _ask(server, text={"format": form}).json()
    assert response["output"][0]["content"][0]["text"] in ('{"sure":true}', '{"sure":false}')
    assert (response["status"], response["text"]["format"]) == ("completed", form)


def test_an_answer_that_fails(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first byte it is a status; afterwards an event that clients raise."""
    monkeypatch.setattr(endpoint, "answer", failing)
    assert _ask(server).status_code == 503
    events = sse_events(server, PATH, _body())
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert events[-2]["error"]["message"] == events[-1]["response"]["error"]["message"] == "the engine failed"

"""OpenAI's items: what the chat template is given, and what is refused by name."""

import json
from typing import Any

import pytest
from support.interfaces import SWITCHED, refused, service

from kvant.server.body import decode
from kvant.server.errors import ApiError
from kvant.server.generation import Format, Generation, Tool
from kvant.server.responses import ResponsesBody, responses_generation

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "name": "weather", "description": "Of a city.", "parameters": SCHEMA}
CALL = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"city": "Rome"}'}
HI = {"role": "user", "content": "Hi"}


def _made(on: Any = None, **fields: Any) -> Generation:
    body = decode(json.dumps({"model": "pocket", "input": "Hi", **fields}).encode(), ResponsesBody)
    return responses_generation(body, service() if on is None else on)


def _refused(on: Any = None, **fields: Any) -> ApiError:
    return refused(lambda: _made(on, **fields))


def test_a_conversation_with_tools() -> None:
    """Items as answers had them, and as clients write them."""
    text = {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}
    made = _made(
        instructions="Be brief.",
        tools=[{**TOOL, "strict": True}, {"type": "function", "name": "now", "parameters": None}],
        input=[
            {"role": "developer", "content": [{"type": "input_text", "text": "!"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": x} for x in "ab"]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [text]},
            {**CALL, "id": "fc_1", "status": "completed", "parsed_arguments": {"city": "Rome"}},
            {**CALL, "call_id": "b"},
            {"type": "function_call_output", "call_id": "b", "output": "sun", "id": "fco_1"},
            {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "rain"}]},
            {"type": "message", "role": "assistant", "content": "Well."},
            HI,
        ],
    )
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    calls = [{"id": each, "type": "function", "function": function} for each in "ab"]
    assert made.messages == [
        {"role": "system", "content": "Be brief.\n!"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "sun", "tool_call_id": "b", "name": "weather"},
        {"role": "tool", "content": "rain", "tool_call_id": "a", "name": "weather"},
        {"role": "assistant", "content": "Well."},
        {"role": "user", "content": "Hi"},
    ]
    assert made.tools == (Tool("weather", "Of a city.", SCHEMA, strict=True), Tool("now"))
    assert (made.tool_choice, made.parallel_tool_calls) == ("auto", True)


@pytest.mark.parametrize(
    "kept",
    [
        {"summary": [{"type": "summary_text", "text": "secret"}]},
        {"summary": [], "content": [{"type": "reasoning_text", "text": "secret"}]},
        {"summary": [{"type": "summary_text", "text": "short"}], "encrypted_content": "kvant:c2VjcmV0"},
        {"encrypted_content": "kvant:c2VjcmV0", "content": []},
    ],
)
def test_thinking_comes_back(kept: dict[str, Any]) -> None:
    item = {"type": "reasoning", "id": "rs_1", **kept}
    assert _made(input=[HI, item, HI]).messages[1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "secret",
    }


def test_options() -> None:
    made = _made(max_output_tokens=7, temperature=1.5, top_p=0.9, top_k=3, seed=4, parallel_tool_calls=False)
    assert (made.max_tokens, made.sampling.temp, made.sampling.top_p) == (7, 1.5, 0.9)
    assert (made.sampling.top_k, made.sampling.seed, made.parallel_tool_calls) == (3, 4, False)
    told = _made(top_logprobs=3)
    assert (told.logprobs, told.top_logprobs) == (True, 3)
    assert _made(include=["message.output_text.logprobs"]).logprobs
    harmless = _made(
        metadata={"a": "b"}, user="u", safety_identifier="s", prompt_cache_key="k", prompt_cache_retention="24h",
        service_tier="auto", store=False, truncation="disabled", background=False, conversation=None, prompt=None,
        include=[], stream=True, stream_options={"include_obfuscation": False}, reasoning={},
        text={"verbosity": "medium"},
    )  # fmt: skip
    assert harmless == _made()


def test_which_tool_is_called() -> None:
    other = {**TOOL, "name": "other"}
    for choice, wanted in (
        (None, "auto"),
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "other"}, Tool("other", "Of a city.", SCHEMA)),
    ):
        assert _made(tools=[TOOL, other], tool_choice=choice).tool_choice == wanted
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "other"}] * 2}
    made = _made(tools=[TOOL, other], tool_choice=allowed)
    assert (made.tools, made.tool_choice) == ((Tool("other", "Of a city.", SCHEMA),), "required")


def test_formats() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    for form, wanted in (
        ({"type": "text"}, None),
        ({"type": "json_object"}, Format("json_object")),
        (schema, Format("json_schema", SCHEMA)),
    ):
        assert _made(text={"format": form}).format == wanted


def test_effort_is_the_templates() -> None:
    harmony, switched = service("{{ reasoning_effort }}", thinks=True), service(SWITCHED, thinks=True)
    assert _made(harmony, reasoning={"effort": "low"}).variables == {"reasoning_effort": "low"}
    assert _made(switched, reasoning={"effort": "none"}).variables == {"enable_thinking": False}
    assert _made(reasoning={"effort": "none"}).variables == {}
    assert _refused(harmony, reasoning={"effort": "minimal"}).param == "reasoning.effort"
    assert _refused(switched, reasoning={"effort": "high"}).param == "reasoning.effort"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"reasoning": {"summary": "concise"}}, "reasoning.summary"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"tools": [{"type": "custom", "name": "a"}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice.type"),
        ({"input": []}, "input"),
        ({"input": ["Hi"]}, "input[0]"),
        ({"input": [{"id": "msg_1"}]}, "input[0].role"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0].type"),
        ({"input": [{**HI, "colour": "red"}]}, "input[0].colour"),
        ({"input": [{**HI, "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "reasoning", "encrypted_content": "gAAAA"}]}, "input[0].encrypted_content"),
        ({"input": [{**CALL, "arguments": "[1]"}]}, "input[0].arguments"),
        ({"input": [{**CALL, "arguments": '{"a": NaN}'}]}, "input[0].arguments"),
        ({"input": [{**CALL, "arguments": f'{{"a": {"[" * 100}{"]" * 100}}}'}]}, None),
        ({"input": [{**CALL, "arguments": f'{{"a": {"[" * 99999}'}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": "x"}]}, "input[0].call_id"),
    ],
)  # fmt: skip
def test_what_is_refused_by_name(fields: dict[str, Any], param: str | None) -> None:
    assert _refused(**fields).param == param


def test_what_is_not_stored_is_said() -> None:
    for fields in ({"store": True}, {"previous_response_id": "r"}, {"input": [{"type": "item_reference", "id": "m"}]}):
        assert "send the whole conversation" in _refused(**fields).message

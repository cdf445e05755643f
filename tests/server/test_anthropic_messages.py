"""Anthropic's conversations: what the chat template is given, and what is refused by name."""

import json
from typing import Any

import pytest
from support.interfaces import SWITCHED, refused, service

from kvant.server.anthropic import MessagesBody, messages_generation, shows_thinking
from kvant.server.body import decode
from kvant.server.errors import ApiError
from kvant.server.generation import Format, Generation, Tool

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}
OSLO = {"type": "tool_use", "id": "b", "name": "weather", "input": {"city": "Oslo"}}
THINKS = {"type": "enabled", "budget_tokens": 1024}


def _body(**fields: Any) -> MessagesBody:
    given = {"model": "pocket", "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}], **fields}
    return decode(json.dumps(given).encode(), MessagesBody)


def _made(on: Any = None, **fields: Any) -> Generation:
    return messages_generation(_body(**fields), service() if on is None else on)


def _refused(on: Any = None, **fields: Any) -> ApiError:
    return refused(lambda: _made(on, **fields))


def test_a_conversation_with_tools() -> None:
    made = _made(
        system=[
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "!"},
        ],
        tools=[{**TOOL, "strict": True, "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        messages=[
            {"role": "user", "content": "How is it in Rome?"},
            {"role": "user", "content": [{"type": "text", "text": "And in Oslo?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Two cities.", "signature": "kvant:"},
                    {"type": "text", "text": "I look.", "citations": None},
                    {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}},
                    {**OSLO, "caller": {"type": "direct"}, "cache_control": None},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "snow"}]},
                    {"type": "tool_result", "tool_use_id": "a", "content": "no net", "is_error": True},
                    {"type": "text", "text": "Well?"},
                ],
            },
        ],
    )  # fmt: skip
    calls = [
        {"id": "a", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}},
        {"id": "b", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}},
    ]
    assert made.messages == [
        {"role": "system", "content": "Be brief.\n!"},
        {"role": "user", "content": "How is it in Rome?\nAnd in Oslo?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Two cities.", "tool_calls": calls},
        {"role": "tool", "content": "snow", "tool_call_id": "b", "name": "weather"},
        {"role": "tool", "content": "Error: no net", "tool_call_id": "a", "name": "weather"},
        {"role": "user", "content": "Well?"},
    ]
    assert made.tools == (Tool("weather", "Of a city.", SCHEMA, strict=True),)


def test_thinking_that_the_client_did_not_see() -> None:
    def turns(signature: str) -> list[dict[str, Any]]:
        block = {"type": "thinking", "thinking": "", "signature": signature}
        said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [block]}]
        return [*said, {"role": "user", "content": "b"}]

    assert _made(messages=turns("kvant:c2VjcmV0")).messages[1]["reasoning_content"] == "secret"
    assert [message["role"] for message in _made(messages=turns("kvant:")).messages] == ["user"]
    for signature in ("ErUBCkYIBx", "kvant:?", "kvant:/w==", "kvant:é"):
        assert _refused(messages=turns(signature)).param == "messages[1].content[0].signature"


def test_how_texts_are_put_together() -> None:
    """As they are where a client cut a text, and on lines of their own where it sends paragraphs."""
    for texts, whole in (
        (["Be brief.", "Be kind."], "Be brief.\nBe kind."),
        (["Tell me", " a story", "", "\n", "now"], "Tell me a story\nnow"),
        (["", "a", ""], "a"),
        ([], ""),
    ):
        blocks = [{"type": "text", "text": text} for text in texts]
        made = _made(messages=[{"role": "user", "content": blocks or ""}])
        assert made.messages == [{"role": "user", "content": whole}]


def test_options() -> None:
    made = _made(max_tokens=7, temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["\n\n", "END"])
    assert (made.max_tokens, made.stop) == (7, ("\n\n", "END"))
    assert (made.sampling.temp, made.sampling.top_p, made.sampling.top_k) == (0.5, 0.9, 3)
    harmless = _made(
        metadata={"user_id": "u"}, service_tier="auto", cache_control={"type": "ephemeral"}, stream=True,
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    )  # fmt: skip
    assert harmless == _made()


def test_which_tool_is_called() -> None:
    other = {**TOOL, "name": "other"}
    for choice, wanted in (
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "other"}, Tool("other", "Of a city.", SCHEMA)),
    ):
        made = _made(tools=[TOOL, other], tool_choice=choice)
        assert (made.tool_choice, made.parallel_tool_calls) == (wanted, True)
    alone = _made(tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert not alone.parallel_tool_calls


def test_a_schema_of_the_answer() -> None:
    wanted = {"type": "json_schema", "schema": SCHEMA}
    assert _made(output_config={"format": wanted}).format == Format("json_schema", SCHEMA)
    assert _made(output_format=wanted).format == Format("json_schema", SCHEMA)
    assert _refused(output_config={"format": wanted}, output_format=wanted).param == "output_format"


def test_thinking_is_switched_by_the_template() -> None:
    switched, never, always = service(SWITCHED, thinks=True), service(), service(thinks=True)
    assert _made(always, thinking=THINKS, max_tokens=2000).thinking_budget == 1024
    for asked, on, told in (
        (THINKS, switched, {"enable_thinking": True}),
        ({"type": "disabled"}, switched, {"enable_thinking": False}),
        ({"type": "adaptive"}, switched, {}),
        ({"type": "disabled"}, never, {}),
        ({"type": "adaptive"}, never, {}),
        (THINKS, always, {}),
    ):
        assert _made(on, thinking=asked, max_tokens=2000).variables == told
    assert "does not think" in _refused(never, thinking=THINKS, max_tokens=2000).message
    assert "cannot switch its thinking off" in _refused(always, thinking={"type": "disabled"}).message


def test_effort_is_the_templates() -> None:
    harmony = service("{{ reasoning_effort }}", thinks=True)
    assert _made(harmony, output_config={"effort": "high"}).variables == {"reasoning_effort": "high"}
    assert _refused(harmony, output_config={"effort": "max"}).param == "output_config.effort"
    assert "knows no reasoning_effort" in _refused(output_config={"effort": "low"}).message


def test_whether_thinking_is_shown() -> None:
    assert shows_thinking(_body()) is shows_thinking(_body(thinking=THINKS)) is True
    for kind in (THINKS, {"type": "adaptive"}):
        assert shows_thinking(_body(thinking={**kind, "display": "summarized"}))
        assert not shows_thinking(_body(thinking={**kind, "display": "omitted"}))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 1.1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The"}]}, "messages"),
        ({"container": "c"}, "container"),
        ({"speed": "fast"}, "speed"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [{**TOOL, "input_examples": [{}]}]}, "tools[0].input_examples"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "name": "weather"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
    ],
)  # fmt: skip
def test_what_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert _refused(**fields).param == param


@pytest.mark.parametrize(
    ("role", "block"),
    [
        ("user", {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}),
        ("assistant", {"type": "redacted_thinking", "data": "x"}),
        ("user", {"type": "thinking", "thinking": "x", "signature": ""}),
        ("user", {"type": "tool_use", "id": "a", "name": "b", "input": {}}),
        ("assistant", {"type": "tool_result", "tool_use_id": "a"}),
    ],
)  # fmt: skip
def test_blocks_that_are_refused(role: str, block: dict[str, Any]) -> None:
    error = _refused(messages=[{"role": role, "content": [block]}, {"role": "user", "content": "?"}])
    assert (error.param or "").removesuffix(".type") == "messages[0].content[0]"
    assert repr(block["type"]) in error.message


def test_results_that_are_refused() -> None:
    asked = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "weather", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": {}}]}
    error = _refused(messages=[asked, {"role": "user", "content": [result]}])
    assert error.param == "messages[1].content[0].content[0].type"
    error = _refused(messages=[asked, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "b"}]}])
    assert error.param == "messages[1].content[0].tool_use_id"


def test_a_thread_is_refused_as_clients_understand_it() -> None:
    """With this code Anthropic's tool runner sends the whole conversation."""
    error = _refused(thread={"type": "create"})
    assert error.anthropic("req_1")["error"]["details"] == {"error_code": "thread_unsupported_request"}

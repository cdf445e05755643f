"""Anthropic's messages and OpenAI's items: what the chat template is given, and what is refused by name."""

import json
from dataclasses import replace
from typing import Any

import pytest
from support.interfaces import MESSAGES, RESPONSES, SWITCHED, Interface, refused, service

from kvant.server.anthropic import MessagesBody, messages_generation, shows_thinking
from kvant.server.body import decode
from kvant.server.errors import ApiError
from kvant.server.generation import Format, Generation, Tool
from kvant.server.left_out import LeftOut
from kvant.server.responses import INPUT, ResponsesBody, responses_generation
from kvant.text.tool_forms import QwenCoder

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}
FUNCTION = {"type": "function", "name": "weather", "description": "Of a city.", "parameters": SCHEMA}
TOOLS = {MESSAGES: [TOOL, {**TOOL, "name": "other"}], RESPONSES: [FUNCTION, {**FUNCTION, "name": "other"}]}
OTHER = Tool("other", "Of a city.", SCHEMA)
OSLO = {"type": "tool_use", "id": "b", "name": "weather", "input": {"city": "Oslo"}}
CALL = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"city": "Rome"}'}
HI = {"role": "user", "content": "Hi"}
THINKS = {"type": "enabled", "budget_tokens": 1024}
CACHED = {"cache_control": {"type": "ephemeral"}}


def _body(left_out: LeftOut | None = None, **fields: Any) -> MessagesBody:
    body = {"model": "pocket", "max_tokens": 8, "messages": [HI]} | fields
    return decode(json.dumps(body).encode(), MessagesBody, left_out)


def _made(to: Interface, on: Any = None, left_out: LeftOut | None = None, **fields: Any) -> Generation:
    """``left_out``: what is left out; None: nothing may be, as with --strict."""
    on, left_out = service() if on is None else on, left_out or LeftOut(strict=True)
    if to is MESSAGES:
        return messages_generation(_body(left_out, **fields), on, left_out)
    body = {"model": "pocket", "input": "Hi"} | fields
    return responses_generation(decode(json.dumps(body).encode(), ResponsesBody, left_out), on, left_out)


def _refused(to: Interface, on: Any = None, left_out: LeftOut | None = None, **fields: Any) -> ApiError:
    return refused(lambda: _made(to, on, left_out, **fields))


def _said(to: Interface, on: Any = None, **fields: Any) -> list[str]:
    """What is left out of a body."""
    left_out = LeftOut()
    _made(to, on, left_out, **fields)
    return [*left_out.names.values()]


def _call(name: str, city: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "weather", "arguments": {"city": city}}}


def test_messages_with_tools() -> None:
    said = [
        {"type": "thinking", "thinking": "Two cities.", "signature": "kvant:"},
        {"type": "text", "text": "I look.", "citations": None},
        {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}},
        {**OSLO, "caller": {"type": "direct"}, "cache_control": None},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "snow"}]},
        {"type": "tool_result", "tool_use_id": "a", "content": "no net", "is_error": True},
        {"type": "text", "text": "Well?"},
    ]
    made = _made(
        MESSAGES,
        system=[{"type": "text", "text": "Be brief.", **CACHED}, {"type": "text", "text": "!"}],
        tools=[{**TOOL, "strict": True, "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        messages=[
            {"role": "user", "content": "How is it in Rome?"},
            {"role": "user", "content": [{"type": "text", "text": "And in Oslo?"}]},
            {"role": "assistant", "content": said},
            {"role": "user", "content": results},
        ],
    )
    calls = [_call("a", "Rome"), _call("b", "Oslo")]
    assert made.messages == [
        {"role": "system", "content": "Be brief.\n!"},
        {"role": "user", "content": "How is it in Rome?\nAnd in Oslo?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Two cities.", "tool_calls": calls},
        {"role": "tool", "content": "snow", "tool_call_id": "b", "name": "weather"},
        {"role": "tool", "content": "Error: no net", "tool_call_id": "a", "name": "weather"},
        {"role": "user", "content": "Well?"},
    ]
    assert made.tools == (Tool("weather", "Of a city.", SCHEMA, strict=True),)


def test_items_with_tools() -> None:
    text = {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}
    made = _made(
        RESPONSES,
        instructions="Be brief.",
        tools=[{**FUNCTION, "strict": True}, {"type": "function", "name": "now", "parameters": None}],
        input=[
            {"role": "developer", "content": [{"type": "input_text", "text": "!"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": x} for x in "ab"]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "Hm."}],
            },
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [text]},
            {**CALL, "id": "fc_1", "status": "completed", "parsed_arguments": {"city": "Rome"}},
            {**CALL, "call_id": "b"},
            {"type": "function_call_output", "call_id": "b", "output": "sun", "id": "fco_1"},
            {
                "type": "function_call_output",
                "call_id": "a",
                "output": [{"type": "input_text", "text": "rain"}],
            },
            {"type": "message", "role": "assistant", "content": "Well."},
            HI,
        ],
    )
    calls = [_call("a", "Rome"), _call("b", "Rome")]
    assert made.messages == [
        {"role": "system", "content": "Be brief.\n!"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "sun", "tool_call_id": "b", "name": "weather"},
        {"role": "tool", "content": "rain", "tool_call_id": "a", "name": "weather"},
        {"role": "assistant", "content": "Well."},
        HI,
    ]
    assert made.tools == (Tool("weather", "Of a city.", SCHEMA, strict=True), Tool("now"))
    assert (made.tool_choice, made.parallel_tool_calls) == ("auto", True)


@pytest.mark.parametrize(
    "kept",
    [
        {"type": "thinking", "thinking": "", "signature": "kvant:c2VjcmV0"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "secret"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "secret"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}],
         "encrypted_content": "kvant:c2VjcmV0"},
        {"type": "reasoning", "encrypted_content": "kvant:c2VjcmV0", "content": []},
    ],
)  # fmt: skip
def test_thinking_comes_back(kept: dict[str, Any]) -> None:
    if kept["type"] == "thinking":
        made = _made(MESSAGES, messages=[HI, {"role": "assistant", "content": [kept]}, HI])
    else:
        made = _made(RESPONSES, input=[HI, {"id": "rs_1", **kept}, HI])
    assert made.messages[1] == {"role": "assistant", "content": "", "reasoning_content": "secret"}


def test_how_texts_are_put_together() -> None:
    for texts, whole in (
        (["Be brief.", "Be kind."], "Be brief.\nBe kind."),
        (["Tell me", " a story", "", "\n", "now"], "Tell me a story\nnow"),
        (["", "a", ""], "a"),
        ([], ""),
    ):
        blocks = [{"type": "text", "text": text} for text in texts]
        made = _made(MESSAGES, messages=[{"role": "user", "content": blocks or ""}])
        assert made.messages == [{"role": "user", "content": whole}]
    nothing = {"type": "thinking", "thinking": "", "signature": "kvant:"}
    made = _made(MESSAGES, messages=[HI, {"role": "assistant", "content": [nothing]}, HI])
    assert made.messages == [{"role": "user", "content": "Hi\nHi"}]


def test_options() -> None:
    made = _made(MESSAGES, max_tokens=7, temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["\n\n", "END"])
    assert (made.max_tokens, made.stop) == (7, ("\n\n", "END"))
    assert (made.sampling.temp, made.sampling.top_p, made.sampling.top_k) == (0.5, 0.9, 3)
    made = _made(
        RESPONSES, max_output_tokens=7, temperature=1.5, top_p=0.9, top_k=3, seed=4, parallel_tool_calls=False
    )
    assert (made.max_tokens, made.sampling.temp, made.sampling.top_p) == (7, 1.5, 0.9)
    assert (made.sampling.top_k, made.sampling.seed, made.parallel_tool_calls) == (3, 4, False)
    told = _made(RESPONSES, top_logprobs=3)
    assert (told.logprobs, told.top_logprobs) == (True, 3)
    assert _made(RESPONSES, include=["message.output_text.logprobs"]).logprobs
    assert _made(MESSAGES) == _made(
        MESSAGES, metadata={"user_id": "u"}, service_tier="auto", stream=True, **CACHED,
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    )  # fmt: skip
    assert _made(RESPONSES) == _made(
        RESPONSES, metadata={"a": "b"}, user="u", safety_identifier="s", prompt_cache_key="k", reasoning={},
        service_tier="auto", store=False, truncation="disabled", background=False, conversation=None, prompt=None,
        include=[], stream=True, client_metadata={"turn_id": "t"}, text={"verbosity": "medium"},
        prompt_cache_retention="24h",
    )  # fmt: skip


def test_which_tool_is_called() -> None:
    words = {"auto": "auto", "any": "required", "none": "none"}
    cases: list[tuple[Interface, Any, Any]] = [
        (MESSAGES, {"type": word}, wanted) for word, wanted in words.items()
    ]
    cases += [(RESPONSES, word, word or "auto") for word in (None, "auto", "none", "required")]
    cases += [(MESSAGES, {"type": "tool", "name": "other"}, OTHER)]
    cases += [(RESPONSES, {"type": "function", "name": "other"}, OTHER)]
    for to, choice, wanted in cases:
        made = _made(to, tools=TOOLS[to], tool_choice=choice)
        assert (made.tool_choice, made.parallel_tool_calls) == (wanted, True)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert not _made(MESSAGES, tools=[TOOL], tool_choice=choice).parallel_tool_calls
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "other"}] * 2,
    }
    made = _made(RESPONSES, tools=TOOLS[RESPONSES], tool_choice=allowed)
    assert (made.tools, made.tool_choice) == ((OTHER,), "required")


def test_formats() -> None:
    wanted = {"type": "json_schema", "schema": SCHEMA}
    for fields in ({"output_config": {"format": wanted}}, {"output_format": wanted}):
        assert _made(MESSAGES, **fields).format == Format("json_schema", SCHEMA)
    assert _refused(MESSAGES, output_config={"format": wanted}, output_format=wanted).param == "output_format"
    for form, format_ in (
        ({"type": "text"}, None),
        ({"type": "json_object"}, Format("json_object")),
        (wanted | {"name": "n", "strict": True}, Format("json_schema", SCHEMA)),
    ):
        assert _made(RESPONSES, text={"format": form}).format == format_


def test_thinking_is_switched_by_the_template() -> None:
    switched, never, always = service(SWITCHED, thinks=True), service(), service(thinks=True)
    assert _made(MESSAGES, always, thinking=THINKS, max_tokens=2000).thinking_budget == 1024
    for asked, on, told in (
        (THINKS, switched, {"enable_thinking": True}),
        ({"type": "disabled"}, switched, {"enable_thinking": False}),
        ({"type": "adaptive"}, switched, {}),
        ({"type": "disabled"}, never, {}),
        ({"type": "adaptive"}, never, {}),
        (THINKS, always, {}),
    ):
        assert _made(MESSAGES, on, thinking=asked, max_tokens=2000).variables == told
    no_budget = "thinking.budget_tokens 1024"
    assert _said(MESSAGES, never, thinking=THINKS, max_tokens=2000) == [no_budget, "thinking on"]
    assert _said(MESSAGES, service(SWITCHED), thinking=THINKS, max_tokens=2000) == [no_budget]
    assert _made(MESSAGES, never, LeftOut(), thinking=THINKS, max_tokens=2000).thinking_budget is None
    in_words, several_tokens = service("{{ messages }}<think>"), service(thinks=True)  # as Olmo 3 and Gemma 4
    several_tokens.tokenizer.convert_tokens_to_ids = never.tokenizer.convert_tokens_to_ids
    for on in (in_words, several_tokens):
        assert _said(MESSAGES, on, thinking=THINKS, max_tokens=2000) == [no_budget]
        assert _made(MESSAGES, on, LeftOut(), thinking=THINKS, max_tokens=2000).thinking_budget is None
    assert _said(MESSAGES, always, thinking={"type": "disabled"}) == ["thinking off"]
    assert _said(RESPONSES, always, reasoning={"effort": "none"}) == ["reasoning.effort off"]


def test_effort_is_the_templates() -> None:
    harmony, switched = service("{{ reasoning_effort }}", thinks=True), service(SWITCHED, thinks=True)
    nearest = {
        "minimal": "low",
        "low": "low",
        "medium": "medium",
        "high": "high",
        "xhigh": "high",
        "max": "high",
    }
    for effort, level in nearest.items():
        told = {"reasoning_effort": level}
        assert _made(MESSAGES, harmony, output_config={"effort": effort}).variables == told
        assert _made(RESPONSES, harmony, reasoning={"effort": effort}).variables == told
    assert _said(MESSAGES, output_config={"effort": "low"}) == ["output_config.effort low"]
    assert _said(RESPONSES, harmony, reasoning={"effort": "much"}) == ["reasoning.effort much"]
    assert _made(RESPONSES, harmony, reasoning={"effort": "low"}).variables == {"reasoning_effort": "low"}
    assert _made(RESPONSES, switched, reasoning={"effort": "none"}).variables == {"enable_thinking": False}
    assert _made(RESPONSES, reasoning={"effort": "none"}).variables == {}
    assert _refused(RESPONSES, switched, reasoning={"effort": "high"}).param == "reasoning.effort"  # --strict


def test_whether_thinking_is_shown() -> None:
    assert shows_thinking(_body()) is shows_thinking(_body(thinking=THINKS)) is True
    for kind in (THINKS, {"type": "adaptive"}):
        assert shows_thinking(_body(thinking={**kind, "display": "summarized"}))
        assert not shows_thinking(_body(thinking={**kind, "display": "omitted"}))


REFUSED: list[tuple[dict[str, Any], str | None]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"temperature": 1.1}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"messages": []}, "messages"),
    ({"messages": [HI, {"role": "assistant", "content": "The"}]}, "messages"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "auto", "name": "weather"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
]
REFUSED_ITEMS: list[tuple[dict[str, Any], str | None]] = [
    ({"background": True}, "background"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar"}}]}, "tools[0].format.syntax"),
    ({"tools": [{"name": "a"}]}, "tools[0].type"),
    ({"tools": [FUNCTION, FUNCTION]}, "tools[1].name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
    ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice.type"),
    ({"input": []}, "input"),
    ({"input": ["Hi"]}, "input[0]"),
    ({"input": [{"id": "msg_1"}]}, "input[0].role"),
    ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0]"),
    ({"input": [{**HI, "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{**CALL, "arguments": "[1]"}]}, "input[0].arguments"),
    ({"input": [{**CALL, "arguments": '{"a": NaN}'}]}, "input[0].arguments"),
    ({"input": [{**CALL, "arguments": f'{{"a": {"[" * 100}{"]" * 100}}}'}]}, None),
    ({"input": [{**CALL, "arguments": f'{{"a": {"[" * 99999}'}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "a", "output": "x"}]}, "input[0].call_id"),
]


@pytest.mark.parametrize(
    ("to", "fields", "param"),
    [(to, *case) for to, cases in ((MESSAGES, REFUSED), (RESPONSES, REFUSED_ITEMS)) for case in cases],
)
def test_what_is_refused_by_name(to: Interface, fields: dict[str, Any], param: str | None) -> None:
    """With --strict. Without it what is in LEFT_OUT is left out."""
    assert _refused(to, **fields).param == param


FOREIGN = {"type": "thinking", "thinking": "", "signature": "ErUBCkYIBx"}
SEARCHED = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
LEFT_OUT: list[tuple[Interface, dict[str, Any], list[str]]] = [
    (MESSAGES, {"metadata": {"user_id": "u", "trace": "t"}}, ["metadata.trace"]),
    (MESSAGES, {"container": "c", "speed": "fast"}, ["container", "speed"]),
    (MESSAGES, {"service_tier": "batch"}, ["service_tier batch"]),
    (MESSAGES, {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
     ["context_management.edits[0] clear_tool_uses_20250919"]),
    (MESSAGES, {"tools": [TOOL, SEARCH, SEARCH]}, ["tools[1] web_search_20250305"]),
    (MESSAGES, {"tools": [{**TOOL, "defer_loading": True, "input_examples": [{}]}]},
     ["tools[0].input_examples", "tools[0].defer_loading"]),
    (MESSAGES, {"messages": [{**HI, "id": "m"}, {**HI, "id": "n"}]}, ["messages[0].id"]),
    (MESSAGES, {"messages": [HI, {"role": "assistant", "content": [FOREIGN, SEARCHED]}, HI]},
     ["messages[1].content[0].signature", "messages[1].content[1] server_tool_use"]),
    (MESSAGES, {"system": [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2; v=1c0;"}]},
     ["system[0] x-anthropic-billing-header:"]),
    (RESPONSES, {"truncation": "auto", "max_tool_calls": 1, "store": True},
     ["truncation auto", "max_tool_calls", "store True"]),
    (RESPONSES, {"include": ["file_search_call.results"]}, ["include[0] file_search_call.results"]),
    (RESPONSES, {"reasoning": {"summary": "concise"}, "text": {"verbosity": "low"}},
     ["reasoning.summary concise", "text.verbosity low"]),
    (RESPONSES, {"tools": [FUNCTION, {"type": "web_search"}, {"type": "image_generation"}]},
     ["tools[1] web_search", "tools[2] image_generation"]),
    (RESPONSES, {"input": [{"type": "compaction", "encrypted_content": "x"}, {**HI, "colour": "red"}]},
     ["input[0] compaction", "input[1].colour"]),
    (RESPONSES, {"input": [{"type": "reasoning", "encrypted_content": "gAAAA"}, HI]}, ["input[0].encrypted_content"]),
]  # fmt: skip


@pytest.mark.parametrize(("to", "fields", "said"), LEFT_OUT)
def test_what_is_left_out_and_said(to: Interface, fields: dict[str, Any], said: list[str]) -> None:
    """The rest is what it is without it, and with --strict it is refused."""
    assert _said(to, **fields) == said
    assert _refused(to, **fields).param == said[0].partition(" ")[0]
    (message,) = {json.dumps(each) for each in _made(to, left_out=LeftOut(), **fields).messages or ()}
    assert json.loads(message)["content"] in ("Hi", "Hi\nHi")


def test_a_namespaces_functions_are_tools() -> None:
    space = {"type": "namespace", "name": "agents", "description": "d", "tools": [FUNCTION, {"type": "mcp"}]}
    left_out = LeftOut()
    made = _made(RESPONSES, left_out=left_out, tools=[space, FUNCTION], input=[
        HI, {**CALL, "namespace": "agents"}, {"type": "function_call_output", "call_id": "a", "output": "sun"},
    ])  # fmt: skip
    assert [tool.name for tool in made.tools] == ["agents__weather", "weather"]
    assert made.messages is not None
    assert (
        made.messages[1]["tool_calls"][0]["function"]["name"] == made.messages[2]["name"] == "agents__weather"
    )
    assert [*left_out.names.values()] == ["tools[0].tools[1] mcp"]


def test_tools_in_the_input_are_tools() -> None:
    """Codex sends these to models it knows as new, and no others. The same tools in ``tools`` are the
    reference.
    """
    custom = {"type": "custom", "name": "exec", "description": "Runs JavaScript."}
    given = [
        {"type": "namespace", "name": "functions", "description": "", "tools": [custom, FUNCTION]},
        FUNCTION,
    ]
    item = {
        "type": "additional_tools",
        "id": "at_1",
        "role": "developer",
        "tools": [*given, {"type": "web_search"}],
    }
    answer = {"type": "custom_tool_call_output", "call_id": "a", "output": "1"}
    call = {
        "type": "custom_tool_call",
        "call_id": "a",
        "namespace": "functions",
        "name": "exec",
        "input": "text(1)",
    }
    left_out = LeftOut()
    made = _made(RESPONSES, left_out=left_out, input=[item, HI, call, answer])
    usual = _made(RESPONSES, tools=given, input=[HI, call, answer])
    assert [tool.name for tool in made.tools] == ["functions__exec", "functions__weather", "weather"]
    assert (made.tools, made.messages) == (usual.tools, usual.messages)
    assert [*left_out.names.values()] == ["input[0].tools[2] web_search"]
    named = {"type": "function", "name": "weather"}
    assert (
        _made(RESPONSES, input=[item | {"tools": given}, HI], tool_choice=named).tool_choice == made.tools[2]
    )


def test_a_tool_in_the_input_replaces_an_earlier_one_of_its_name() -> None:
    """It keeps its place: what is fed before it stays the same."""
    item = {"type": "additional_tools", "role": "developer"}
    other, newer = {**FUNCTION, "name": "other"}, {**FUNCTION, "description": "The newer one."}
    given = {
        "tools": [FUNCTION, other],
        "input": [HI, {**item, "tools": [newer]}, {**item, "tools": [newer]}, HI],
    }
    first, second = _made(RESPONSES, **given).tools
    assert (first.name, first.description, second.name) == ("weather", "The newer one.", "other")
    twice = {"input": [HI, {**item, "tools": [other, other]}]}
    assert _refused(RESPONSES, **twice).param == "input[1].tools[1].name"
    assert _refused(RESPONSES, input=[HI, {**item, "role": "user", "tools": []}]).param == "input[1].role"
    many = [{**FUNCTION, "name": f"f{at}"} for at in range(600)]
    more = [{**FUNCTION, "name": f"g{at}"} for at in range(600)]
    assert _refused(RESPONSES, tools=many, input=[HI, {**item, "tools": more}]).param == "tools"


SEARCH_TOOL = {
    "type": "tool_search",
    "execution": "client",
    "description": "Finds tools.",
    "parameters": {"a": 1},
}
SEARCHES = {"type": "tool_search_call", "call_id": "s", "execution": "client", "arguments": {"query": "sky"}}
FOUND = {"type": "tool_search_output", "call_id": "s", "execution": "client"}
LATER = {**FUNCTION, "name": "later", "defer_loading": True}


def test_a_search_for_tools_that_the_client_does() -> None:
    """The model knows it as a function. What it found can be called, and its result shows it."""
    space = {"type": "namespace", "name": "x", "description": "", "tools": [LATER]}
    left_out = LeftOut()
    made = _made(RESPONSES, left_out=left_out, tools=[FUNCTION, SEARCH_TOOL], input=[
        HI, SEARCHES, {**FOUND, "tools": [space, {"type": "mcp"}]}, {**CALL, "name": "later", "namespace": "x"},
    ])  # fmt: skip
    search = Tool("tool_search", "Finds tools.", {"a": 1}, search=True)
    later = replace(made.tools[0], name="x__later", namespace="x", deferred=True)
    assert made.tools[1:] == (search, later)
    assert [*left_out.names.values()] == ["input[2].tools[1] mcp"]
    assert made.messages is not None
    call, result = made.messages[1]["tool_calls"][0]["function"], made.messages[2]
    assert (call, result["name"]) == ({"name": "tool_search", "arguments": {"query": "sky"}}, "tool_search")
    shown = json.loads(result["content"].removeprefix("<function>").removesuffix("</function>"))
    assert (shown["name"], shown["parameters"]) == ("x__later", FUNCTION["parameters"])
    none = _made(RESPONSES, input=[HI, SEARCHES, {**FOUND, "tools": []}]).messages
    assert none is not None
    assert "No tools" in none[2]["content"]


def test_searches_that_openais_server_does_are_left_out() -> None:
    """What one found in an earlier turn can be called all the same."""
    hosted = {"type": "tool_search"}
    earlier = [{**SEARCHES, "call_id": None}, {**FOUND, "call_id": None, "tools": [FUNCTION]}]
    left_out = LeftOut()
    made = _made(RESPONSES, left_out=left_out, tools=[LATER, hosted], input=[HI, *earlier])
    assert [(tool.name, tool.deferred) for tool in made.tools] == [("later", False), ("weather", False)]
    assert [*left_out.names.values()] == [
        "tools[0].defer_loading", "tools[1] tool_search", "input[1] tool_search_call",
    ]  # fmt: skip
    assert made.messages == [HI]


def test_a_tool_that_was_found_is_shown_where_it_was_found() -> None:
    """Twice found, or sent from the beginning, it keeps its first place: what was read of a prompt can be
    shared.
    """
    again = [HI, SEARCHES, {**FOUND, "tools": [LATER]}, {**SEARCHES, "call_id": "t"}]
    again.append({**FOUND, "call_id": "t", "tools": [LATER, FUNCTION]})
    made = _made(RESPONSES, tools=[FUNCTION, SEARCH_TOOL], input=again)
    assert [(tool.name, tool.deferred) for tool in made.tools] == [
        ("weather", False), ("tool_search", False), ("later", True),
    ]  # fmt: skip
    assert made.messages is not None
    assert made.messages[-1]["content"].count("<function>") == 2


def test_a_reference_to_a_tool_shows_it() -> None:
    """As Claude Code's ToolSearch answers. A text of many references does not show a tool as often."""
    reference = {"type": "tool_reference", "tool_name": "later"}
    tools = [
        TOOL,
        {**TOOL, "name": "later", "defer_loading": True},
        {**TOOL, "name": "other", "defer_loading": True},
    ]
    result = {
        "type": "tool_result",
        "tool_use_id": "b",
        "content": [reference, reference, {"type": "text", "text": "x"}],
    }
    left_out = LeftOut()
    made = _made(MESSAGES, left_out=left_out, tools=tools, messages=[
        HI, {"role": "assistant", "content": [OSLO]}, {"role": "user", "content": [result]},
    ])  # fmt: skip
    assert [(tool.name, tool.deferred) for tool in made.tools] == [
        ("weather", False), ("later", True), ("other", False),
    ]  # fmt: skip
    assert [*left_out.names.values()] == ["tools[2].defer_loading"]
    assert made.messages is not None
    shown, again, text = made.messages[-1]["content"].split("\n")
    told = json.loads(shown.removeprefix("<function>").removesuffix("</function>"))
    assert (told["name"], told["parameters"]) == ("later", TOOL["input_schema"])
    assert "later" in again
    assert text == "x"


def test_results_that_are_no_text_become_notes() -> None:
    picture = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    plain = {"type": "text", "media_type": "text/plain", "data": "Rain."}
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": "Look:"},
        {"type": "image", "source": picture},
        {"type": "document", "source": plain, "title": "Sky"},
        {"type": "document", "source": picture},
    ]
    read = "Look:\n[a picture is not shown to this model, which reads text]\nSky\nRain."
    last = "[a part of the type document is not shown to this model, which reads text]"
    result = {"type": "tool_result", "tool_use_id": "b", "content": parts}
    made = _made(
        MESSAGES,
        messages=[HI, {"role": "assistant", "content": [OSLO]}, {"role": "user", "content": [result]}],
    )
    assert made.messages is not None
    assert made.messages[-1]["content"] == f"{read}\n{last}"
    made = _made(MESSAGES, messages=[{"role": "user", "content": [parts[2]]}])
    assert made.messages == [{"role": "user", "content": "Sky\nRain."}]
    shown = [{"type": "input_text", "text": "Look:"}, {"type": "input_image", "image_url": "data:"}]
    made = _made(
        RESPONSES, input=[HI, CALL, {"type": "function_call_output", "call_id": "a", "output": shown}]
    )
    assert made.messages is not None
    assert made.messages[-1]["content"] == read.partition("\nSky")[0]
    for to, fields in (
        (MESSAGES, {"messages": [{"role": "user", "content": [parts[3]]}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": [parts[1]]}]}),
        (RESPONSES, {"input": [{"role": "user", "content": shown}]}),
    ):
        assert "expected" in _refused(to, left_out=LeftOut(), **fields).message


def test_tools_that_take_text() -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    patch = {"type": "custom", "name": "patch", "description": "Edits.", "format": form}
    expression = {**patch, "format": {**form, "syntax": "regex", "definition": r"a/\/b"}}
    space = {
        "type": "namespace",
        "name": "x",
        "tools": [{"type": "custom", "name": "say", "format": {"type": "text"}}],
    }
    choice = {"type": "custom", "name": "patch"}
    said = "Edits.\n\nThe input is text that follows this grammar"
    for given, told, grammar in (
        (patch, f'{said} (lark):\nstart: "a"', 'start: "a"'),
        (expression, f"{said} (regex):\na/\\/b", r"start: /a\/\/b/"),
    ):
        made = _made(RESPONSES, tools=[given, space], tool_choice=choice)
        assert made.tools[0] == Tool("patch", told, INPUT, strict=True, custom=True, grammar=grammar)
        assert made.tools[1] == Tool("x__say", "", INPUT, custom=True, namespace="x")
        assert made.tool_choice == made.tools[0]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [choice]}
    assert [tool.name for tool in _made(RESPONSES, tools=[patch, space], tool_choice=allowed).tools] == [
        "patch"
    ]
    xml = service(form=QwenCoder())
    left_out = LeftOut()
    made = _made(RESPONSES, xml, left_out, tools=[patch])
    assert ([*left_out.names.values()], made.tools[0].strict) == (["tools[0].format lark"], False)


def test_custom_calls_come_back() -> None:
    call = {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": "*** Begin"}
    made = _made(
        RESPONSES, input=[HI, call, {"type": "custom_tool_call_output", "call_id": "a", "output": "done"}]
    )
    function = {"name": "patch", "arguments": {"input": "*** Begin"}}
    assert made.messages == [
        HI,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "done", "tool_call_id": "a", "name": "patch"},
    ]


@pytest.mark.parametrize(
    ("role", "block", "place"),
    [
        ("user", {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}, ".type"),
        ("assistant", {"type": "redacted_thinking", "data": "x"}, ""),
        ("user", {"type": "thinking", "thinking": "x", "signature": ""}, ""),
        ("user", {"type": "tool_use", "id": "a", "name": "b", "input": {}}, ""),
        ("assistant", {"type": "tool_result", "tool_use_id": "a"}, ""),
        *[("assistant", {"type": "thinking", "thinking": "", "signature": signature}, ".signature")
          for signature in ("ErUBCkYIBx", "kvant:?", "kvant:/w==", "kvant:é")],
        ("user", {"type": "tool_result", "tool_use_id": "b"}, ".tool_use_id"),
        ("user", {"type": "tool_result", "tool_use_id": "a", "content": [{"text": "y"}]}, ".content[0].type"),
    ],
)  # fmt: skip
def test_blocks_that_are_refused(role: str, block: dict[str, Any], place: str) -> None:
    called = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
    error = _refused(
        MESSAGES,
        messages=[{"role": "assistant", "content": [called]}, {"role": role, "content": [block]}, HI],
    )
    assert error.param == f"messages[1].content[0]{place}"
    assert place not in ("", ".type") or repr(block["type"]) in error.message


def test_what_is_not_stored_is_said_and_what_is_expected() -> None:
    message = _refused(RESPONSES, tool_choice={"type": "mcp"}).message
    assert message.endswith(
        '\'mcp\' - at `$.tool_choice.type`; expected "function" or "custom" or "allowed_tools"'
    )
    for fields in ({"previous_response_id": "r"}, {"input": [{"type": "item_reference", "id": "m"}]}):
        assert "send the whole conversation" in _refused(RESPONSES, left_out=LeftOut(), **fields).message
    # With this code Anthropic's tool runner sends the whole conversation.
    error = _refused(MESSAGES, left_out=LeftOut(), thread={"type": "create"})
    assert error.anthropic("req_1")["error"]["details"] == {"error_code": "thread_unsupported_request"}

"""What a chat template is given, by services whose templates differ from pocket's."""

import copy
import json
from types import SimpleNamespace
from typing import Any

import pytest

from kvant.models import Decoder
from kvant.server.answering import read_prompt
from kvant.server.body import decode
from kvant.server.errors import ApiError
from kvant.server.openai import ChatBody, chat_generation
from kvant.server.settings import Settings
from kvant.text.tool_forms import Mistral, tool_format

Pocket = tuple[Decoder, Any]
ASKED: Any = [{"role": "user", "content": "Hi"}]
LOOK = {"type": "function", "function": {"name": "look", "arguments": '{"at": [1, "é"]}'}, "id": "call_1"}
RESULT = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
CALLED: Any = [
    {"role": "assistant", "tool_calls": [LOOK], "reasoning_content": "hm"},
    {"role": "tool", "tool_call_id": "call_1", "content": RESULT},
]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "d"}}]


def service_of(pocket: Pocket, template: str, form: Any = None, **settings: Any) -> Any:
    """What is asked of a service to read a prompt."""
    tokenizer = copy.copy(pocket[1])
    tokenizer.chat_template = template
    found = Settings(**settings)
    return SimpleNamespace(
        model=pocket[0], tokenizer=tokenizer, tool_format=form, settings=found, check_length=lambda text: None
    )


def prompt_of(service: Any, messages: Any = ASKED, **fields: Any) -> str:
    body = json.dumps({"model": "m", "messages": messages, **fields}).encode()
    return str(read_prompt(service, chat_generation(decode(body, ChatBody), service)).text)


def test_messages_reach_the_template_whole(pocket: Pocket) -> None:
    service = service_of(pocket, "[{{ messages | tojson }}, {{ tools | tojson }}]", tool_format(pocket[1]))
    (called, result), (tool,) = json.loads(prompt_of(service, CALLED, tools=TOOLS))
    assert called["tool_calls"][0]["function"] == {"name": "look", "arguments": {"at": [1, "é"]}}
    assert called["reasoning_content"] == "hm"
    assert result == {"role": "tool", "name": "look", "tool_call_id": "call_1", "content": "a\nb"}
    shown = {"name": "look", "description": "d", "parameters": {"type": "object", "properties": {}}}
    assert tool == {"type": "function", "function": shown}


def test_ids_of_calls_are_as_the_template_wants_them(pocket: Pocket) -> None:
    template = "{% for m in messages %}{{ m.tool_calls[0].id if m.tool_calls else m.tool_call_id }} {% endfor %}"
    mistral = service_of(pocket, template, Mistral())
    first, second = prompt_of(mistral, CALLED).split()
    assert first == second
    assert (len(first), first.isalnum()) == (9, True)
    kept = json.loads(json.dumps(CALLED).replace("call_1", "abcdeFGH9"))
    assert prompt_of(mistral, kept).split() == ["abcdeFGH9"] * 2
    assert prompt_of(service_of(pocket, template, tool_format(pocket[1])), CALLED).split() == ["call_1"] * 2


def test_a_template_without_tools_refuses_them(pocket: Pocket) -> None:
    service = service_of(pocket, "{{ messages[0].content }}x")
    for messages, fields, param in ((ASKED, {"tools": TOOLS}, "tools"), (CALLED, {}, "messages[0]")):
        with pytest.raises(ApiError, match="takes no tools") as raised:
            prompt_of(service, messages, **fields)
        assert raised.value.param == param
    assert prompt_of(service, tools=TOOLS, tool_choice="none") == "Hix"  # none are shown


def test_variables_of_the_template(pocket: Pocket) -> None:
    service = service_of(pocket, "{{ mood }} {{ reasoning_effort }}", template_variables={"mood": "calm"})
    assert prompt_of(service) == "calm "
    assert prompt_of(service, chat_template_kwargs={"mood": "wild"}) == "wild "
    assert prompt_of(service, reasoning_effort="low") == "calm low"
    with pytest.raises(ApiError, match="both set reasoning_effort"):
        prompt_of(service, reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})
    switch = service_of(pocket, "{{ 'off' if enable_thinking is false else 'on' }}")
    assert prompt_of(switch, reasoning_effort="none") == "off"
    with pytest.raises(ApiError, match="knows no reasoning_effort"):
        prompt_of(switch, reasoning_effort="high")


def test_a_template_that_fails(pocket: Pocket) -> None:
    with pytest.raises(ApiError, match="no two of a role") as raised:
        prompt_of(service_of(pocket, "{{ raise_exception('no two of a role') }}"))
    assert (raised.value.status, raised.value.param) == (400, "messages")

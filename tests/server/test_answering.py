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
FIRST = '{"model": "m", "messages": '
ASKED = '[{"role": "user", "content": "Hi"}]'
LOOK = '{"type": "function", "function": {"name": "look", "arguments": "{\\"at\\": [1, \\"é\\"]}"}, "id": "call_1"}'
RESULT = '[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]'
CALLED = f'[{{"role": "assistant", "tool_calls": [{LOOK}], "reasoning_content": "hm"}}, '
CALLED += f'{{"role": "tool", "tool_call_id": "call_1", "content": {RESULT}}}]'
TOOLS = '"tools": [{"type": "function", "function": {"name": "look", "description": "d"}}]'


def service_of(pocket: Pocket, template: str, form: Any = None, **settings: Any) -> Any:
    """What is asked of a service to read a prompt."""
    tokenizer = copy.copy(pocket[1])
    tokenizer.chat_template = template
    found = Settings(**settings)
    return SimpleNamespace(
        model=pocket[0], tokenizer=tokenizer, tool_format=form, settings=found, check_length=lambda text: None
    )


def prompt_of(service: Any, body: str) -> str:
    generation = chat_generation(decode(body.encode(), ChatBody), service)
    return str(read_prompt(service, generation).text)


def test_messages_reach_the_template_whole(pocket: Pocket) -> None:
    service = service_of(pocket, "[{{ messages | tojson }}, {{ tools | tojson }}]", tool_format(pocket[1]))
    (called, result), (tool,) = json.loads(prompt_of(service, FIRST + CALLED + ", " + TOOLS + "}"))
    assert called["tool_calls"][0]["function"] == {"name": "look", "arguments": {"at": [1, "é"]}}
    assert called["reasoning_content"] == "hm"
    assert result == {"role": "tool", "name": "look", "tool_call_id": "call_1", "content": "a\nb"}
    shown = {"name": "look", "description": "d", "parameters": {"type": "object", "properties": {}}}
    assert tool == {"type": "function", "function": shown}


def test_ids_of_calls_are_as_the_template_wants_them(pocket: Pocket) -> None:
    template = "{% for m in messages %}{{ m.tool_calls[0].id if m.tool_calls else m.tool_call_id }} {% endfor %}"
    first, second = prompt_of(service_of(pocket, template, Mistral()), FIRST + CALLED + "}").split()
    assert first == second
    assert len(first) == 9
    assert first.isalnum()
    kept = (FIRST + CALLED + "}").replace("call_1", "abcdeFGH9")
    assert prompt_of(service_of(pocket, template, Mistral()), kept).split() == ["abcdeFGH9"] * 2
    hermes = tool_format(pocket[1])
    assert prompt_of(service_of(pocket, template, hermes), FIRST + CALLED + "}").split() == ["call_1"] * 2


def test_a_template_without_tools_refuses_them(pocket: Pocket) -> None:
    service = service_of(pocket, "{{ messages[0].content }}x")
    for body, param in [(FIRST + ASKED + ", " + TOOLS + "}", "tools"), (FIRST + CALLED + "}", "messages[0]")]:
        with pytest.raises(ApiError, match="the model's chat template takes no tools") as raised:
            prompt_of(service, body)
        assert raised.value.param == param
    # Where none may be called, none are shown.
    assert prompt_of(service, FIRST + ASKED + ", " + TOOLS + ', "tool_choice": "none"}') == "Hix"


def test_variables_of_the_template(pocket: Pocket) -> None:
    service = service_of(pocket, "{{ mood }} {{ reasoning_effort }}", template_variables={"mood": "calm"})
    assert prompt_of(service, FIRST + ASKED + "}") == "calm "
    assert prompt_of(service, FIRST + ASKED + ', "chat_template_kwargs": {"mood": "wild"}}') == "wild "
    assert prompt_of(service, FIRST + ASKED + ', "reasoning_effort": "low"}') == "calm low"
    both = ', "reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}'
    with pytest.raises(ApiError, match="both set reasoning_effort; expected one of them"):
        prompt_of(service, FIRST + ASKED + both)
    switch = service_of(pocket, "{{ 'off' if enable_thinking is false else 'on' }}")
    assert prompt_of(switch, FIRST + ASKED + ', "reasoning_effort": "none"}') == "off"
    with pytest.raises(ApiError, match="knows no reasoning_effort"):
        prompt_of(switch, FIRST + ASKED + ', "reasoning_effort": "high"}')


def test_a_template_that_fails(pocket: Pocket) -> None:
    with pytest.raises(ApiError, match="the chat template failed: no two of a role") as raised:
        prompt_of(service_of(pocket, "{{ raise_exception('no two of a role') }}"), FIRST + ASKED + "}")
    assert (raised.value.status, raised.value.param) == (400, "messages")

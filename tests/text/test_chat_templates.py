"""Conversations through templates in the manner of the published families, by kvant and by transformers.

The templates are written for this test: shorter, with the constructs that the published ones have.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from support.tokenizers_made import write_tokenizer
from transformers import AutoTokenizer

from kvant.text.tokenizer import Tokenizer, load_tokenizer

QWEN2 = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- else %}{{- 'Be of help.' }}{%- endif %}
    {{- "\\n\\n# Functions\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nBe of help.<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

QWEN3 = """
{%- macro content_of(content, marks=true) %}
    {%- if content is string %}{{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for part in content %}
            {%- if 'image' in part or part.type == 'image' %}{{- '<image>' if marks else '' }}
            {%- elif 'text' in part %}{{- part.text }}
            {%- else %}{{- raise_exception('what is a ' ~ part.type ~ '?') }}{%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools is defined and tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(looking=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if not ns.looking %}{%- break %}{%- endif %}
    {%- set text = content_of(message.content) | trim %}
    {%- if message.role == "user" and not (text.startswith('<tool_response>') and text.endswith('</tool_response>')) %}
        {%- set ns.looking = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'tool' and not loop.last and messages[loop.index0 + 1].role == 'tool' %}
        {{- '<tool_response>' + message.content + '</tool_response>\\n' }}
        {%- continue %}
    {%- endif %}
    {%- set content = content_of(message.content) %}
    {%- set reasoning = '' %}
    {%- if message.reasoning_content is string %}
        {%- set reasoning = message.reasoning_content %}
    {%- elif '</think>' in content %}
        {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' }}
    {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
        {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>' + (call.function.arguments if call.function.arguments is string
            else call.function.arguments | tojson(ensure_ascii=true)) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

LLAMA3 = """
{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}

{#- The system message has a place of its own. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if builtin_tools is defined or tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{%- if builtin_tools is defined %}
    {{- "Tools: " + builtin_tools | reject('equalto', 'code_interpreter') | join(", ") + "\\n" }}
{%- endif %}
{{- "Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first = messages[0]['content'] | trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("There is no first user message!") }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
    {{- first + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception("One call at a time!") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {%- for name, value in call.arguments | items %}{{ name ~ '=' ~ value }}{{ ', ' if not loop.last }}{%- endfor %}
        {{- call.arguments | tojson + "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

MISTRAL = """
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- " [AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val | tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" + ("]" if loop.last else ", ") }}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- " [INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- " [INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined %}
        {{- " [TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function | tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
                {{- raise_exception("an id has length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' + (", " if not loop.last else "]" + eos_token) }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- ' [TOOL_RESULTS] {"content": ' + message.content | string }}
        {{- ', "call_id": "' + message.tool_call_id + '"}' }}
    {%- endif %}
{%- endfor %}
"""

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe small.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] | default('') + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TEMPLATES = {"qwen2": QWEN2, "qwen3": QWEN3, "llama3": LLAMA3, "mistral": MISTRAL, "smollm2": SMOLLM2}

SYSTEM = {"role": "system", "content": 'Be "brief" & <kind>.  '}
USER = {"role": "user", "content": "  What's the weather in Zürich? \U0001f326️ 天气\n"}
ANSWER = {"role": "assistant", "content": "Sunny, 21°.\n"}
THOUGHT = {"role": "assistant", "content": "Sunny.", "reasoning_content": "\nlet me see\n"}
WRITTEN = {"role": "assistant", "content": "<think>\nlet me see\n</think>\n\nSunny."}
ARGUMENTS = {"city": "Zürich", "days": [1, None, 2.5], "exact": True}
CALLED = {"type": "function", "id": "abcdefghi", "function": {"name": "weather", "arguments": ARGUMENTS}}
CALL = {"role": "assistant", "content": None, "tool_calls": [CALLED]}
CALLS = {"role": "assistant", "content": "Two.", "tool_calls": [CALLED, CALLED]}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": '{"degrees": "21°"}'}
PARTS = {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "image"}, {"text": "this?"}]}
CONVERSATIONS = {
    "question": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, USER, ANSWER],
    "thought": [USER, THOUGHT],
    "thoughts before": [USER, THOUGHT, USER],
    "thought in the text": [USER, WRITTEN, USER, WRITTEN],
    "call": [SYSTEM, USER, CALL, RESULT],
    "calls": [USER, CALLS, RESULT, RESULT, ANSWER],
    "parts": [PARTS],
    "nobody": [{"role": "user", "content": None}],
    "system twice": [SYSTEM, SYSTEM, USER],
    "answer first": [ANSWER],
}
PLACE = {"type": "string", "description": 'Où? "Here" & <there>'}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather's state",
        "parameters": {"type": "object", "properties": {"city": PLACE}, "required": ["city"]},
        "return": {"type": "string"},
    },
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": True},
    {"add_generation_prompt": True, "enable_thinking": False},
    {"add_generation_prompt": True, "enable_thinking": True},
    {"tools": [TOOL]},
    {"tools": [TOOL, TOOL], "add_generation_prompt": True, "enable_thinking": False},
    {"tools": []},
    {"tools": [TOOL], "tools_in_user_message": False, "date_string": "1 Jan 2030"},
    {"builtin_tools": ["search", "code_interpreter"], "date_string": "1 Jan 2030"},
    {"continue_final_message": True},
    {"continue_final_message": True, "tools": [TOOL]},
]


@pytest.fixture(scope="module", params=TEMPLATES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """kvant's tokenizer of a family with its template, and transformers'."""
    family = request.param
    folder = write_tokenizer(tmp_path_factory.mktemp("chat") / family, family, chat_template=TEMPLATES[family])
    return load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)


def rendered(tokenizer: Any, conversation: list[dict[str, Any]], options: dict[str, Any]) -> str | None:
    """The text; None where the template or the tokenizer refuses the conversation."""
    try:
        return str(tokenizer.apply_chat_template(conversation, tokenize=False, **options))
    except Exception:
        return None


def test_text_and_ids_are_transformers(pair: tuple[Tokenizer, Any]) -> None:
    ours, reference = pair
    agreed = refused = 0
    for name, conversation in CONVERSATIONS.items():
        for options in OPTIONS:
            before = json.dumps([conversation, options])
            expected = rendered(reference, conversation, options)
            assert rendered(ours, conversation, options) == expected, (name, options)
            assert json.dumps([conversation, options]) == before  # nothing of the caller's is changed
            if expected is None:
                refused += 1
                continue
            agreed += 1
            ids = reference.apply_chat_template(conversation, return_dict=False, **options)
            assert ours.apply_chat_template(conversation, **options) == ids, (name, options)
            assert ours.encode(expected, add_special_tokens=False) == ids
    assert agreed > 60
    assert refused > 0


def test_what_the_switches_do(pair: tuple[Tokenizer, Any]) -> None:
    """That the comparison compares something: tools, system and thinking are in the text where the family has them."""
    ours, reference = pair
    family = next(name for name, source in TEMPLATES.items() if source == ours.chat_template)
    assert reference.chat_template == ours.chat_template
    plain = ours.apply_chat_template([USER], tokenize=False)
    assert "Zürich" in plain
    assert "kind" in ours.apply_chat_template([SYSTEM, USER], tokenize=False)
    tools = ours.apply_chat_template([USER], tokenize=False, tools=[TOOL])
    assert ('"required": ["city"]' in tools or '"city"\n' in tools) is (family != "smollm2")
    off = ours.apply_chat_template([USER], tokenize=False, add_generation_prompt=True, enable_thinking=False)
    on = ours.apply_chat_template([USER], tokenize=False, add_generation_prompt=True, enable_thinking=True)
    assert (off != on) is (family == "qwen3")
    continued = ours.apply_chat_template(
        [USER, WRITTEN | {"content": "Sun"}], tokenize=False, continue_final_message=True
    )
    assert continued.endswith("Sun")


def test_roles_of_the_models_own_are_variables(tmp_path: Path) -> None:
    """As transformers does it: a token's name in the settings is a name in the template."""
    source = "{{ image_token }}{{ boi_token }}{{ eos_token }}{{ video_token is defined }}"
    extra = {"boi_token": "<boi>"}
    folder = write_tokenizer(tmp_path, "qwen2", chat_template=source, image_token="<image>", extra_special_tokens=extra)
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template([USER], tokenize=False)
    assert (
        load_tokenizer(folder).apply_chat_template([USER], tokenize=False) == expected == "<image><boi><|im_end|>False"
    )

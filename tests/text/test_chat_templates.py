"""Conversations through templates in the manner of the published families, by kvant and by transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import TEMPLATES, TOKENIZERS
from support.tokenizers_made import write_tokenizer
from transformers import AutoTokenizer

from kvant.engine.load import POCKET, find_model
from kvant.text.tokenizer import Tokenizer, load_tokenizer

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


POCKET_TEMPLATE = json.loads((find_model(POCKET) / "tokenizer_config.json").read_text())["chat_template"]
SOURCES = {**TEMPLATES, "pocket": POCKET_TEMPLATE}


@pytest.fixture(scope="module", params=SOURCES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """kvant's tokenizer of a family with its template, and transformers'."""
    family = request.param
    made = "qwen2" if family == "pocket" else TOKENIZERS.get(family, family)
    folder = write_tokenizer(tmp_path_factory.mktemp("chat") / family, made, chat_template=SOURCES[family])
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


def test_roles_of_the_models_own_are_variables(tmp_path: Path) -> None:
    source = "{{ image_token }}{{ boi_token }}{{ eos_token }}{{ video_token is defined }}"
    extra = {"boi_token": "<boi>"}
    folder = write_tokenizer(tmp_path, "qwen2", chat_template=source, image_token="<image>", extra_special_tokens=extra)
    texts = [rendered(each, [USER], {}) for each in (load_tokenizer(folder), AutoTokenizer.from_pretrained(folder))]
    assert texts == ["<image><boi><|im_end|>False"] * 2

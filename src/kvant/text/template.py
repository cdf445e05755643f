"""Messages for a chat template: which template, its variables, an answer to continue. As transformers does
it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kvant.errors import ArgumentError, PromptError, library_errors
from kvant.text.process import TextProcess

MAX_TEMPLATE = 1024 * 1024  # characters; the longest published ones have some 30,000
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the same field of a message
MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # stands where an answer is to be continued


def render(process: TextProcess, template: str, variables: Mapping[str, Any]) -> str:
    """A template's text for variables of JSON."""
    if len(template) > MAX_TEMPLATE:
        raise PromptError(
            f"the chat template has {len(template)} characters; expected at most {MAX_TEMPLATE}"
        )
    with library_errors(PromptError, "the chat template failed"):
        return str(process.ask({"do": "render", "template": template, "variables": variables}))


def choose_template(templates: str | Mapping[str, str] | None, wanted: str | None, tools: object) -> str:
    """The source of one of the model's templates. ``wanted``: its name, or a source of its own.

    None: the one for tools if there are tools, else the default.
    """
    by_name = {"default": templates} if isinstance(templates, str) else dict(templates or {})
    if wanted is not None:
        return by_name.get(wanted, wanted)
    if tools is not None and "tool_use" in by_name:
        return by_name["tool_use"]
    if not by_name:
        raise PromptError("the model has no chat template")
    if "default" not in by_name:
        raise PromptError(
            f"the model has several chat templates and no default; name one of {', '.join(by_name)}"
        )
    return by_name["default"]


def all_templates(templates: str | Mapping[str, str] | None) -> str:
    """Return the sources of a model's templates, joined by newlines."""
    return templates if isinstance(templates, str) else "\n".join((templates or {}).values())


def prepare(messages: object) -> list[dict[str, Any]]:
    """Messages as templates take them: plain JSON, no key that is None, reasoning under each of its names."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ArgumentError(
            "conversation", "is empty; expected a list of messages, each with a role and content"
        )
    prepared = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise ArgumentError(
                "conversation", f"has a {type(message).__name__}; expected messages with roles"
            )
        plain = {key: value for key, value in plain_data(message).items() if value is not None}
        reasoning = next((plain[key] for key in REASONING if plain.get(key) is not None), None)
        if reasoning is not None:
            plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
        prepared.append(plain)
    return prepared


def mark_continuation(messages: list[dict[str, Any]]) -> str:
    """Put the mark behind the last message's text, in place, and return that text."""
    content = messages[-1].get("content")
    if isinstance(content, str):
        messages[-1]["content"] = content + MARK
        return content
    for block in reversed(content if isinstance(content, list) else []):
        if isinstance(block, dict) and isinstance(block.get("text"), str):
            text: str = block["text"]
            block["text"] = text + MARK
            return text
    raise ValueError("continue_final_message: the last message has no text to continue")


def cut_at_mark(rendered: str, text: str) -> str:
    """The rendered conversation up to the mark."""
    at = rendered.rfind(MARK.strip())
    if at < 0 or text.strip() not in rendered:
        raise PromptError("the chat template does not keep the last message as it is; it cannot be continued")
    kept = rendered[:at]
    return kept if rendered[at : at + len(MARK)] == MARK else kept.rstrip()


def plain_data(value: Any) -> Any:
    """Rebuild a value of JSON's types; anything else becomes its type's name in angle brackets."""
    try:
        return _plain(value)
    except RecursionError as error:
        raise PromptError("a message, tool or variable holds itself or is nested too deep") from error


def _plain(value: Any) -> Any:
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):  # of pydantic
        return _plain(dump())
    # a number of NumPy's
    if callable(item := getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:
        return _plain(item())
    return f"<{type(value).__name__}>"

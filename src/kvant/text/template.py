"""Prepare messages for a chat template like transformers: template, variables, continued answers."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kvant.errors import ArgumentError, PromptError, library_errors
from kvant.text.process import TextProcess

MAX_TEMPLATE = 1024 * 1024  # characters; the longest published templates have about 30,000
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the same field in a message
MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # inserted where an answer is to be continued


def render(process: TextProcess, template: str, variables: Mapping[str, Any]) -> str:
    """Render a template with JSON variables."""
    if len(template) > MAX_TEMPLATE:
        raise PromptError(
            f"the chat template has {len(template)} characters; expected at most {MAX_TEMPLATE}"
        )
    with library_errors(PromptError, "the chat template failed"):
        return str(process.ask({"do": "render", "template": template, "variables": variables}))


def choose_template(templates: str | Mapping[str, str] | None, requested: str | None, tools: object) -> str:
    """Return a template's source. ``requested``: the name of one of the model's, or a source.

    None: the one for tools if there are tools, otherwise the default.
    """
    by_name = {"default": templates} if isinstance(templates, str) else dict(templates or {})
    if requested is not None:
        return by_name.get(requested, requested)
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
    """Convert messages to plain JSON without keys that are None, with reasoning under each of its names."""
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
    """Append the mark to the last message's text, in place, and return the original text."""
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
    """Cut the rendered conversation at the mark."""
    at = rendered.rfind(MARK.strip())
    if at < 0 or text.strip() not in rendered:
        raise PromptError("the chat template does not keep the last message as it is; it cannot be continued")
    before = rendered[:at]
    return before if rendered[at : at + len(MARK)] == MARK else before.rstrip()


def plain_data(value: Any) -> Any:
    """Rebuild a value from JSON's types; anything else becomes its type's name in angle brackets."""
    try:
        return _plain(value)
    except RecursionError as error:
        raise PromptError("a message, tool or variable contains itself or is nested too deep") from error


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
    if callable(dump := getattr(value, "model_dump", None)):  # pydantic
        return _plain(dump())
    # NumPy scalars
    if callable(item := getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:
        return _plain(item())
    return f"<{type(value).__name__}>"

"""The functions that a client lets the model call, and earlier calls of them: alike for every interface."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvant.errors import GrammarError
from kvant.server.errors import ApiError
from kvant.server.generation import Generation, Tool
from kvant.server.service import Service
from kvant.text.call_form import ToolFormat
from kvant.text.grammar_source import check_size

NO_TOOLS = "the model's chat template takes no tools, or writes calls in a form that is not known here"
MAX_TOOLS = 128  # OpenAI's
MAX_NAME = 64  # OpenAI's; Anthropic's is 128


def checked_tools(tools: Sequence[Tool], field: str, longest: int = MAX_NAME) -> tuple[Tool, ...]:
    """The tools, each with a name of its own. ``field``: where it is, with {} for its place."""
    if len(tools) > MAX_TOOLS:
        raise ApiError(f"tools has {len(tools)}; expected at most {MAX_TOOLS}", param="tools")
    try:
        check_size("list of tools", [tool.parameters for tool in tools])
    except GrammarError as error:
        raise ApiError(str(error), param="tools") from error
    seen: set[str] = set()
    for place, tool in enumerate(tools):
        param = field.format(place)
        if not re.fullmatch(f"[a-zA-Z0-9_-]{{1,{longest}}}", tool.name):
            said = f"expected 1 to {longest} letters, digits, _ and -"
            raise ApiError(f"{param} is {tool.name[:80]!r}; {said}", param=param)
        if tool.name in seen:
            raise ApiError(f"{param} is {tool.name!r}, which another tool has; expected another name", param=param)
        seen.add(tool.name)
    return tuple(tools)


def tool_named(tools: Sequence[Tool], name: str, field: str = "tool_choice") -> Tool:
    """The tool that has to be called."""
    for tool in tools:
        if tool.name == name:
            return tool
    names = ", ".join(tool.name for tool in tools) or "none"
    raise ApiError(f"{field} names {name[:80]!r}; expected one of tools: {names[:200]}", param=field)


def shown_tools(service: Service, generation: Generation) -> list[dict[str, Any]]:
    """The tools that the model is told of, in OpenAI's form; none where it must not call one."""
    if generation.tool_choice == "none" or not generation.tools:
        return []
    if service.tool_format is None:
        raise ApiError(f"tools: {NO_TOOLS}", param="tools")
    return [as_shown(tool) for tool in generation.tools]


def as_shown(tool: Tool) -> dict[str, Any]:
    """A tool in OpenAI's form, as templates take it."""
    described = {"description": tool.description} if tool.description else {}
    function = {"name": tool.name, **described, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def for_template(messages: Sequence[Mapping[str, Any]], form: ToolFormat | None) -> list[dict[str, Any]]:
    """Messages with ids of calls as the model's template takes them."""
    made = [dict(message) for message in messages]
    for place, message in enumerate(made):
        if form is None and ("tool_calls" in message or message["role"] == "tool"):
            raise ApiError(f"messages[{place}] has to do with tools; {NO_TOOLS}", param=f"messages[{place}]")
        if form is None or form.id_length is None:
            continue
        if "tool_calls" in message:
            calls = message["tool_calls"]
            message["tool_calls"] = [{**call, "id": _call_id(call["id"], form.id_length)} for call in calls]
        if "tool_call_id" in message:
            message["tool_call_id"] = _call_id(message["tool_call_id"], form.id_length)
    return made


def _call_id(given: str, length: int) -> str:
    """The id of a call with so many letters and digits; another one where it has not, always the same."""
    if len(given) == length and given.isascii() and given.isalnum():
        return given
    return hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:length]

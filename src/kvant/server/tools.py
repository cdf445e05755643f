"""The functions that a client lets the model call, checked alike for every interface."""

import re
from collections.abc import Sequence

from kvant.server.errors import ApiError
from kvant.server.generation import Tool

MAX_TOOLS = 128  # OpenAI's
MAX_NAME = 64  # OpenAI's; Anthropic's is 128


def checked_tools(tools: Sequence[Tool], field: str, longest: int = MAX_NAME) -> tuple[Tool, ...]:
    """The tools, where each has a name of its own.

    Args:
        field: where the name of one is, with {} for its place.
        longest: characters of a name.

    Raises:
        ApiError: 400: too many, or one with a name that is none, or is another's.
    """
    if len(tools) > MAX_TOOLS:
        raise ApiError(f"tools has {len(tools)}; expected at most {MAX_TOOLS}", param="tools")
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
    """The tool that has to be called.

    Raises:
        ApiError: 400: it is none of them.
    """
    for tool in tools:
        if tool.name == name:
            return tool
    names = ", ".join(tool.name for tool in tools) or "none"
    raise ApiError(f"{field} names {name[:80]!r}; expected one of tools: {names[:200]}", param=field)

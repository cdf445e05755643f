"""A conversation's messages for a chat template, from interfaces that give them in pieces."""

from collections.abc import Sequence
from typing import Any

import msgspec

from kvant.server.body import check_depth
from kvant.server.errors import ApiError
from kvant.server.security import MAX_VALUES, count_marks, count_values


def joined(texts: Sequence[str]) -> str:
    """Pieces of a text put together, with a line break between two that have no white space there.

    Some clients cut a text where its cache is to end, and others send paragraphs.
    """
    pieces: list[str] = []
    for text in filter(None, texts):
        if pieces and not (pieces[-1][-1].isspace() or text[0].isspace()):
            pieces.append("\n")
        pieces.append(text)
    return "".join(pieces)


def call_arguments(text: str, place: str) -> dict[str, Any]:
    """The arguments of a call that a client sends back as JSON text; none where the text is empty."""
    try:
        arguments = msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(
            f"{place} is {text[:80]!r}; expected the JSON text of an object: {error}", param=place
        ) from error
    check_depth(arguments)
    return arguments


def check_arguments(texts: Sequence[str]) -> None:
    """Refuse the arguments of calls, JSON texts in a body, where they have as many values as no body may have."""
    parts = [text.encode("utf-8", "replace") for text in texts]
    if sum(map(count_marks, parts)) > MAX_VALUES and (count := sum(map(count_values, parts))) > MAX_VALUES:
        raise ApiError(f"the arguments of calls have {count} values of JSON; expected {MAX_VALUES} at most")


class Turns:
    """Collects pieces in their order. Pieces of one role that follow one another become one message."""

    def __init__(self) -> None:
        self._turns: list[dict[str, Any]] = []  # messages whose texts are lists of pieces
        self._names: dict[str, str] = {}  # of tools, by the ids of their calls

    def add_text(self, role: str, text: str) -> None:
        """A piece of what the role says."""
        self._of(role)["content"].append(text)

    def add_thinking(self, text: str) -> None:
        """What the assistant thought, if anything."""
        if text:
            self._of("assistant")["reasoning_content"].append(text)

    def add_call(self, call_id: str, name: str, arguments: dict[str, Any]) -> None:
        """A call of the assistant's."""
        self._names[call_id] = name
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._of("assistant")["tool_calls"].append(call)

    def add_result(self, call_id: str, text: str, place: str) -> None:
        """What an earlier call brought. ``place``: the field that ``call_id`` is in."""
        if call_id not in self._names:
            raise ApiError(f"{place} is {call_id[:80]!r}; no call before it has this id", param=place)
        self._turns.append({"role": "tool", "content": [text], "tool_call_id": call_id, "name": self._names[call_id]})

    def messages(self) -> list[dict[str, Any]]:
        """All of it, as :attr:`kvant.server.generation.Generation.messages`."""
        texts = ("content", "reasoning_content")
        return [
            {key: joined(value) if key in texts else value for key, value in turn.items() if value or key == "content"}
            for turn in self._turns
        ]

    def _of(self, role: str) -> dict[str, Any]:
        """The turn that a piece of this role belongs to."""
        if not self._turns or self._turns[-1]["role"] != role:
            self._turns.append({"role": role, "content": [], "reasoning_content": [], "tool_calls": []})
        return self._turns[-1]

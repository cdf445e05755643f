"""The messages of a conversation as the metadata of its cache's snapshot. A stranger may have made the file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvant.errors import SnapshotError
from kvant.files import unique_keys
from kvant.text.prompt import Message

KEY = "conversation"
ROLES = ("system", "user", "assistant")


def as_metadata(messages: Sequence[Message]) -> dict[str, str]:
    """Messages as text by its name."""
    return {KEY: json.dumps([dict(message) for message in messages])}


def messages_of(path: str | Path, metadata: Mapping[str, str]) -> list[Message]:
    """The messages that a snapshot was saved with."""
    if KEY not in metadata:
        raise SnapshotError(f"{path}: it holds no conversation; expected a file that a conversation was saved to")
    try:
        raw = json.loads(metadata[KEY], object_pairs_hook=unique_keys)
        if not isinstance(raw, list):
            raise ValueError(f"a JSON {type(raw).__name__}; expected a list")
        return [_message(number, entry) for number, entry in enumerate(raw)]
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"{path}: its conversation is malformed: {error}") from error


def _message(number: int, raw: Any) -> Message:
    if not isinstance(raw, dict) or not {"role", "content"} <= raw.keys() <= {"role", "content", "reasoning_content"}:
        raise ValueError(f"message {number} is no object of a role, a content and perhaps a reasoning_content")
    if not all(isinstance(value, str) for value in raw.values()):
        raise ValueError(f"message {number} has a value that is no text")
    if raw["role"] not in ROLES or (raw["role"] == "system" and number):
        raise ValueError(f"message {number} has the role {raw['role'][:20]!r}; expected user or assistant")
    for value in raw.values():
        value.encode()  # half of a character is a UnicodeEncodeError, which is a ValueError
    return raw

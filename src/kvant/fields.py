"""Read values of a config.json and check each. A key that is missing or null gets the default."""

from collections.abc import Mapping
from typing import Any

from kvant.errors import ModelError

# Far above any published model, and far too small to exhaust memory before a tensor is read.
MAX_SIZE = 2**24


# More than any published config.json has; those of layers are far fewer.
MAX_LIST = 4096
MAX_OBJECT = 2**15


def check_lengths(raw: Mapping[str, Any], *, lists: int = MAX_LIST, objects: int = MAX_OBJECT) -> None:
    """Refuse lists and objects in a config.json that are longer than the limits."""
    left: list[tuple[str, Any]] = [("the object", raw)]
    while left:
        key, value = left.pop()
        most = lists if isinstance(value, list) else objects
        if len(value) > most:
            raise ModelError(f"config.json: {key} has a length of {len(value)}; expected at most {most}")
        items = ((key, item) for item in value) if isinstance(value, list) else value.items()
        left += [(name, item) for name, item in items if isinstance(item, dict | list)]


def size(raw: Mapping[str, Any], key: str, *, default: int | None = None, limit: int = MAX_SIZE) -> int:
    """Read an int from 1 to ``limit``; required if ``default`` is None."""
    value = raw.get(key)
    if value is None:
        if default is None:
            raise ModelError(f"config.json: {key} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
        raise ModelError(f"config.json: {key} is {shown(value)}; expected an int from 1 to {limit}")
    return value


def number(
    raw: Mapping[str, Any], key: str, *, default: float | None = None, least: float = 0.0, where: str = ""
) -> float:
    """Read a number above 0, at least ``least`` and below 1e30; required if ``default`` is None.

    ``where`` is the prefix of the key in messages.
    """
    value = raw.get(key)
    if value is None:
        if default is None:
            raise ModelError(f"config.json: {where}{key} is missing")
        return default
    # In this order: NaN fails every comparison, and a huge int cannot be converted to a float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30 or value < least:
        expected = f"a number from {least:g}" if least else "a positive number"
        raise ModelError(f"config.json: {where}{key} is {str(value)[:40]}; expected {expected} below 1e30")
    return float(value)


def flag(raw: Mapping[str, Any], key: str) -> bool | None:
    """Read true, false, or None if the key is missing."""
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"config.json: {key} is {shown(value)}; expected true or false")
    return value


def strings(raw: Mapping[str, Any], key: str) -> list[str]:
    """Read a list of strings; empty if the key is missing."""
    value = raw.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ModelError(f"config.json: {key} is {str(value)[:80]}; expected a list of strings")
    return value


def mapping(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Read an object; empty if the key is missing."""
    value = raw.get(key) or {}
    if not isinstance(value, dict):
        raise ModelError(f"config.json: {key} is {shown(value)}; expected an object")
    return value


def token_ids(raw: Mapping[str, Any], file: str) -> tuple[int, ...]:
    """Read the end-of-text tokens: one id or a list."""
    value = raw.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
        raise ModelError(f"{file}: eos_token_id is {shown(value)}; expected a token id or a list of them")
    return tuple(ids)


def shown(value: object) -> str:
    """Format a value for a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."

"""JSON: a request's body as a typed structure, where what is wrong is a 400 that names the field; and answers."""

import re
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import inspect
from starlette.responses import Response

from kvant.server.errors import ApiError

T = TypeVar("T")
MAX_DEPTH = 64
FLAT = {int, float, bool, str, type(None)}


class Fields(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Base of all bodies: a field that is not declared is refused by name."""


class Caller(Fields, frozen=True):
    """Who called a tool: the model itself."""

    type: Literal["direct"]


def decode(body: bytes, kind: type[T]) -> T:
    """A JSON body as ``kind``."""
    try:
        found = msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = str(error)
        field = re.search(r"(?:unknown|required) field `([^`]*)`", text)
        place = re.search(r"(?:- at|in) `\$\.?([^`]*)`", text)
        names = [found[1] for found in (place, field) if found]
        if place and text.startswith("Invalid") and (values := allowed(kind, place[1])):
            text += f"; expected {' or '.join(msgspec.json.encode(value).decode() for value in values)}"
        raise ApiError(text, param=".".join(names) or None) from error
    check_depth(found)
    return found


def allowed(kind: type, place: str) -> list[Any]:
    """The values that a field may have whose values are named.

    Args:
        kind: of the body.
        place: of the field in it, as msgspec writes it: ``tools[0].type``.
    """
    values: list[Any] = []
    at = _kinds(inspect.type_info(kind))
    steps = re.findall(r"[^.\[\]]+|\[", place.replace("[...]", "[0]"))
    steps = [step for step in steps if not step.isdecimal()]  # of an array all items are of one kind
    for number, step in enumerate(steps, 1):
        if step == "[":
            at = [each for node in at if isinstance(node, inspect.ListType) for each in _kinds(node.item_type)]
            continue
        structs = [node for node in at if isinstance(node, inspect.StructType)]
        if number == len(steps):
            values += [node.tag for node in structs if node.tag_field == step]
        at = [each for node in structs for field in node.fields if field.name == step for each in _kinds(field.type)]
    return values + [value for node in at if isinstance(node, inspect.LiteralType) for value in node.values]


def _kinds(node: inspect.Type) -> list[inspect.Type]:
    """A type, or those of a union."""
    return list(node.types) if isinstance(node, inspect.UnionType) else [node]


def check_depth(found: object) -> None:
    """Refuse JSON that is nested deeper than MAX_DEPTH, before anything walks it by recursion.

    It is looked at level by level, and only where it has objects and arrays: their number is bounded before, by
    :class:`kvant.server.security.Bodies`.
    """
    level = [found]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in _children(node) if type(child) not in FLAT]
        if not level:
            return
    raise ApiError(f"the body's JSON is nested deeper than {MAX_DEPTH} levels")


def _children(node: object) -> Iterable[object]:
    if isinstance(node, msgspec.Struct):
        return (getattr(node, name) for name in node.__struct_fields__)
    return node.values() if isinstance(node, dict) else node if isinstance(node, list | tuple) else ()


def sse(data: Any, event: str | None = None) -> bytes:
    """One event of JSON."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + msgspec.json.encode(data) + b"\n\n"


def json_response(data: Any) -> Response:
    """A response of JSON."""
    return Response(msgspec.json.encode(data), media_type="application/json")

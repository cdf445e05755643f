"""What of a request is left out, and said: fields that are not known here, and wishes that cannot be
heeded.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from msgspec import inspect

from kvant.errors import printable
from kvant.server.errors import ApiError

MAX_NAMES = 32  # of one request that are said
MAX_LENGTH = 80  # of a name

type_info = cache(inspect.type_info)


class LeftOut:
    """The names of one request's fields that are left out."""

    def __init__(self, *, strict: bool = False) -> None:
        """``strict``: nothing is left out. It is refused."""
        self._strict = strict
        # Where each is, and a value that cannot be heeded: ``tools[2] web_search``. By the name without
        # places: of several that differ by a place in a list alone, the first.
        self.names: dict[str, str] = {}

    def add(self, field: str, value: object = "") -> None:
        """Say that a field, or what it asks for, is left out."""
        if self._strict:
            said = f" is {value!r:.80}" if value != "" else ""
            raise ApiError(
                f"{field}{said}; it is not known here or cannot be heeded: leave it out", param=field
            )
        name = printable(f"{field} {value}".strip(), MAX_LENGTH)
        if len(self.names) < MAX_NAMES:
            self.names.setdefault(re.sub(r"\[\d+\]", "[]", name), name)

    def header(self) -> str:
        """All of it in a line of ASCII."""
        return ", ".join(self.names.values()).encode("ascii", "backslashreplace").decode()


def known(value: Any, kind: type, place: str, left_out: LeftOut) -> Any:
    """A decoded JSON value without what its type does not have: fields, and values of optional ones."""
    return _known(value, type_info(kind), place, left_out)


def _known(value: Any, node: inspect.Type, place: str, left_out: LeftOut) -> Any:
    if isinstance(value, list):
        for each in kinds(node):
            if isinstance(each, inspect.ListType):
                item = each.item_type
                return [_known(one, item, f"{place}[{at}]", left_out) for at, one in enumerate(value)]
    if isinstance(value, dict) and (struct := _struct(value, node)) is not None:
        return _known_fields(value, struct, place, left_out)
    return value


def _known_fields(value: Mapping[str, Any], struct: inspect.StructType, place: str, left_out: LeftOut) -> Any:
    fields = {field.encode_name: field for field in struct.fields}
    found = {}
    for name, item in value.items():
        at = f"{place}.{name}" if place else name
        if (field := fields.get(name)) is None:
            if name != struct.tag_field:
                left_out.add(at)
                continue
            found[name] = item
        elif not field.required and not _may_be(item, field.type):
            left_out.add(at, item)
        else:
            found[name] = _known(item, field.type, at, left_out)
    return found


def _may_be(value: Any, node: inspect.Type) -> bool:
    """Whether a field can have a value, as far as its values are named one by one. None alone is refused
    later.
    """
    if isinstance(node, inspect.NoneType):
        return True
    named: list[Any] = []
    for each in kinds(node):
        if not isinstance(each, inspect.LiteralType | inspect.NoneType):
            return True
        named += each.values if isinstance(each, inspect.LiteralType) else [None]
    return value in named


def _struct(value: Mapping[str, Any], node: inspect.Type) -> inspect.StructType | None:
    """The type of an object among those that it may have."""
    structs = [each for each in kinds(node) if isinstance(each, inspect.StructType)]
    if len(structs) == 1:
        return structs[0]
    return next((each for each in structs if each.tag_field and value.get(each.tag_field) == each.tag), None)


def kinds(node: inspect.Type) -> tuple[inspect.Type, ...]:
    """A type, or those of a union."""
    return node.types if isinstance(node, inspect.UnionType) else (node,)

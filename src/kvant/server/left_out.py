"""The fields of a request that the server ignores and reports, because they are unknown or unsupported."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from msgspec import inspect

from kvant.errors import printable
from kvant.server.errors import ApiError

MAX_NAMES = 32  # reported for one request
MAX_LENGTH = 80  # of a name

type_info = cache(inspect.type_info)


class LeftOut:
    """The names of one request's ignored fields, for the header ``x-kvant-ignored``."""

    def __init__(self, *, strict: bool = False) -> None:
        """With ``strict``, :meth:`add` raises an error instead."""
        self._strict = strict
        # Place, and the unsupported value if any: ``tools[2] web_search``. The key has no list indices, so
        # only the first of several fields that differ by an index is reported.
        self.names: dict[str, str] = {}

    def add(self, field: str, value: object = "") -> None:
        """Record that a field, or the value it has, is ignored."""
        if self._strict:
            quoted = f" {value!r:.80}" if value != "" else ""
            problem = f"{field}{quoted} is unknown or not supported, and --strict refuses that; leave it out"
            raise ApiError(problem, param=field)
        name = printable(f"{field} {value}".strip(), MAX_LENGTH)
        if len(self.names) < MAX_NAMES:
            self.names.setdefault(re.sub(r"\[\d+\]", "[]", name), name)

    def header(self) -> str:
        """Return all of it as one line of ASCII."""
        return ", ".join(self.names.values()).encode("ascii", "backslashreplace").decode()


def known(value: Any, kind: type, place: str, left_out: LeftOut) -> Any:
    """Return a decoded JSON value without unknown fields and unsupported values of optional fields."""
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
    fields_known = {}
    for name, item in value.items():
        at = f"{place}.{name}" if place else name
        if (field := fields.get(name)) is None:
            if name != struct.tag_field:
                left_out.add(at)
                continue
            fields_known[name] = item
        elif not field.required and not _may_be(item, field.type):
            left_out.add(at, item)
        else:
            fields_known[name] = _known(item, field.type, at, left_out)
    return fields_known


def _may_be(value: Any, node: inspect.Type) -> bool:
    """Return whether a field that lists its values allows this one. A field that allows only null is
    checked later.
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
    """Return the struct among a field's types that fits an object."""
    structs = [each for each in kinds(node) if isinstance(each, inspect.StructType)]
    if len(structs) == 1:
        return structs[0]
    return next((each for each in structs if each.tag_field and value.get(each.tag_field) == each.tag), None)


def kinds(node: inspect.Type) -> tuple[inspect.Type, ...]:
    """Return the types of a union, or the type itself."""
    return node.types if isinstance(node, inspect.UnionType) else (node,)

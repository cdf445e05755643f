"""A Python function as a tool: its JSON schema, from its signature, type hints and docstring."""

import inspect
import json
import re
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", dict: "object"}
SECTION = re.compile(r"^\s*(Args|Returns|Raises):\s*$", re.MULTILINE)
ARGUMENT = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?:\s*(.*?)(?=^\s*\w+\s*(?:\([^)]*\))?:|\Z)", re.MULTILINE | re.DOTALL)
CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def function_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The schema of a tool, as chat templates take it.

    Args:
        function: has a type hint for every parameter, and a docstring in Google's style that describes each.

    Raises:
        ValueError: a parameter without a type hint or a description.
    """
    if not callable(function):
        raise ValueError(f"a tool is a {type(function).__name__}; expected a JSON schema or a function")
    name = getattr(function, "__name__", type(function).__name__)
    description, described, returns = _docstring(function, name)
    hints = get_type_hints(function)
    result = hints.pop("return", None)
    required, properties = [], {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in hints:
            raise ValueError(f"tool {name}: parameter {parameter.name} has no type hint")
        if parameter.name not in described:
            raise ValueError(f"tool {name}: the docstring does not describe parameter {parameter.name}")
        schema = _type_schema(hints[parameter.name], name)
        text = described[parameter.name]
        if found := CHOICES.search(text):
            schema["enum"] = _choices(found.group(1), name)
            text = text[: found.start()].strip()
        properties[parameter.name] = {**schema, "description": text}
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    made: dict[str, Any] = {"name": name, "description": description, "parameters": parameters}
    if result is not None:
        made["return"] = _type_schema(result, name) | ({"description": returns} if returns else {})
    return {"type": "function", "function": made}


def _choices(text: str, name: str) -> list[Any]:
    try:
        return list(json.loads(text))
    except (TypeError, ValueError) as error:
        raise ValueError(f"tool {name}: choices are {text[:80]!r}; expected a JSON list") from error


def _docstring(function: Callable[..., Any], name: str) -> tuple[str, dict[str, str], str]:
    text = inspect.getdoc(function)
    if not text:
        raise ValueError(f"tool {name} has no docstring; expected one that describes it and its parameters")
    parts = SECTION.split(text)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    described = {key: " ".join(value.split()) for key, value in ARGUMENT.findall(sections.get("Args", ""))}
    return parts[0].strip(), described, sections.get("Returns", "").strip()


def _type_schema(hint: Any, name: str) -> dict[str, Any]:
    if hint is Any:
        return {}
    if hint in KINDS:
        return {"type": KINDS[hint]}
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        schemas = [_type_schema(part, name) for part in inner if part is not type(None)]
        if len(schemas) == 1:
            merged = schemas[0]
        elif all(schema.keys() == {"type"} for schema in schemas):
            merged = {"type": sorted(schema["type"] for schema in schemas)}
        else:
            merged = {"anyOf": schemas}
        return merged | ({"nullable": True} if type(None) in inner else {})
    if origin is Literal:
        kinds = {type(value) for value in inner}
        kind = KINDS[kinds.pop()] if len(kinds) == 1 else sorted(KINDS[kind] for kind in kinds)
        return {"type": kind, "enum": list(inner)}
    if hint is list or origin is list:
        return {"type": "array"} | ({"items": _type_schema(inner[0], name)} if inner else {})
    if origin is dict:
        more = {"additionalProperties": _type_schema(inner[1], name)} if inner[1] is not Any else {}
        return {"type": "object"} | more
    raise ValueError(f"tool {name}: no JSON schema for the type {hint}")

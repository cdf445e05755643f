"""Random JSON schemas, and a checker of the keywords they have that owes nothing to llguidance or kvant."""

import json
import random
import re
from collections.abc import Mapping
from typing import Any

TEXTS = ["a", "ß", "東京", "🦊", 'with "quotes"', "back\\slash", "line\nbreak", "", " ", "<tool_call>", "e\u0301"]
PATTERNS = ["^[A-Z]{2}-[0-9]{1,3}$", "^(ab|cd)+$", "^é?x{2,4}$", "^[^\\W\\d_]{1,3}$", "^\\d{4}$"]
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """Of nested objects and lists, texts, numbers and choices. Every value of it has an end."""
    kinds = ["string", "pattern", "integer", "number", "enum", "const", "boolean", "null"]
    kind = rng.choice([*kinds, *(["object"] * 4 + ["array"] * 3 + ["anyOf", "types", "ref", "map"]) * (depth > 0)])
    if kind == "object":
        names = rng.sample(["name", "größe", "x y", "id", "$ref", "東", 'q"'], rng.randrange(1, 4))
        required = [name for name in names if rng.random() < 0.6]
        properties = {name: random_schema(rng, depth - 1) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "map":
        return {"type": "object", "additionalProperties": random_schema(rng, 0), "maxProperties": 1}
    if kind == "array":
        least = rng.randrange(2)
        return {
            "type": "array",
            "items": random_schema(rng, depth - 1),
            "minItems": least,
            "maxItems": least + rng.randrange(1, 3),
        }
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
    if kind == "types":
        return {"type": ["integer", "null"], "minimum": 0}
    if kind == "ref":
        return {"type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 2}
    if kind == "string":
        least = rng.randrange(3)
        return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(6)}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind == "integer":
        low = rng.randrange(-1000, 1000)
        return {"type": "integer", "minimum": low, "maximum": low + rng.choice([0, 7, 10_000])}
    if kind == "number":
        low = rng.randrange(-50, 50) / 4
        return {"type": "number", "exclusiveMinimum": low, "maximum": low + rng.choice([0.5, 100])}
    if kind == "enum":
        return {"enum": rng.sample([*TEXTS, 3, 2.5, None, True, ["a", 1]], 3)}
    if kind == "const":
        return {"const": rng.choice([*TEXTS, {"k": ["v"]}])}
    return {"type": kind}


def random_root(rng: random.Random) -> dict[str, Any]:
    """A schema with the part that others refer to."""
    part = {"type": "object", "properties": {"p": random_schema(rng, 0)}, "required": ["p"]}
    return {**random_schema(rng), "$defs": {"part": {**part, "additionalProperties": False}}}


def problem(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str | None:
    """The first keyword that a value does not satisfy; None: it satisfies all."""
    for key, wanted in schema.items():
        if key == "$defs" or _satisfies(value, key, wanted, schema, root):
            continue
        return f"{key} {wanted!r:.60} by {value!r:.60}"
    return None


def _satisfies(value: Any, key: str, wanted: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    def fits(part: Any, by: Mapping[str, Any]) -> bool:
        return problem(part, by, root) is None

    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match key:
        case "type":
            return any(_is(value, kind) for kind in ([wanted] if isinstance(wanted, str) else wanted))
        case "enum" | "const":
            same = [json.dumps(each, sort_keys=True) for each in (wanted if key == "enum" else [wanted])]
            return json.dumps(value, sort_keys=True) in same
        case "anyOf":
            return any(fits(value, each) for each in wanted)
        case "$ref":
            return fits(value, root["$defs"][wanted.removeprefix("#/$defs/")])
        case "properties":
            return not isinstance(value, dict) or all(fits(value[k], s) for k, s in wanted.items() if k in value)
        case "required":
            return not isinstance(value, dict) or set(wanted) <= value.keys()
        case "additionalProperties":
            others = set(value) - set(schema.get("properties", ())) if isinstance(value, dict) else set()
            return not others if wanted is False else all(fits(value[k], wanted) for k in others)
        case "maxProperties":
            return not isinstance(value, dict) or len(value) <= wanted
        case "items":
            return not isinstance(value, list) or all(fits(each, wanted) for each in value)
        case "minItems":
            return not isinstance(value, list) or len(value) >= wanted
        case "maxItems":
            return not isinstance(value, list) or len(value) <= wanted
        case "minLength":
            return not isinstance(value, str) or len(value) >= wanted
        case "maxLength":
            return not isinstance(value, str) or len(value) <= wanted
        case "pattern":
            return not isinstance(value, str) or re.search(wanted, value) is not None
        case "minimum":
            return not is_number or value >= wanted
        case "exclusiveMinimum":
            return not is_number or value > wanted
        case "maximum":
            return not is_number or value <= wanted
    raise AssertionError(f"this checker does not know {key}")


def _is(value: Any, kind: str) -> bool:
    if kind in ("integer", "number"):
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer() and kind == "integer")
        return not isinstance(value, bool) and (whole or (kind == "number" and isinstance(value, float)))
    return isinstance(value, TYPES[kind])

"""Random JSON schemas, and whether a value satisfies one."""

import random
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator

TEXTS = [
    "a",
    "ß",
    "東京",
    "🦊",
    'with "quotes"',
    "back\\slash",
    "line\nbreak",
    "",
    " ",
    "<tool_call>",
    "e\u0301",
]
PATTERNS = ["^[A-Z]{2}-[0-9]{1,3}$", "^(ab|cd)+$", "^é?x{2,4}$", "^[^\\W\\d_]{1,3}$", "^\\d{4}$"]

# formats that hold nothing
NOTES = ["path", "password", "binary", "uri-reference", "regex", "a format of nobody"]


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """Of nested objects and lists, texts, numbers and choices. Every value of it has an end."""
    kinds = ["string", "pattern", "integer", "number", "enum", "const", "boolean", "null"]
    kind = rng.choice(
        [*kinds, *(["object", "open"] * 3 + ["array"] * 3 + ["anyOf", "types", "ref", "map"]) * (depth > 0)]
    )
    if kind == "object":
        names = rng.sample(["name", "größe", "x y", "id", "$ref", "東", 'q"'], rng.randrange(1, 4))
        required = [name for name in names if rng.random() < 0.6]
        properties = {name: random_schema(rng, depth - 1) for name in names}
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }
    if kind == "open":  # names that are not listed may come, too
        required = ["a"] * rng.randrange(2)
        others = {"additionalProperties": rng.choice([True, False, random_schema(rng, 0)])}
        patterns = {"patternProperties": {rng.choice(["^b", "c$", "^é?$"]): random_schema(rng, depth - 1)}}
        least = {
            "minProperties": rng.randrange(len(required) + 2),
            "properties": {"a": random_schema(rng, 0)},
        }
        return {"type": "object", "required": required} | (least if required else {}) | others | patterns
    if kind == "map":
        return {"type": "object", "additionalProperties": random_schema(rng, 0), "maxProperties": 1}
    if kind == "array":
        least = rng.randrange(2)
        items, most = random_schema(rng, depth - 1), least + rng.randrange(1, 3)
        return {"type": "array", "items": items, "minItems": least, "maxItems": most}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
    if kind == "types":
        return {"type": ["integer", "null"], "minimum": 0}
    if kind == "ref":
        return {"type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 2}
    if kind == "string":
        least = rng.randrange(3)
        note = {"format": rng.choice(NOTES)} if rng.random() < 0.5 else {}
        return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(6)} | note
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


def problem(value: Any, schema: Mapping[str, Any]) -> str | None:
    """Why a value does not satisfy a schema, as jsonschema says; None: it does."""
    error = next(Draft202012Validator(schema).iter_errors(value), None)
    return None if error is None else error.message

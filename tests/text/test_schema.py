"""A value satisfies a schema where the reference implementation says so."""

import random
import time
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from support.counts import count

from kvant.text.schema import validate

PATTERNS = ["^a", "b$", "a|bb", "^[a-b]+$", "^(?:a|c)*$", "", "^.{2}$"]
TYPES = ["object", "array", "string", "number", "integer", "boolean", "null"]


def some_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(9 if depth < 3 else 7)
    if kind < 7:
        return rng.choice([None, True, False, 0, 1, 1.0, 2.5, -3, 1e20, 0.3, "", "a", "bb", "ccc"])
    if kind == 7:
        return [some_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {name: some_value(rng, depth + 1) for name in "abc" if rng.random() < 0.5}


def some_schema(rng: random.Random, depth: int = 0) -> Any:
    if rng.random() < 0.1:
        return rng.random() < 0.7
    if depth > 3:
        return {"type": rng.choice(TYPES)}

    def inner() -> Any:
        return some_schema(rng, depth + 1)

    def some() -> list[Any]:
        return [inner() for _ in range(rng.randrange(1, 4))]

    makers = {
        "type": lambda: rng.choice([rng.choice(TYPES), rng.sample(TYPES, 2)]),
        "enum": lambda: [some_value(rng) for _ in range(3)],
        "const": lambda: some_value(rng),
        "properties": lambda: {name: inner() for name in "abc" if rng.random() < 0.6},
        "required": lambda: rng.sample("abc", rng.randrange(3)),
        "additionalProperties": inner,
        "propertyNames": lambda: {"maxLength": rng.randrange(2)},
        "dependentRequired": lambda: {"a": ["b"]},
        "dependentSchemas": lambda: {"b": inner()},
        "minProperties": lambda: rng.randrange(3),
        "maxProperties": lambda: rng.randrange(3),
        "items": inner,
        "prefixItems": some,
        "contains": inner,
        "minContains": lambda: rng.randrange(3),
        "maxContains": lambda: rng.randrange(3),
        "uniqueItems": lambda: rng.random() < 0.5,
        "minItems": lambda: rng.randrange(3),
        "maxItems": lambda: rng.randrange(3),
        "minLength": lambda: rng.randrange(3),
        "maxLength": lambda: rng.randrange(3),
        "minimum": lambda: rng.choice([-1, 0, 1.5]),
        "maximum": lambda: rng.choice([-1, 0, 1.5]),
        "exclusiveMinimum": lambda: rng.choice([0, 1]),
        "exclusiveMaximum": lambda: rng.choice([1, 2.5]),
        "multipleOf": lambda: rng.choice([1, 2, 0.5]),
        "pattern": lambda: rng.choice(PATTERNS),
        "patternProperties": lambda: {rng.choice(PATTERNS): inner(), rng.choice(PATTERNS): inner()},
        "allOf": some,
        "anyOf": some,
        "oneOf": some,
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
        "$ref": lambda: rng.choice(["#/$defs/one", "#/$defs/t~1o%25", "#/$defs/list/prefixItems/0"]),
        "description": lambda: "what it is",
    }
    names = rng.sample(sorted(makers), rng.randrange(1, 5))
    return {name: makers[name]() for name in names}


def test_random_schemas_and_values() -> None:
    rng = random.Random(11)
    right = wrong = 0
    for _ in range(count(1000, 60_000)):
        schema = some_schema(rng)
        if isinstance(schema, dict):
            one = {"type": "integer"}
            schema["$defs"] = {"one": one, "t/o%": some_schema(rng, 3), "list": {"prefixItems": [{"minLength": 2}]}}
        value = some_value(rng)
        try:
            expected = Draft202012Validator(schema).is_valid(value)
        except RecursionError:  # a schema that refers to itself and nothing else
            continue
        assert (validate(value, schema) is None) is expected, (schema, value)
        right, wrong = right + expected, wrong + (not expected)
    assert min(right, wrong) > 200


@pytest.mark.parametrize(
    ("schema", "value", "problem"),
    [
        ({"type": "integer"}, True, "the value is boolean; expected integer"),
        ({"type": ["string", "null"]}, 1.5, "the value is number; expected string or null"),
        ({"properties": {"a": {"items": {"type": "string"}}}}, {"a": ["x", 5]}, "a[1] is integer; expected string"),
        ({"required": ["a"]}, {}, "the value lacks 'a'"),
        ({"properties": {"a": {"additionalProperties": False}}}, {"a": {"b": 1}}, "a.b is not allowed"),
        ({"enum": [1, 2]}, 3, "none of 2 allowed values"),
        ({"minimum": 1, "maximum": 2}, 3, "is 3; expected 1 to 2"),
        ({"minItems": 1}, [], "has a size of 0"),
    ],
)
def test_what_is_wrong_is_said(schema: Any, value: Any, problem: str) -> None:
    found = validate(value, schema)
    assert found is not None
    assert problem in found


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/none"},
        {"$ref": "https://example.invalid/schema.json"},
        {"properties": 5},
        {"type": 5},
        {"required": 5},
        {"minimum": "1"},
        {"anyOf": 5},
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 9}}, "$ref": "#/$defs/a"},  # doubles with each level
        {"allOf": [{"not": {"not": {"$ref": "#"}}}] * 3},
    ],
)
def test_schemas_that_are_none(schema: Any) -> None:
    """They are no failure, and never the schema of a valid value; none takes long."""
    for value in ({"a": 1}, 5):
        found = validate(value, schema)
        assert found is None or "the schema cannot be used" in found
    assert validate({"a": 1} if "minimum" not in schema else 5, schema) is not None


def test_older_drafts() -> None:
    """Their forms of two keywords, which tools still have."""
    assert validate([1, "a"], {"items": [{"type": "integer"}], "additionalItems": {"type": "string"}}) is None
    assert validate([1, 2], {"items": [{"type": "integer"}], "additionalItems": {"type": "string"}}) is not None
    assert validate(1, {"minimum": 1, "exclusiveMinimum": False}) is None
    assert validate(1, {"minimum": 1, "exclusiveMinimum": True}) is not None


def test_what_is_not_looked_at() -> None:
    """Stated in docs/tools.md."""
    assert validate("b", {"format": "date"}) is None
    assert validate("b", {"pattern": "(?=a)a"}) is None
    assert validate({"b": 1}, {"patternProperties": {"(?=a)a": False}, "additionalProperties": False}) is None
    assert validate({"b": 1}, {"unevaluatedProperties": False}) is None


@pytest.mark.parametrize(
    ("pattern", "text"), [("^(a+)+$", "a" * 5000 + "b"), ("^((a{0,100}){0,100}){0,100}$", "a" * 5000)]
)
def test_patterns_that_run_for_ever_elsewhere(pattern: str, text: str) -> None:
    started = time.process_time()
    validate(text, {"pattern": pattern})
    assert time.process_time() - started < 4


@pytest.mark.parametrize(
    ("schema", "value", "says"),
    [
        ({"multipleOf": "1e999999999"}, 5, "expected a number"),
        ({"items": {"enum": [*range(100_000), "x"]}}, ["x"] * 1000, None),
        ({"items": {"anyOf": [{"const": [0] * 500}] * 500}}, [[1] * 5000] * 100, "steps"),
        ({"allOf": [{"uniqueItems": True}] * 5000}, list(range(5000)), "steps"),
        ({"items": {"required": ["a"] * 50_000}}, [{"a": 1}] * 1000, "steps"),
        ({"patternProperties": {f"a{n}": {} for n in range(500)}}, {str(n): 1 for n in range(1000)}, "steps"),
        ({"pattern": "[a-z]?x?" * 100_000}, "x" * 500, None),
        ({"multipleOf": 1e-320}, 1e300, None),
    ],
)
def test_schemas_that_take_long(schema: Any, value: Any, says: str | None) -> None:
    """A client's schema, and a value that it makes the model write. Each took minutes, or never ended."""
    started = time.process_time()
    problem = validate(value, schema)
    assert problem is None if says is None else says in str(problem)
    assert time.process_time() - started < 5

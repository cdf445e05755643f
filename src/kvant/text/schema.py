"""Whether a JSON value satisfies a JSON schema (json-schema.org, draft 2020-12).

llguidance is no checker: a grammar demands the schema's order of keys, and refuses ``not``, ``uniqueItems`` and a
``format`` it does not know. The library jsonschema needs four others.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

MAX_DEPTH = 64  # of references and parts; a schema may refer to itself
MAX_STEPS = 100_000  # parts of a schema looked at; alternatives that refer to themselves double with each level
MAX_PATTERN = 4096  # characters of a regular expression: a longer one holds up all threads while it is compiled
A_STEP = 16  # names, values or characters that take about as long as a part of a schema

TYPES: Mapping[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def validate(value: Any, schema: Any) -> str | None:
    """What is wrong with a value, in a line; None: it satisfies the schema.

    References are followed inside the schema only. Not looked at are ``format``, ``unevaluatedProperties``,
    ``unevaluatedItems``, dynamic references, and regular expressions that are longer than 4096 characters or that
    llguidance does not take. A check that needs too many steps is ended: the schema, and the value, are a stranger's.
    """
    try:
        return next(_Check(schema).errors(value, schema, "", 0), None)
    except (TypeError, AttributeError, ValueError, ArithmeticError) as error:  # a schema that is none
        return f"the schema cannot be used: {error}"


class _Check:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = 0
        self._matchers: dict[str, Any] = {}
        self._allowed: dict[int, frozenset[Any]] = {}  # the values of an enum by its id: the schema keeps it alive

    def errors(self, value: Any, schema: Any, place: str, depth: int) -> Iterator[str]:
        """What is wrong with a part of the value, which is at this place."""
        at = place or "the value"
        self._spend()
        if depth > MAX_DEPTH:
            raise ValueError(f"it needs more than {MAX_DEPTH} levels")
        if schema is False:
            yield f"{at} is not allowed"
        elif isinstance(schema, Mapping):
            yield from self._kind(value, schema, at)
            yield from self._combined(value, schema, place, depth + 1)
            if isinstance(value, dict):
                yield from self._object(value, schema, place, depth + 1)
            elif isinstance(value, list):
                yield from self._array(value, schema, place, depth + 1)

    def _spend(self, steps: int = 1) -> None:
        """Count steps of the work.

        Raises:
            ValueError: there are too many.
        """
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise ValueError(f"it needs more than {MAX_STEPS} steps")

    def _fits(self, value: Any, schema: Any, depth: int) -> bool:
        return next(self.errors(value, schema, "", depth), None) is None

    def _combined(self, value: Any, schema: Mapping[str, Any], place: str, depth: int) -> Iterator[str]:
        at = place or "the value"
        if "$ref" in schema:
            yield from self.errors(value, self._referred(schema["$ref"]), place, depth)
        for part in schema.get("allOf", ()):
            yield from self.errors(value, part, place, depth)
        if "anyOf" in schema and not any(self._fits(value, part, depth) for part in schema["anyOf"]):
            yield f"{at} is none of what anyOf allows"
        if "oneOf" in schema and (count := sum(self._fits(value, part, depth) for part in schema["oneOf"])) != 1:
            yield f"{at} is {count} of what oneOf allows; expected 1"
        if "not" in schema and self._fits(value, schema["not"], depth):
            yield f"{at} is what the schema excludes"
        if "if" in schema:
            branch = "then" if self._fits(value, schema["if"], depth) else "else"
            yield from self.errors(value, schema.get(branch, True), place, depth)

    def _object(self, value: dict[str, Any], schema: Mapping[str, Any], place: str, depth: int) -> Iterator[str]:
        at = place or "the value"
        required = schema.get("required", ())
        self._spend(len(required) // A_STEP)
        for name in required:
            if name not in value:
                yield f"{at} lacks {name!r}"
        properties = schema.get("properties", {})
        patterns = schema.get("patternProperties", {})
        for name, item in value.items():
            inner = f"{place}.{name}" if place else name
            matches = {pattern: self._matches(pattern, name) for pattern in patterns}
            parts = [patterns[pattern] for pattern, fits in matches.items() if fits]
            parts += [properties[name]] if name in properties else []
            if not parts and None not in matches.values():
                parts = [schema.get("additionalProperties", True)]
            for part in parts:
                yield from self.errors(item, part, inner, depth)
            yield from self.errors(name, schema.get("propertyNames", True), f"the name {name!r}", depth)
            all_needed = schema.get("dependentRequired", {}).get(name, ())
            self._spend(len(all_needed) // A_STEP)
            for needed in all_needed:
                if needed not in value:
                    yield f"{at} has {name!r} and lacks {needed!r}"
            yield from self.errors(value, schema.get("dependentSchemas", {}).get(name, True), place, depth)
        yield from _bounds(len(value), schema, "Properties", at)

    def _array(self, value: list[Any], schema: Mapping[str, Any], place: str, depth: int) -> Iterator[str]:
        at = place or "the value"
        first = schema.get("prefixItems", ())
        rest = schema.get("items", True)
        if isinstance(rest, list):  # draft 7's form of prefixItems
            first, rest = rest, schema.get("additionalItems", True)
        for index, item in enumerate(value):
            yield from self.errors(item, first[index] if index < len(first) else rest, f"{place}[{index}]", depth)
        yield from _bounds(len(value), schema, "Items", at)
        if schema.get("uniqueItems") and len({self._identity(item) for item in value}) < len(value):
            yield f"{at} has an item twice"
        if "contains" in schema:
            count = sum(self._fits(item, schema["contains"], depth) for item in value)
            if not schema.get("minContains", 1) <= count <= schema.get("maxContains", math.inf):
                yield f"{at} has {count} items of what it has to contain"

    def _kind(self, value: Any, schema: Mapping[str, Any], at: str) -> Iterator[str]:
        """The keywords that look at one value alone."""
        wanted = schema.get("type")
        kinds = [wanted] if isinstance(wanted, str) else wanted
        if kinds is not None and not any(_is(value, kind) for kind in kinds):
            yield f"{at} is {_name(value)}; expected {' or '.join(map(str, kinds))}"
        if "enum" in schema and self._identity(value) not in self._values(schema["enum"]):
            yield f"{at} is none of {len(schema['enum'])} allowed values"
        if "const" in schema and self._identity(value) != self._identity(schema["const"]):
            yield f"{at} is not the value it has to be"
        if isinstance(value, str):
            yield from _bounds(len(value), schema, "Length", at)
            if "pattern" in schema and self._matches(schema["pattern"], value) is False:
                yield f"{at} does not match {schema['pattern']!r}"
        if _is(value, "number"):
            yield from _number(value, schema, at)

    def _values(self, enum: Sequence[Any]) -> frozenset[Any]:
        """The values of an enum, to be looked up."""
        if id(enum) not in self._allowed:
            self._allowed[id(enum)] = frozenset(map(self._identity, enum))
        return self._allowed[id(enum)]

    def _identity(self, value: Any) -> Any:
        """Equal for values that JSON schema calls equal: 1 and 1.0 are, 1 and true are not. It can be hashed."""
        if isinstance(value, dict):
            self._spend(len(value) // A_STEP)
            return "object", frozenset((name, self._identity(item)) for name, item in value.items())
        if isinstance(value, list):
            self._spend(len(value) // A_STEP)
            return "array", tuple(map(self._identity, value))
        return ("boolean" if isinstance(value, bool) else "value"), value

    def _matches(self, pattern: str, text: str) -> bool | None:
        """Whether a regular expression is found in a text, in linear time; None: it is not looked at.

        Python's own can run for ever, and it is a stranger's.
        """
        if not isinstance(pattern, str):
            raise TypeError(f"{pattern!r:.80} is no regular expression")
        if len(pattern) > MAX_PATTERN:
            return None
        if pattern not in self._matchers:
            self._spend(250 + len(pattern))
            self._matchers[pattern] = _matcher(pattern)
        self._spend(10 + len(text) // A_STEP)
        matcher = self._matchers[pattern].deep_copy()
        if matcher.is_error():
            return None
        written = list(json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f").encode())
        consumed = matcher.try_consume_tokens(written)
        return None if matcher.is_error() else consumed == len(written) and matcher.is_accepting()

    def _referred(self, reference: Any) -> Any:
        """The part of the schema that a JSON pointer names (RFC 6901).

        Raises:
            ValueError: there is none.
        """
        found = self._root
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise ValueError(f"$ref {reference!r}: expected a place in the same schema, such as '#/$defs/a'")
        for step in reference[1:].split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(name)] if isinstance(found, list) else found[name]
            except (KeyError, IndexError, ValueError, TypeError):
                raise ValueError(f"$ref {reference!r}: there is no such place in the schema") from None
        return found


def _number(value: float, schema: Mapping[str, Any], at: str) -> Iterator[str]:
    if value < schema.get("minimum", -math.inf) or value > schema.get("maximum", math.inf):
        yield f"{at} is {value}; expected {schema.get('minimum', '')} to {schema.get('maximum', '')}"
    if value <= _exclusive(schema, "Minimum", -math.inf) or value >= _exclusive(schema, "Maximum", math.inf):
        yield f"{at} is {value}, outside its bounds"
    step = schema.get("multipleOf")
    if step is not None and not _is(step, "number"):  # a fraction of the text "1e999999999" takes for ever
        raise TypeError(f"multipleOf is {step!r:.80}; expected a number")
    if step and Fraction(str(value)) % Fraction(str(step)):
        yield f"{at} is {value}; expected a multiple of {step}"


@lru_cache(maxsize=64)
def _matcher(pattern: str) -> Any:
    """Of JSON strings in which a regular expression is found. Every byte is a token."""
    from llguidance import LLMatcher, LLTokenizer  # only the server needs it, and has it

    schema = json.dumps({"type": "string", "pattern": pattern})
    return LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(schema), log_level=0)


def _exclusive(schema: Mapping[str, Any], end: str, default: float) -> float:
    bound = schema.get(f"exclusive{end}", default)
    if isinstance(bound, bool):  # draft 4: whether the other bound is in
        return float(schema.get(end.lower(), default)) if bound else default
    return float(bound)


def _bounds(size: int, schema: Mapping[str, Any], what: str, at: str) -> Iterator[str]:
    least, most = schema.get(f"min{what}", 0), schema.get(f"max{what}", math.inf)
    if not least <= size <= most:
        yield f"{at} has a size of {size}; expected {least} to {most}"


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return kind in TYPES and isinstance(value, TYPES[kind])


def _name(value: Any) -> str:
    return next(kind for kind in ("boolean", "integer", *TYPES) if _is(value, kind))

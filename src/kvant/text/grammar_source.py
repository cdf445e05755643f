"""Write constraints for llguidance: a JSON document with grammars in its variant of Lark's language.

Syntax: github.com/guidance-ai/llguidance, docs/syntax.md and docs/json_schema.md.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvant.errors import GrammarError, printable
from kvant.text.call_form import ToolFormat
from kvant.text.guidance import as_lark
from kvant.text.quoted_lark import quoted
from kvant.text.thinking import marks_of
from kvant.text.tokenizer import Tokenizer

Kind = Literal["json_object", "json_schema", "regex", "grammar", "tool_calls"]
Source = Mapping[str, Any] | str | bool  # a schema as an object or JSON text; text for other kinds

MAX_SOURCE = 64 * 1024  # bytes
# Do not force the tokens of forced text: the library would ask the tokenizer's process for each.
OPTIONS = '%llguidance {"no_forcing": true}'
# No whitespace in JSON: small models write it endlessly. A schema must not change these settings.
COMPACT = {"whitespace_flexible": False, "lenient": False, "coerce_one_of": False}
SPACED = {**COMPACT, "item_separator": ", ", "key_separator": ": "}  # as chat templates write calls
SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")  # schemas by name
ALTERNATIVES = ("anyOf", "oneOf")
# an object that uses these may list its properties in several places
OPEN = {"allOf", "if", "dependentSchemas", "unevaluatedProperties"}
LISTED = {"properties", "patternProperties", "required"}
SAYS_OTHERS = {
    "additionalProperties",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "$ref",
    *ALTERNATIVES,
}
CONSTANTS = ("const", "enum")
VALUES = (*CONSTANTS, "default", "examples")  # their values are not schemas
# Formats that the library enforces. JSON Schema treats formats as annotations, so others are dropped.
FORMATS = {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
CONTROL = re.compile(r"\\u00(?:[01]|7f)")  # in JSON: a control character without a short escape
MOST_EXACT = 2**63  # the library writes smaller integers exactly if a float64 can represent them
NEXT = 1e-12
# Comments, strings and regular expressions in a grammar. Their ends are optional, so that matching is linear.
QUOTED = re.compile(r'(?://|#)[^\n]*|"(?:\\.|[^"\\])*"?|/(?:\\.|[^/\\])*/?', re.DOTALL)
TEMPERATURE = re.compile(r"\btemperature\b\s*=")  # an attribute of rules
ANY_TEXT = "TEXT: /(?s:.*)/"


@dataclass(frozen=True, slots=True)
class ToolGrammar:
    """Tool calls that an answer must or may consist of."""

    form: ToolFormat
    # schemas of arguments by name, or a Lark grammar of the only argument, ``input``
    schemas: Mapping[str, Mapping[str, Any] | str]
    must: bool  # the answer must be calls; otherwise it is text, with or without calls
    several: bool  # there may be more than one call
    text: tuple[Kind, Source] | None = None  # constrains an answer that is not calls; None: any text


def build_tool_grammar(
    form: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    choice: Literal["auto", "required"] = "required",
    parallel: bool = True,
    text: tuple[Kind, Source] | None = None,
) -> ToolGrammar:
    """Build a source for :meth:`kvant.text.grammar.Grammars.compile`.

    Args:
        form: the format of the model's calls.
        tools: in OpenAI's format, with ``grammar`` instead of ``parameters`` for a tool whose only argument
            ``input`` must follow one. To force one tool, pass only that tool.
        choice: "required": the answer is calls. "auto": text that may contain calls; then arguments of tools
            that are ``strict`` satisfy their schemas, and other tools' may be any object.
        parallel: allow several calls if the format does.
        text: with "auto", kind and source of an answer that is not calls. Then all arguments satisfy their
            schemas.
    """
    if form.writing is None:
        raise GrammarError(f"calls in the form {form.name} cannot be forced: their arguments are not JSON")
    if not tools:
        raise GrammarError("there are no tools; expected at least one")
    check_size("list of tools", tools)
    schemas: dict[str, Mapping[str, Any] | str] = {}
    for tool in tools:
        function = tool["function"]
        bound = choice == "required" or text is not None or function.get("strict")
        schema = (function.get("parameters") or {}) if bound else {}
        schemas[function["name"]] = function.get("grammar") or {"type": "object", **schema}
    return ToolGrammar(form, schemas, choice == "required", parallel and form.several, text)


def check_size(kind: str, source: object) -> None:
    """Refuse a source that is too large before anything else reads it."""
    size = 0
    for item in _values(source):
        size += len(item) if isinstance(item, str) else 1
        if isinstance(item, Mapping | list | tuple):
            size += len(item)
        if isinstance(item, Mapping):
            size += sum(len(str(name)) for name in item)
        if size > MAX_SOURCE:
            raise GrammarError(f"the {kind} has more than {MAX_SOURCE} characters")


class Marked:
    """Write text in the grammar's language, using tokens for marks that are tokens of the vocabulary."""

    def __init__(self, tokenizer: Tokenizer, mark_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        names = tokenizer.convert_ids_to_tokens(mark_ids)
        self._ids = {name: token for name, token in zip(names, mark_ids, strict=True) if name}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._marks = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def text(self, text: str) -> str:
        """Write a literal text."""
        pieces = [piece for piece in self._marks.split(text) if piece]
        return " ".join(
            f"<[{self._ids[piece]}]>" if piece in self._ids else json.dumps(piece) for piece in pieces
        )

    def up_to(self, rule: str, mark: str) -> str:
        """Write a rule for any text up to a mark. A mark that begins with a token cannot match text."""
        if self._marks.match(mark):
            return f"{rule}: TEXT {self.text(mark)}"
        return f"{rule}[lazy]: /(?s:.*){escaped(mark)}/"


def document(kind: Kind, source: Source | ToolGrammar, marked: Marked, prompt: str | None) -> str:
    """Convert a source to a JSON document. Arguments: :meth:`kvant.text.grammar.Grammars.compile`'s."""
    try:
        first, *more = _grammars(kind, source, marked)
        thinking = None if prompt is None else _thinking(marked, prompt)
        if thinking is not None:
            more = [{"name": "answer", **first}, *more]
            first = _lark(thinking)
        made = json.dumps({"grammars": [first, *more]})
    except RecursionError:
        raise GrammarError(f"the {kind} is nested too deeply") from None
    if (size := len(made.encode())) > MAX_SOURCE:
        raise GrammarError(f"the {kind} has {size} bytes; expected at most {MAX_SOURCE}")
    return made


def _grammars(kind: Kind, source: Source | ToolGrammar, marked: Marked) -> list[dict[str, Any]]:
    """Return the grammar of an answer, and those to which it refers by name."""
    check_size(kind, list(source.schemas.items()) if isinstance(source, ToolGrammar) else source)
    named: list[dict[str, Any]] = []
    if isinstance(source, ToolGrammar) and source.text is not None and not source.must:
        calls, *more = _grammars("tool_calls", replace(source, must=True, text=None), marked)
        text, *others = _grammars(*source.text, marked)
        named = [{"name": "calls", **calls}, {"name": "text", **text}]
        return [_lark(["start: @calls | @text"]), *named, *more, *others]
    if isinstance(source, ToolGrammar):
        lines, named = _calls(source, marked)
    elif kind in ("json_object", "json_schema"):
        schema = {"type": "object"} if kind == "json_object" else _schema(source)
        lines = ["start: @json"]
        named = [_json("json", schema, COMPACT)]
    elif not isinstance(source, str) or kind == "tool_calls":
        raise GrammarError(f"the {kind} is a {type(source).__name__}; expected text")
    elif kind == "regex":
        lines = ["start: TEXT", f"TEXT: {as_lark(source)}"]
    else:
        lines = [_without_temperature(source)]
    return [_lark(lines), *named]


def _json(name: str, schema: Mapping[str, Any], how: Mapping[str, Any]) -> dict[str, Any]:
    """Return a grammar of JSON that follows a schema, under a name."""
    keywords = {key for item in _objects(schema) for key in item}
    exact = _exact(schema, closes=not OPEN & keywords)
    escapes = 'nrbtf\\"u'
    # If "a" is listed, the library would take "\u0061" for an unlisted name and apply another schema to its
    # value. So \u is not allowed in such a schema.
    if any(LISTED & set(item) and item.get("additionalProperties") is not False for item in _objects(exact)):
        escapes = escapes.removesuffix("u")
        constants = [item[key] for item in _objects(exact) for key in CONSTANTS if key in item]
        if CONTROL.search(json.dumps(constants)):
            message = "the json_schema's constants have a control character; expected none with open names"
            raise GrammarError(message)
    return {"name": name, "json_schema": exact | {"x-guidance": {**how, "json_allowed_escapes": escapes}}}


def _without_temperature(source: str) -> str:
    """Return a client's grammar; refuse one that says how to sample."""
    if TEMPERATURE.search(QUOTED.sub('""', source)):
        raise GrammarError("the grammar has a temperature; expected none: the request's temperature applies")
    return source


def _lark(lines: Sequence[str]) -> dict[str, Any]:
    return {"lark_grammar": "\n".join([*lines, OPTIONS])}


def _schema(source: object) -> Mapping[str, Any]:
    """Return a schema as an object."""
    try:
        schema = json.loads(source) if isinstance(source, str) else source
        json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise GrammarError(f"the json_schema is not JSON: {error}") from error
    if schema is True:
        return {}
    if not isinstance(schema, Mapping):
        raise GrammarError(f"the json_schema is {printable(repr(schema), 80)}; expected an object")
    return schema


def _values(value: Any) -> Iterator[Any]:
    """Yield a JSON value and every value inside it, outer values first."""
    left = [value]
    while left:
        item = left.pop()
        yield item
        if isinstance(item, Mapping):
            left += item.values()
        elif isinstance(item, list | tuple):
            left += item


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the JSON objects in a value: subschemas, and objects of subschemas by name."""
    return (item for item in _values(value) if isinstance(item, Mapping))


def unknown_formats(schema: object) -> set[str]:
    """Return the names of a schema's formats that no grammar enforces."""
    formats = (item.get("format") for item in _objects(schema))
    return {name for name in formats if isinstance(name, str) and name not in FORMATS}


def _exact(schema: Any, closes: bool) -> Any:
    """Return a schema without unknown formats, and stricter in two ways.

    The library allows 9 if a number must be above 9 and at most 9.5, so an exclusive bound becomes an
    inclusive one that is 1e-12 (relative to it) further.

    If ``closes``, an object that lists its properties has no others unless the schema says so, because a
    model would write one after another. OpenAI's strict mode and llama.cpp do the same.
    """
    if isinstance(schema, list):
        return [_exact(each, closes) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in SCHEMAS and isinstance(value, Mapping):
            made[key] = {name: _exact(each, closes) for name, each in value.items()}
        elif key in VALUES:
            if key in CONSTANTS:
                _check_numbers(key, value)
            made[key] = value
        elif key == "format" and isinstance(value, str) and value not in FORMATS:
            continue
        else:  # an alternative does not close the object to which it belongs
            made[key] = _exact(value, closes and not (key in ALTERNATIVES and "properties" in schema))
    if made.get("type") != "integer":
        _move(made, "Minimum", NEXT, max)
        _move(made, "Maximum", -NEXT, min)
    listed = made.get("properties")
    required = made.get("required", ())
    _check_least(made)
    if (
        closes
        and isinstance(listed, Mapping)
        and not SAYS_OTHERS & set(made)
        and isinstance(required, list | tuple)
        and all(isinstance(name, str) and name in listed for name in required)
    ):
        made["additionalProperties"] = False
    return made


def _check_least(schema: Mapping[str, Any]) -> None:
    """Refuse an object that needs several names of the model's choice: it could write one of them twice."""
    least = schema.get("minProperties")
    required = schema.get("required")
    is_open = schema.get("patternProperties") or schema.get("additionalProperties") is not False
    most = 1 + (len({*map(str, required)}) if isinstance(required, list | tuple) else 0)
    if is_open and isinstance(least, int) and least > most:
        raise GrammarError(
            f"the json_schema's minProperties is {least}; expected at most {most}, one more than are "
            "required: a name that is not required could come twice"
        )


def _check_numbers(key: str, value: Any) -> None:
    """Refuse integer constants that the library would change, since it reads numbers as float64."""
    for item in _values(value):
        if isinstance(item, int) and (abs(item) >= MOST_EXACT or float(item) != item):
            raise GrammarError(
                f"the json_schema's {key} has the integer {item!s:.40}, which cannot be represented exactly"
            )


def _move(schema: dict[str, Any], bound_name: str, by: float, strictest: Callable[[Any, Any], Any]) -> None:
    """Replace a schema's exclusive bound with an inclusive one."""
    exclusive = f"exclusive{bound_name}"
    inclusive = bound_name.lower()
    bound = schema.get(exclusive)
    other = schema.get(inclusive)
    if isinstance(bound, int | float) and not isinstance(bound, bool):
        del schema[exclusive]
        try:
            moved = bound + by * max(1, abs(bound))
        except OverflowError:
            raise GrammarError(f"the json_schema's {exclusive} is too large a number") from None
        schema[inclusive] = strictest(moved, other) if isinstance(other, int | float) else moved


def _calls(source: ToolGrammar, marked: Marked) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the lines of a grammar of tool calls, and the grammars of arguments to which they refer.

    llguidance's StructTag supports neither lists of calls nor required calls, and treats a mark inside a tag
    as text.
    """
    form = source.form
    writing = form.writing
    assert writing is not None
    rules = {name: f"tool{number}" for number, name in enumerate(source.schemas)}

    def call(name: str, cut: str = "") -> str:
        before = writing.before_name + json.dumps(name, ensure_ascii=False)[1:-1] + writing.before_arguments
        after = marked.text(writing.after_arguments)
        return f"{marked.text(before.removeprefix(cut))} @{rules[name]} {after}"

    lines = [f"call: {' | '.join(map(call, rules))}"]
    several = f"call ({marked.text(writing.between)} call)*" if source.several else "call"
    if source.must:
        lines.append(f"start: {marked.text(writing.begin)} {several} {marked.text(writing.end)}")
    else:
        # Free text is read up to and including the mark that begins calls.
        mark = next(
            (mark for mark in form.starts if (writing.begin or writing.before_name).startswith(mark)), ""
        )
        if writing.begin:
            begin = marked.text(writing.begin.removeprefix(mark))
            lines.append(f"rest: {begin} {several} {marked.text(writing.end)}")
        else:
            lines.append(f"rest: {' | '.join(call(name, mark) for name in rules)}")
        lines += _free(source, marked, mark)
    arguments = []
    for name, schema in source.schemas.items():
        arguments += (
            _input(rules[name], schema) if isinstance(schema, str) else [_json(rules[name], schema, SPACED)]
        )
    return lines, arguments


def _input(name: str, source: str) -> list[dict[str, Any]]:
    """Return the grammar of a JSON object with one text, ``input``, and that of the text."""
    lines = [rf'start: "{{\"input\": \"" @{name}_text "\"}}"']
    return [
        {"name": name, **_lark(lines)},
        {"name": f"{name}_text", **_lark([quoted(_without_temperature(source))])},
    ]


def _free(source: ToolGrammar, marked: Marked, mark: str) -> list[str]:
    """Return the lines of text that may contain calls; ``rest`` is calls without the mark that begins one."""
    form = source.form
    if not mark:  # the beginning of the answer shows whether it is a call
        marks = "".join(f" | {marked.text(start)} rest" for start in form.starts)
        first = re.escape(form.first)
        return [f"start: TEXT | rest{marks}", rf"TEXT: /\s*([^\s{first}](?s:.*))?/"]
    times = "*" if source.several else "?"
    return [f"start: (head rest){times} text", "text: TEXT", ANY_TEXT, marked.up_to("head", mark)]


def _thinking(marked: Marked, prompt: str) -> list[str] | None:
    """Return the lines of an answer that may start with thinking; None if the model has no marks for it."""
    marks = marks_of(marked.tokenizer)
    if marks is None:
        return None
    begun = " | ".join(map(marked.text, marks.starts))
    before = "thought SPACE" if marks.opened_by(prompt) else f"(({begun}) thought SPACE)?"
    left_out = f"({' | '.join(map(marked.text, marks.left_out))})?" if marks.left_out else ""
    return [
        f"start: {before} {left_out} @answer",
        marked.up_to("thought", marks.end),
        ANY_TEXT,
        r"SPACE: /\n{0,3}/",
    ]


def escaped(text: str) -> str:
    """Return a regular expression that matches exactly this text, in Rust's syntax or between slashes."""
    return re.sub(r"([\\.+*?()|\[\]{}^$#&\-~/])", r"\\\1", text)

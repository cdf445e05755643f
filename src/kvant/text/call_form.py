"""The basis of all formats of tool calls: find the end of a call as its text grows, and check the call."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

MAX_DEPTH = 64  # nesting of a call's JSON
Call = tuple[str, dict[str, Any]]  # name and arguments
Schemas = Mapping[str, Mapping[str, Any]]  # schemas of arguments by tool name


class NoCallError(Exception):
    """Raised for text that began like a call but is not one."""

    def __init__(self, reason: str, length: int) -> None:
        super().__init__(reason)
        self.length = length  # characters that are text; a call may begin after them


class Reader(ABC):
    """Find the end of one call, or list of calls, as its text grows."""

    @abstractmethod
    def end(self, text: str, is_all: bool) -> int | None:
        """Return how many characters are calls, or None if that is not yet known.

        Args:
            text: starts at the mark that begins the calls. Each time it is the previous text plus what came
                since.
            is_all: whether no more text will come.
        """


@dataclass(frozen=True, slots=True)
class Writing:
    """How a grammar writes calls: begin, calls separated by ``between``, end.

    A call is before_name, its name, before_arguments, its arguments as a JSON object, and after_arguments.
    """

    before_name: str
    before_arguments: str
    after_arguments: str
    between: str = "\n"
    begin: str = ""
    end: str = ""


class ToolFormat(ABC):
    """One format of tool calls."""

    name: ClassVar[str]
    starts: ClassVar[tuple[str, ...]]  # marks that may begin calls anywhere in an answer
    first: ClassVar[str] = ""  # begins calls at the start of an answer; "": nothing does
    # Begins a call without a mark if it starts a line, and a tool's name and ">" follow; "": nothing does.
    head: ClassVar[str] = ""
    several: ClassVar[bool] = True  # whether an answer may have more than one call
    text_arguments: ClassVar[bool] = False  # whether the template expects arguments as JSON text
    writing: Writing | None = None  # None: arguments are not JSON, and calls cannot be forced

    @abstractmethod
    def reader(self) -> Reader:
        """Return a reader for the next calls of an answer."""

    @abstractmethod
    def read(self, text: str, tools: Schemas) -> list[Call]:
        """Parse a text whose end a reader found; the calls are not checked yet."""

    def call_id(self, proposed: str, name: str, number: int) -> str:
        """Return an id that the template accepts for a conversation's ``number``-th call."""
        return proposed

    def calls(self, text: str, tools: Schemas) -> list[Call]:
        """Parse with :meth:`read`, and check that the tools are known and their arguments are objects."""
        try:
            calls = self.read(text, tools)
            for name, arguments in calls:
                if not isinstance(name, str) or name not in tools:
                    raise ValueError(f"a call of {name!r}, which is not a tool")
                if not isinstance(arguments, dict):
                    raise ValueError(f"{name}: the arguments are not an object")
                # fails for numbers that JSON cannot represent, and for lone surrogates
                to_json(arguments).encode()
            if not calls:
                raise ValueError("no calls")
        except (ValueError, RecursionError) as error:
            raise NoCallError(str(error), len(text)) from error
        return calls


def schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the JSON schemas of arguments by tool name, for tools in OpenAI's format."""
    functions = [tool["function"] for tool in tools]
    return {function["name"]: function.get("parameters") or {"type": "object"} for function in functions}


def to_json(arguments: Mapping[str, Any]) -> str:
    """Return arguments as JSON text in one line."""
    return json.dumps(arguments, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class JsonForm(ToolFormat):
    """A format with a JSON object or list after a mark."""

    keys: ClassVar[tuple[str, ...]] = ()  # allowed first keys of the object; (): any
    end: ClassVar[str] = ""  # the mark after it; an answer may end before the mark
    needs_end: ClassVar[bool] = True  # whether anything else after it makes it text

    def reader(self) -> Reader:
        return _JsonReader(self)

    def json_start(self, text: str, is_all: bool) -> int | None:
        """Return the position of the first bracket, or None if that is not yet known."""
        start = len(self.starts[0]) if text.startswith(self.starts[0]) else 0
        at = skip_space(text, start)
        if at == len(text) and not is_all:
            return None
        may_be("{", text, at, start)
        return at


class _JsonReader(Reader):
    """Find the end of JSON by brackets, strings and the first key only, so that other text is known early."""

    def __init__(self, form: JsonForm) -> None:
        self._form = form
        self._keys = tuple(f'"{key}"' for key in form.keys)
        self._start: int | None = None
        self._at = self._depth = 0
        self._in_string = False
        self._end: int | None = None  # end of the JSON

    def end(self, text: str, is_all: bool) -> int | None:
        if self._start is None:
            self._start = self._form.json_start(text, is_all)
            if self._start is None:
                return None
            self._at = self._start
        if self._end is None:
            if self._keys:
                self._check_key(text, self._start + 1)
            self._end = self._find(text)
        if self._end is None:
            if is_all:
                raise NoCallError("the answer ends inside a call", len(text))
            return None
        at = skip_space(text, self._end)
        mark = self._form.end
        if not mark or not (self._form.needs_end or mark.startswith(text[at : at + len(mark)])):
            return self._end
        if not may_be_any((mark,), text, at) and may_be_any(self._form.starts, text, at):
            is_another = is_all or text.startswith(self._form.starts, at)
            return self._end if is_another else None
        end = may_be(mark, text, at, self._end)
        # A model may end its answer without the mark; the call is complete.
        return len(text) if end is None and is_all else end

    def _check_key(self, text: str, start: int) -> None:
        at = skip_space(text, start)
        begun = text[at : at + max(map(len, self._keys))]
        if begun.startswith(self._keys):
            self._keys = ()
        elif not any(key.startswith(begun) for key in self._keys):
            raise NoCallError("an object that is not a call", start)

    def _find(self, text: str) -> int | None:
        while True:
            match = (_IN_STRING if self._in_string else _STRUCTURE).search(text, self._at)
            if match is None:
                # A backslash at the end belongs to the next character.
                begun = self._in_string and len(text) > self._at and text.endswith("\\")
                self._at = len(text) - begun
                return None
            self._at = match.end()
            mark = match[0]
            if mark == '"':
                self._in_string = not self._in_string
            elif mark in "{[":
                self._depth += 1
            elif mark in "}]":
                self._depth -= 1
            if self._depth == 0:
                return self._at
            if self._depth > MAX_DEPTH:
                raise NoCallError(f"JSON nested deeper than {MAX_DEPTH}", self._at)


_STRUCTURE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'\\.|"', re.DOTALL)
_SPACE = re.compile(r"\s*")


def skip_space(text: str, at: int) -> int:
    """Return the position of the first character from ``at`` on that is not whitespace."""
    # A regular expression: models may write endless blanks, which are skipped again at each token.
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def may_be(mark: str, text: str, at: int, otherwise: int) -> int | None:
    """Return the position after a mark at ``at``, or None if the text ends inside it."""
    if text.startswith(mark, at):
        return at + len(mark)
    if not mark.startswith(text[at : at + len(mark)]):
        raise NoCallError(f"no {mark} where it was expected", otherwise)
    return None


def may_be_any(marks: Sequence[str], text: str, at: int) -> bool:
    """Whether one of the marks is at a position in the text, or may be once there is more text."""
    return any(mark.startswith(text[at : at + len(mark)]) for mark in marks)


def load_json(text: str) -> Any:
    """Parse a call's JSON. Strings may contain raw line breaks, as models write them; NaN is refused."""
    return json.loads(text, strict=False, parse_constant=_constant)


def call_of(value: Any, *keys: str) -> Call:
    """Make a call from a JSON value whose arguments are under one of the keys."""
    if not isinstance(value, dict) or value.keys() - {"name", "id", "type", *keys}:
        raise ValueError("not an object with a name and arguments")
    arguments = [value[key] for key in keys if key in value]
    if len(arguments) > 1:
        raise ValueError("arguments twice")
    return value.get("name", ""), arguments[0] if arguments else {}


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")

"""What every form of tool calls has: where a call ends as its text grows, and that its tool can take it."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

MAX_DEPTH = 64  # of a call's JSON
Call = tuple[str, dict[str, Any]]  # a name and arguments
Schemas = Mapping[str, Mapping[str, Any]]  # of arguments, by the tool's name


class NoCallError(Exception):
    """Text that began as a call does is none."""

    def __init__(self, reason: str, length: int) -> None:
        super().__init__(reason)
        self.length = length  # characters of it that are text; a call may begin after them


class Reader(ABC):
    """Finds the end of one call, or list of calls, as its text grows."""

    @abstractmethod
    def end(self, text: str, is_all: bool) -> int | None:
        """How many characters of a text are calls; None: not known yet, unless nothing more comes
        (``is_all``).

        ``text``: from the mark that begins the calls. Each time it is the one before and what came since.
        """


@dataclass(frozen=True, slots=True)
class Writing:
    """How calls are written, for a grammar: begin, calls with ``between`` between them, end.

    A call is before_name, its name, before_arguments, its arguments as a JSON object, after_arguments.
    """

    before_name: str
    before_arguments: str
    after_arguments: str
    between: str = "\n"
    begin: str = ""
    end: str = ""


class ToolFormat(ABC):
    """One form of tool calls."""

    name: ClassVar[str]
    starts: ClassVar[tuple[str, ...]]  # texts that may begin calls anywhere in an answer
    first: ClassVar[str] = ""  # one that may begin them where an answer begins; "": none
    # Begins a call without a mark, at the start of a line, if a tool's name and ">" follow it; "": none.
    head: ClassVar[str] = ""
    several: ClassVar[bool] = True  # an answer may have more than one call
    text_arguments: ClassVar[bool] = False  # the template takes arguments as JSON text
    writing: Writing | None = None  # None: arguments are not JSON, and calls cannot be forced

    @abstractmethod
    def reader(self) -> Reader:
        """For the next calls of an answer."""

    @abstractmethod
    def read(self, text: str, tools: Schemas) -> list[Call]:
        """The calls of a text that a reader found the end of, not checked yet."""

    def call_id(self, given: str, name: str, number: int) -> str:
        """The id of the ``number``-th call of a conversation, as the template takes it: any."""
        return given

    def calls(self, text: str, tools: Schemas) -> list[Call]:
        """:meth:`read`, and each call checked: its tool is known, and its arguments are an object."""
        try:
            found = self.read(text, tools)
            for name, arguments in found:
                if not isinstance(name, str) or name not in tools:
                    raise ValueError(f"a call of {name!r}, which is no tool")
                if not isinstance(arguments, dict):
                    raise ValueError(f"{name}: the arguments are no object")
                # fails at a number that JSON cannot write, and at half of a character
                to_json(arguments).encode()
            if not found:
                raise ValueError("no calls")
        except (ValueError, RecursionError) as error:
            raise NoCallError(str(error), len(text)) from error
        return found


def schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The JSON schemas of arguments by the tools' names, of tools in OpenAI's form."""
    functions = [tool["function"] for tool in tools]
    return {function["name"]: function.get("parameters") or {"type": "object"} for function in functions}


def to_json(arguments: Mapping[str, Any]) -> str:
    """Arguments as JSON text, in one line."""
    return json.dumps(arguments, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class JsonForm(ToolFormat):
    """A form whose calls are a JSON object or list behind a mark."""

    keys: ClassVar[tuple[str, ...]] = ()  # the first key of the object is one of them; (): any
    end: ClassVar[str] = ""  # the mark behind it; an answer may end before it
    needs_end: ClassVar[bool] = True  # what is no such mark makes it text

    def reader(self) -> Reader:
        return _JsonReader(self)

    def json_start(self, text: str, is_all: bool) -> int | None:
        """The place of its first bracket; None: not known yet."""
        start = len(self.starts[0]) if text.startswith(self.starts[0]) else 0
        at = skip_space(text, start)
        if at == len(text) and not is_all:
            return None
        may_be("{", text, at, start)
        return at


class _JsonReader(Reader):
    """Only brackets and strings are looked at, and the first key: so text that only begins as a call is
    known early.
    """

    def __init__(self, form: JsonForm) -> None:
        self._form = form
        self._keys = tuple(f'"{key}"' for key in form.keys)
        self._start: int | None = None
        self._at = self._depth = 0
        self._in_string = False
        self._end: int | None = None  # of the JSON

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
        # A model may end its answer without the mark. The call is whole.
        return len(text) if end is None and is_all else end

    def _check_key(self, text: str, start: int) -> None:
        at = skip_space(text, start)
        begun = text[at : at + max(map(len, self._keys))]
        if begun.startswith(self._keys):
            self._keys = ()
        elif not any(key.startswith(begun) for key in self._keys):
            raise NoCallError("an object that is no call", start)

    def _find(self, text: str) -> int | None:
        while True:
            found = (_IN_STRING if self._in_string else _STRUCTURE).search(text, self._at)
            if found is None:
                # A backslash at the end goes with the character to come.
                begun = self._in_string and len(text) > self._at and text.endswith("\\")
                self._at = len(text) - begun
                return None
            self._at = found.end()
            mark = found[0]
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
    """The place of the first character from there on that is no whitespace."""
    # a model may write blanks without end, and they are skipped again at each token
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def may_be(mark: str, text: str, at: int, otherwise: int) -> int | None:
    """The place after a mark that is at a place; None: the text ends in it."""
    if text.startswith(mark, at):
        return at + len(mark)
    if not mark.startswith(text[at : at + len(mark)]):
        raise NoCallError(f"no {mark} where it was expected", otherwise)
    return None


def may_be_any(marks: Sequence[str], text: str, at: int) -> bool:
    """Return whether one of the marks is at a place in the text, or may be once there is more text."""
    return any(mark.startswith(text[at : at + len(mark)]) for mark in marks)


def load_json(text: str) -> Any:
    """A call's JSON. Line breaks may stand in strings as they are, as models write them; NaN is refused."""
    return json.loads(text, strict=False, parse_constant=_constant)


def call_of(value: Any, *keys: str) -> Call:
    """A call of a JSON value; its arguments have one of the keys."""
    if not isinstance(value, dict) or value.keys() - {"name", "id", "type", *keys}:
        raise ValueError("not an object with a name and arguments")
    given = [value[key] for key in keys if key in value]
    if len(given) > 1:
        raise ValueError("arguments twice")
    return value.get("name", ""), given[0] if given else {}


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")

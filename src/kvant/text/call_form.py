"""What every form of tool calls has: where a call ends as its text grows, and that its tool can take it."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NoReturn

MAX_DEPTH = 64  # of a call's JSON
Call = tuple[str, dict[str, Any]]  # a name and arguments
Schemas = Mapping[str, Mapping[str, Any]]  # of arguments, by the tool's name


class NoCallError(Exception):
    """Text that began as a call does is none.

    Attributes:
        length: characters of it that are text; a call may begin after them.
    """

    def __init__(self, reason: str, length: int) -> None:
        super().__init__(reason)
        self.length = length


class Reader(ABC):
    """Finds the end of one call, or list of calls, as its text grows."""

    @abstractmethod
    def end(self, text: str, is_all: bool) -> int | None:
        """How many characters of a text are calls; None: not known yet, unless nothing more comes (``is_all``).

        ``text``: from the mark that begins the calls. Each time it is the one before and what came since.
        """


@dataclass(frozen=True, slots=True)
class Writing:
    """How calls are written, for a grammar: begin, calls with ``between`` between them, end.

    A call is before_name, its name, before_arguments, its arguments, after_arguments.

    Attributes:
        arguments: a JSON object; or, of Qwen3-Coder, an XML element for each.
    """

    before_name: str
    before_arguments: str
    after_arguments: str
    between: str = "\n"
    begin: str = ""
    end: str = ""
    arguments: Literal["json", "xml"] = "json"


class ToolFormat(ABC):
    """One form of tool calls.

    Attributes:
        name: of the form.
        starts: texts that may begin calls anywhere in an answer.
        first: one that may begin them where an answer begins; "": none.
        several: an answer may have more than one call.
        writing: how they are written.
        text_arguments: the template takes arguments as JSON text.
    """

    name: ClassVar[str]
    starts: ClassVar[tuple[str, ...]]
    first: ClassVar[str] = ""
    several: ClassVar[bool] = True
    text_arguments: ClassVar[bool] = False
    writing: Writing

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
                _check(name, arguments, tools)
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


def _check(name: object, arguments: object, tools: Schemas) -> None:
    if not isinstance(name, str) or name not in tools:
        raise ValueError(f"a call of {name!r}, which is no tool")
    if not isinstance(arguments, dict):
        raise ValueError(f"{name}: the arguments are no object")
    to_json(arguments).encode()  # fails at a number that JSON cannot write, and at half of a character


class JsonEnd:
    """Finds the end of a JSON object or list. Only brackets and strings are looked at; its text is read later."""

    def __init__(self, start: int, keys: Sequence[str] = ()) -> None:
        """Of one whose first bracket is at ``start``; of an object, the first key is one of ``keys`` if there are any.

        So text that only begins as a call does is known early.
        """
        self._start = self._at = start
        self._keys = [f'"{key}"' for key in keys]
        self._depth = 0
        self._in_string = False
        self._end: int | None = None

    def end(self, text: str, is_all: bool) -> int | None:
        """Where it ends in a text that has grown; None: not yet."""
        if self._end is None:
            self._check_key(text)
            self._end = self._find(text)
        if self._end is None and is_all:
            raise NoCallError("the answer ends inside a call", len(text))
        return self._end

    def _check_key(self, text: str) -> None:
        if not self._keys:
            return
        at = skip_space(text, self._start + 1)
        begun = text[at : at + max(map(len, self._keys))]
        if not any(begun.startswith(key) or key.startswith(begun) for key in self._keys):
            raise NoCallError("an object that is no call", self._start + 1)
        if any(begun.startswith(key) for key in self._keys):
            self._keys = []

    def _find(self, text: str) -> int | None:
        while True:
            found = (_IN_STRING if self._in_string else _STRUCTURE).search(text, self._at)
            if found is None:
                # A backslash at the end goes with the character to come.
                begun = self._in_string and len(text) > self._at and text.endswith("\\")
                self._at = len(text) - begun
                return None
            self._at, mark = found.end(), found[0]
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


def skip_space(text: str, at: int) -> int:
    """The place of the first character from there on that is no whitespace."""
    while text[at : at + 1].isspace():
        at += 1
    return at


def may_be(mark: str, text: str, at: int, otherwise: int) -> int | None:
    """The place after a mark that is at a place; None: the text ends in it."""
    if text.startswith(mark, at):
        return at + len(mark)
    if not mark.startswith(text[at : at + len(mark)]):
        raise NoCallError(f"no {mark} where it was expected", otherwise)
    return None


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

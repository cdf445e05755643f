"""Forms in which models write tool calls: which one a model has, where a call ends, and its name and arguments.

Calls are read here and not by mlx-lm's parsers, as those take whole texts and change values: see docs/tools.md.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from kvant.text.schema import validate
from kvant.text.template import choose_template
from kvant.text.tokenizer import Tokenizer

MAX_DEPTH = 64  # of a call's JSON
Call = tuple[str, dict[str, Any]]  # a name and arguments


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
        """How many characters of a text are calls; None: not known yet.

        Args:
            text: from the mark that begins the calls. Each time it is the one before and what came since.
            is_all: nothing more comes.

        Raises:
            NoCallError: it can no longer become a call.
        """


class ToolFormat(ABC):
    """One form of tool calls.

    Attributes:
        name: of the form.
        starts: texts that may begin calls anywhere in an answer.
        first: one that may begin them where an answer begins; "": none.
        several: an answer may have more than one call.
    """

    name: ClassVar[str]
    starts: tuple[str, ...]
    first: str = ""
    several: bool = True

    @abstractmethod
    def reader(self) -> Reader:
        """For the next calls of an answer."""

    @abstractmethod
    def read(self, text: str, tools: Mapping[str, Mapping[str, Any]]) -> list[Call]:
        """The calls of a text that a reader found the end of, not checked yet.

        Args:
            tools: the JSON schemas of arguments by the tools' names.

        Raises:
            ValueError, RecursionError: it is no call.
        """

    def calls(self, text: str, tools: Mapping[str, Mapping[str, Any]]) -> list[Call]:
        """:meth:`read`, and each call checked.

        Raises:
            NoCallError: not a call, an unknown tool, or arguments that do not satisfy its schema.
        """
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


def tool_format(tokenizer: Tokenizer) -> ToolFormat | None:
    """The form of a model's tool calls by its chat template; None: it knows no tools, or the form is not known here."""
    if not tokenizer.has_chat_template:
        return None
    template = choose_template(tokenizer.chat_template, None, ())
    if not re.search(r"\btools\b", template):
        return None
    if "<tool_call>" in template and '"arguments"' in template:
        return Hermes()
    return None


def _check(name: object, arguments: object, tools: Mapping[str, Mapping[str, Any]]) -> None:
    if not isinstance(name, str) or name not in tools:
        raise ValueError(f"a call of {name!r}, which is no tool")
    if not isinstance(arguments, dict):
        raise ValueError(f"{name}: the arguments are no object")
    if wrong := validate(arguments, tools[name]):
        raise ValueError(f"{name}: {wrong}")
    to_json(arguments).encode()  # a number that JSON cannot write, or half of a character


class JsonEnd:
    """Finds the end of one JSON object or list. Its text is checked later: here only brackets and strings count."""

    def __init__(self, start: int) -> None:
        """``start``: where its first bracket is."""
        self._start = self._at = start
        self._depth = 0
        self._in_string = False

    def end(self, text: str) -> int | None:
        """Where it ends in a text that has grown; None: not yet.

        Raises:
            NoCallError: it is nested too deeply.
        """
        while True:
            pattern = _IN_STRING if self._in_string else _STRUCTURE
            found = pattern.search(text, self._at)
            if found is None:
                # A backslash at the end goes with the character to come.
                begun = self._in_string and text.endswith("\\") and len(text) > self._at
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


class Hermes(ToolFormat):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Qwen2.5, Qwen3, Hermes."""

    name = "hermes"
    starts = ("<tool_call>",)

    def reader(self) -> Reader:
        return _HermesReader()

    def read(self, text: str, tools: Mapping[str, Mapping[str, Any]]) -> list[Call]:
        body = text.removeprefix("<tool_call>").strip().removesuffix("</tool_call>")
        return [_call(load_json(body), "arguments")]


class _HermesReader(Reader):
    def __init__(self) -> None:
        self._json: JsonEnd | None = None
        self._json_end: int | None = None

    def end(self, text: str, is_all: bool) -> int | None:
        start = len("<tool_call>")
        if self._json is None:
            at = skip_space(text, start)
            if at == len(text) and not is_all:
                return None
            if not text.startswith("{", at):
                raise NoCallError("no object follows the mark", start)
            self._json = JsonEnd(at)
        if self._json_end is None:
            self._json_end = self._json.end(text)
        if self._json_end is None:
            return None if not is_all else fail("the answer ends inside a call", len(text))
        at = skip_space(text, self._json_end)
        mark = "</tool_call>"
        if text.startswith(mark, at):
            return at + len(mark)
        if not mark.startswith(text[at:]):
            raise NoCallError("no mark ends the call", self._json_end)
        # A model may end its answer without the mark: the call is whole.
        return len(text) if is_all else None


def skip_space(text: str, at: int) -> int:
    """The place of the first character from there on that is no whitespace."""
    return len(text) - len(text[at:].lstrip())


def fail(reason: str, length: int) -> NoReturn:
    """Raise a :class:`NoCallError`."""
    raise NoCallError(reason, length)


def load_json(text: str) -> Any:
    """A call's JSON. Line breaks may stand in strings as they are, as models write them; NaN is refused.

    Raises:
        ValueError, RecursionError: not JSON.
    """
    return json.loads(text, strict=False, parse_constant=_constant)


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _call(value: Any, key: str) -> Call:
    if not isinstance(value, dict) or "name" not in value or value.keys() - {"name", key, "id", "type"}:
        raise ValueError("not a call")
    return value["name"], value.get(key, {})

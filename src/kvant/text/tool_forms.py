"""The formats in which models write tool calls.

mlx-lm's parsers (0.32.2) cannot replace these readers: they change values, such as an integer of 20 digits,
drop unexpected text, take 3 s to import, and fail 25 tests of calls.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any, ClassVar

from kvant.errors import PromptError
from kvant.text.answer_parts import AnswerParts
from kvant.text.call_form import (
    Call,
    JsonForm,
    NoCallError,
    Reader,
    Schemas,
    ToolFormat,
    Writing,
    call_of,
    load_json,
    may_be,
    may_be_any,
    skip_space,
    to_json,
)
from kvant.text.stream import CallPart
from kvant.text.tokenizer import Tokenizer


class Hermes(JsonForm):
    """Qwen2.5, Qwen3 and Hermes: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

    name = "hermes"
    starts = ("<tool_call>",)
    keys = ("name", "arguments")
    end = "</tool_call>"
    writing = Writing('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>")

    def read(self, text: str, tools: Schemas) -> list[Call]:
        body = text[len("<tool_call>") : text.rindex("}") + 1]
        return [call_of(load_json(body), "arguments")]


class QwenCoder(ToolFormat):
    """Qwen3-Coder: ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``.

    The model often leaves out ``<tool_call>``, and sometimes ``</tool_call>`` before another call.
    """

    name = "qwen3_coder"
    starts = ("<tool_call>",)
    head = "<function="

    def reader(self) -> Reader:
        return _QwenCoderReader()

    def read(self, text: str, tools: Schemas) -> list[Call]:
        text, _, end = text.rpartition("</function>")
        match = _FUNCTION.fullmatch(text)
        if match is None or not "</tool_call>".startswith(end.lstrip()):
            raise ValueError("not a function")
        name = match[1]
        rest = match[2]
        schema = tools.get(name, {})
        arguments: dict[str, Any] = {}
        while rest.strip():
            parameter = _PARAMETER.match(rest)
            if parameter is None or parameter[1] in arguments:
                raise ValueError(f"{name}: not a parameter, or one twice")
            arguments[parameter[1]] = _value(parameter[2], parameter[1], schema)
            rest = rest[parameter.end() :]
        return [(name, arguments)]


# A value may contain marks unless they are followed by what can follow a value.
_FUNCTION = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\s]+)\s*>(.*)", re.DOTALL)
_PARAMETER = re.compile(
    r"\s*<parameter=([^<>\s]+)\s*>\n?(.*?)\n?</parameter>(?=\s*<parameter=|\s*\Z)", re.DOTALL
)
# searched at each token, so the length of a name is limited
_FUNCTION_BEGUN = re.compile(r"<function=[^<>\s]{1,256}\s*>\s*")
_CODER_BEGINS = ("<tool_call>", "<function=")  # may begin another call


class _QwenCoderReader(Reader):
    def __init__(self) -> None:
        self._at = 0  # the end is not before it

    def end(self, text: str, is_all: bool) -> int | None:
        start = len("<tool_call>") if text.startswith("<tool_call>") else 0
        at = skip_space(text, start)
        begun = None
        if may_be("<function=", text, at, start) is not None:
            begun = _FUNCTION_BEGUN.match(text, at)
        if begun is None:
            return len(text) if is_all else None
        if not may_be_any(("<parameter=", "</function>"), text, begun.end()):
            raise NoCallError("neither a parameter nor the end", begun.end())
        self._at = max(self._at, begun.end())
        while (match_at := text.find("</function>", self._at)) >= 0:
            end = match_at + len("</function>")
            following = skip_space(text, end)
            if text.startswith("</tool_call>", following):
                return following + len("</tool_call>")
            if not is_all and may_be_any(("</tool_call>", *_CODER_BEGINS), text, following):
                return None
            if is_all and may_be_any(("</tool_call>",), text, following):
                return len(text)
            # A call with <tool_call> but without </tool_call> ends only before another call. A call without
            # <tool_call> ends here whatever follows.
            is_end = not start or may_be_any(_CODER_BEGINS, text, following)
            if is_end and _ends_with_value(text, begun.end(), match_at):
                return end
            self._at = end
        self._at = max(self._at, len(text) - len("</function>"))
        return len(text) if is_all else None


def _ends_with_value(text: str, start: int, end: int) -> bool:
    """Whether the arguments from ``start`` to ``end`` are empty or end like a parameter."""
    while end > start and text[end - 1].isspace():
        end -= 1
    return end == start or text.endswith("</parameter>", start, end)


def _value(text: str, name: str, schema: Mapping[str, Any]) -> Any:
    """Convert a parameter's text by its schema, since the format does not distinguish 1 from "1"."""
    listed = schema.get("properties")
    subschema = (
        listed.get(name)
        if isinstance(listed, Mapping) and name in listed
        else schema.get("additionalProperties")
    )
    read = _read(text)
    types = _types(subschema, schema, (text, read))
    kinds = {TYPES[type(read)]}
    if isinstance(read, int | float) and not isinstance(read, bool):
        kinds |= {"number", "integer"} if read == read // 1 else {"number"}
    # If a string would do, a number stays a string. A list, an object and null do not.
    if isinstance(read, bool | int | float) and (not types or "string" in types):
        return text
    return read if not types or kinds & types else text


TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
TYPES[type(None)] = "null"


def _types(schema: Any, root: Mapping[str, Any], values: tuple[Any, ...]) -> set[str]:
    """Return the JSON types that a schema or its alternatives allow; of an enum, those of ``values``.

    An empty set means any type.
    """
    types: set[str] = set()
    seen: set[int] = set()  # ids of schemas, which may refer to themselves
    left = [schema]
    while left:
        schema = left.pop()
        if not isinstance(schema, Mapping) or id(schema) in seen:
            continue
        seen.add(id(schema))
        kinds = schema.get("type")
        types |= {each for each in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(each, str)}
        allowed = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
        types |= {TYPES[type(each)] for each in allowed if each in values}
        left += [*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))]
        match str(schema.get("$ref")).split("/"):
            case ["#", group, name] if isinstance(root.get(group), Mapping):
                left.append(root[group].get(name))
    return types


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _read(text: str) -> Any:
    """Parse a value as JSON or as a Python literal, which Qwen3-Coder's template writes; else it is text."""
    for form in (text, _PYTHON.sub(_as_json, text)):
        try:
            read = load_json(form)
        except (ValueError, RecursionError):
            continue
        return text if isinstance(read, str) else read  # the format writes strings without quotes
    return text


# A string's end is optional, so that matching is linear; an unterminated string is not valid JSON.
_PYTHON = re.compile(r"""'(?:\\.|[^'\\])*'?|"(?:\\.|[^"\\])*"?|True|False|None""", re.DOTALL)
_ESCAPED = re.compile(r"""\\.|["\n]""", re.DOTALL)
_IN_JSON = {"\\'": "'", "\\x": "\\u00", '"': '\\"', "\n": "\\n"}


def _as_json(match: re.Match[str]) -> str:
    literal = match[0]
    if literal[0] not in "'\"":
        return {"True": "true", "False": "false", "None": "null"}[literal]
    return '"' + _ESCAPED.sub(lambda piece: _IN_JSON.get(piece[0], piece[0]), literal[1:-1]) + '"'


class Mistral(JsonForm):
    """Mistral: ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``; also reads its later format."""

    name = "mistral"
    starts = ("[TOOL_CALLS]",)

    def __init__(self, space: str = " ") -> None:
        """``space``: the text after the mark."""
        self.writing = Writing(
            '{"name": "', '", "arguments": ', "}", ", ", begin=f"[TOOL_CALLS]{space}[", end="]"
        )

    def call_id(self, proposed: str, name: str, number: int) -> str:
        """Return nine letters and digits, always the same for the same id."""
        if len(proposed) == 9 and proposed.isascii() and proposed.isalnum():
            return proposed
        return hashlib.sha256(proposed.encode("utf-8", "surrogatepass")).hexdigest()[:9]

    def json_start(self, text: str, is_all: bool) -> int | None:
        start = len("[TOOL_CALLS]")
        at = skip_space(text, start)
        if text.startswith("[", at):
            return at
        header = _HEADER.match(text, at)
        if header and header.end() < len(text):
            may_be("{", text, header.end(), start)
            return header.end()
        if is_all or not (header or _HEADER_BEGUN.fullmatch(text, at)):
            raise NoCallError("neither a list nor a name and arguments", start)
        return None

    def read(self, text: str, tools: Schemas) -> list[Call]:
        body = text.removeprefix("[TOOL_CALLS]").strip()
        if body.startswith("["):
            return [call_of(value, "arguments") for value in load_json(body)]
        match = _HEADER.match(body)
        if match is None:
            raise ValueError("not a call")
        return [(match[1], load_json(body[match.end() :]))]


class MistralArgs(Mistral):
    """Mistral since 2025: ``[TOOL_CALLS]NAME[ARGS]{...}``, once for each call."""

    name = "mistral_args"

    def __init__(self) -> None:
        self.writing = Writing("", "[ARGS]", "", "[TOOL_CALLS]", begin="[TOOL_CALLS]")


_HEADER = re.compile(r"([\w./:-]{1,256})(?:\[CALL_ID\]\w{1,64})?\[ARGS\]\s*")
_HEADER_BEGUN = re.compile(r"[\w./:-]{0,256}(?:\[[A-Z_]{0,7}(?:\]\w{0,64}(?:\[[A-Z]{0,4})?)?)?")


class Llama3(JsonForm):
    """Llama 3.1 to 3.3: ``{"name": ..., "parameters": {...}}``, possibly after ``<|python_tag|>``.

    Calls of its built-in tools, ``<|python_tag|>brave_search.call(...)``, are text.
    """

    name = "llama3"
    starts = ("<|python_tag|>",)
    first = "{"
    keys = ("name", "parameters", "arguments", "type")
    several = False  # "This model only supports single tool-calls at once", its template says
    writing = Writing('{"name": "', '", "parameters": ', "}")

    def read(self, text: str, tools: Schemas) -> list[Call]:
        return [call_of(load_json(text.removeprefix("<|python_tag|>")), "parameters", "arguments")]


class _Marked(ToolFormat):
    """Calls between two marks. A value cannot contain the marks that end it."""

    end: ClassVar[str]  # the mark that ends the calls; an answer may end before it
    call_end: ClassVar[str] = ""  # ends each call; "": there is only one
    call: ClassVar[re.Pattern[str]]  # a call without call_end: its name and its arguments
    argument_end: ClassVar[str] = ""
    argument: ClassVar[re.Pattern[str] | None] = None  # an argument's name and value; None: JSON

    def reader(self) -> Reader:
        return _MarkedReader(self.end)

    def read(self, text: str, tools: Schemas) -> list[Call]:
        body = text.removeprefix(self.starts[0]).removesuffix(self.end)
        calls = _pieces(body, self.call_end, self.call)
        return [(name, self._arguments(arguments, tools.get(name, {}))) for name, arguments in calls]

    def _arguments(self, text: str, schema: Mapping[str, Any]) -> Any:
        if self.argument is None:
            return load_json(text.strip().removesuffix("```"))
        pairs = _pieces(text, self.argument_end, self.argument)
        if len(dict(pairs)) < len(pairs):
            raise ValueError("an argument twice")
        return {name: _value(value, name, schema) for name, value in pairs}


def _pieces(text: str, end: str, form: re.Pattern[str]) -> list[tuple[str, str]]:
    """Return name and rest of each piece of text that ends with a mark; without a mark, of the whole text."""
    *pieces, rest = text.split(end) if end else [text, ""]
    matches = [form.fullmatch(piece.lstrip()) for piece in pieces]
    if rest.strip() or None in matches:
        raise ValueError("not what was expected between the marks")
    return [(match[1], match[2]) for match in matches if match is not None]


class _MarkedReader(Reader):
    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._at = 0  # the end is not before it

    def end(self, text: str, is_all: bool) -> int | None:
        at = text.find(self._mark, self._at)
        self._at = max(0, len(text) - len(self._mark))
        return at + len(self._mark) if at >= 0 else len(text) if is_all else None


class Glm(_Marked):
    """GLM 4.5 to 4.7: ``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``."""

    name = "glm"
    starts = ("<tool_call>",)
    end = "</tool_call>"
    call = re.compile(r"([^<>\s{}]+)(.*)", re.DOTALL)
    argument_end = "</arg_value>"
    argument = re.compile(r"<arg_key>([^<>]*)</arg_key>\s*<arg_value>(.*)", re.DOTALL)


class MiniMax(_Marked):
    """MiniMax M2: ``<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>`` between marks."""

    name = "minimax"
    starts = ("<minimax:tool_call>",)
    end = "</minimax:tool_call>"
    call_end = "</invoke>"
    call = re.compile(r'<invoke name="([^"<>]+)">(.*)', re.DOTALL)
    argument_end = "</parameter>"
    argument = re.compile(r'<parameter name="([^"<>]+)">(.*)', re.DOTALL)


def _mark(words: str) -> str:
    """Return one of DeepSeek's marks, with its special bars and spaces."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


class DeepSeek(_Marked):
    """DeepSeek V3, with JSON in a Markdown block, and V3.1: a name, a mark, JSON."""

    name = "deepseek"
    text_arguments = True
    starts = (_mark("tool calls begin"),)
    end = _mark("tool calls end")
    call_end = _mark("tool call end")
    call = re.compile(
        f"{_mark('tool call begin')}(?:function{_mark('tool sep')})?"
        rf"([^\s<>]+)(?:{_mark('tool sep')}|\s*```json)(.*)",
        re.DOTALL,
    )


class Kimi(_Marked):
    """Kimi K2, whose call ids contain the tools' names: ``functions.NAME:0``."""

    name = "kimi"
    starts = ("<|tool_calls_section_begin|>",)
    end = "<|tool_calls_section_end|>"
    call_end = "<|tool_call_end|>"
    call = re.compile(
        r"<\|tool_call_begin\|>\s*(?:functions\.)?([^\s<>]+):\d+\s*<\|tool_call_argument_begin\|>(.*)",
        re.DOTALL,
    )

    def call_id(self, proposed: str, name: str, number: int) -> str:
        return f"functions.{name}:{number}"


class Gemma4(_Marked):
    """Gemma 4: ``<|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:3}<tool_call|>``; strings are not escaped."""

    name = "gemma4"
    starts = ("<|tool_call>",)
    end = "<tool_call|>"
    call = re.compile(r"call:([^\s{}<>]+)(.*)", re.DOTALL)

    def _arguments(self, text: str, schema: Mapping[str, Any]) -> Any:
        return load_json(_GEMMA.sub(_gemma_as_json, text))


# A string's end is optional, so that matching is linear; an unterminated string is not valid JSON.
_GEMMA = re.compile(
    r'<\|"\|>(?P<text>.*?)(?:<\|"\|>|\Z)|(?P<before>[{,]\s*)(?P<key>[^\s{}\[\]:,"<>]+)(?=\s*:)', re.DOTALL
)


def _gemma_as_json(match: re.Match[str]) -> str:
    return json.dumps(match["text"]) if match["key"] is None else match["before"] + json.dumps(match["key"])


class Harmony(JsonForm):
    """gpt-oss: ``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>``.

    The name may come before the channel, as in its template. A call ends the answer.
    """

    name = "harmony"
    starts = tuple(
        f"{before}{name}"
        for before in ("<|end|><|start|>assistant", "<|start|>assistant", "")
        for name in ("<|channel|>commentary to=", "<|channel|>analysis to=", " to=functions.")
    )
    several = False
    end = "<|call|>"
    needs_end = False

    def json_start(self, text: str, is_all: bool) -> int | None:
        message_at = text.find("<|message|>", 0, MOST_HEAD)
        at = skip_space(text, message_at + len("<|message|>"))
        if message_at >= 0 and at < len(text):
            may_be("{", text, at, 1)
            return at
        if is_all or (message_at < 0 and len(text) >= MOST_HEAD):
            raise NoCallError("a call without arguments", 1)
        return None

    def read(self, text: str, tools: Schemas) -> list[Call]:
        head, _, body = text.partition("<|message|>")
        name, *_ = _RECIPIENT.findall(head)  # raises a ValueError if it does not call a function
        return [(name, load_json(body[: body.rindex("}") + 1]))]


_RECIPIENT = re.compile(r"to=functions\.([^\s<>]+)")
MOST_HEAD = 400  # characters of a call before its arguments


FORMS: tuple[ToolFormat, ...] = (
    *(Hermes(), QwenCoder(), Mistral(), Mistral(space=""), MistralArgs(), Llama3()),
    *(Glm(), MiniMax(), DeepSeek(), Kimi(), Gemma4(), Harmony()),
)
PROBE = "kvant_probe"
PROBE_SCHEMA = {"type": "object", "properties": {"value": {"type": "string"}}, "required": ["value"]}
PROBE_TOOL = {
    "type": "function",
    "function": {"name": PROBE, "description": "A probe.", "parameters": PROBE_SCHEMA},
}
PROBE_ARGUMENTS = {"value": "x"}


def tool_format(tokenizer: Tokenizer) -> ToolFormat | None:
    """Return the format in which a model's chat template writes tool calls.

    None: the template shows no tools, or writes calls in an unknown format.
    """
    asked = [{"role": "user", "content": "x"}]

    def rendered(messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        return str(tokenizer.apply_chat_template(messages, [PROBE_TOOL], tokenize=False, **options))

    try:
        prompt = rendered(asked, add_generation_prompt=True)
    except PromptError:
        return None
    if PROBE not in prompt:
        return None
    # Mistral's id, and Kimi's
    for as_text, call_id in product((False, True), ("abcdefghi", f"functions.{PROBE}:0")):
        function = {"name": PROBE, "arguments": to_json(PROBE_ARGUMENTS) if as_text else PROBE_ARGUMENTS}
        call = {"id": call_id, "type": "function", "function": function}
        with suppress(PromptError):
            called = rendered([*asked, {"role": "assistant", "content": "", "tool_calls": [call]}])
            forms = [form for form in FORMS if form.text_arguments is as_text]
            if (form := _form_of(tokenizer, prompt, called, forms)) is not None:
                return form
    return None


def _form_of(
    tokenizer: Tokenizer, prompt: str, called: str, forms: Sequence[ToolFormat]
) -> ToolFormat | None:
    """Return the format of the call that a template wrote after a prompt."""
    same = next((n for n, (a, b) in enumerate(zip(prompt, called, strict=False)) if a != b), len(prompt))
    mark = max(prompt.rfind("<", 0, same), prompt.rfind("[", 0, same))
    # <think> in the prompt and <tool_call> have the same beginning
    if mark >= 0 and not {">", "]"} & {*prompt[mark:same]}:
        same = mark
    written = called[same:]
    for form in forms:
        parts = AnswerParts(tokenizer, prompt[:same], [PROBE_TOOL], form)
        begin = form.writing.begin if form.writing is not None else ""
        if form.head and form.starts[0] not in written:
            continue  # a model family with another mark before the head
        if begin in written and CallPart(PROBE, '{"value":"x"}') in [*parts.add(written), *parts.finish()]:
            return form
    return None

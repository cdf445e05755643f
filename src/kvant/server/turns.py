"""A conversation as clients give it: its turns, the tools that the model may call, and its thinking."""

import base64
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import msgspec

from kvant.errors import GrammarError
from kvant.server.body import MAX_TOOLS, check_depth, typed
from kvant.server.errors import ApiError
from kvant.server.generation import Generation, Tool
from kvant.server.left_out import LeftOut
from kvant.server.security import MAX_VALUES, count_marks, count_values
from kvant.server.service import Service
from kvant.text.call_form import ToolFormat, to_json
from kvant.text.grammar_source import check_size
from kvant.text.prompt import mentioned
from kvant.text.thinking import marks_of
from kvant.text.tokenizer import Tokenizer

NO_TOOLS = "the model's chat template takes no tools, or writes calls in a form that is not known here"
MAX_NAME = 256  # OpenAI's is 64, Anthropic's 128; servers of tools put their own names before it
SWITCH = "enable_thinking"  # of Qwen3's template, and of others after it
EFFORT = "reasoning_effort"  # of gpt-oss
EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
PICTURES = ("image", "image_url", "input_image")  # types of parts
OPAQUE = "kvant:"  # begins a text that thinking is kept in
BEGINNING = 4  # tokens of an answer that the mark is among: blank ones may come before it


def joined(texts: Sequence[str]) -> str:
    """Pieces of a text put together, with a line break between two that have no white space there.

    Some clients cut a text where its cache is to end, and others send paragraphs.
    """
    pieces: list[str] = []
    for text in filter(None, texts):
        if pieces and not (pieces[-1][-1].isspace() or text[0].isspace()):
            pieces.append("\n")
        pieces.append(text)
    return "".join(pieces)


def text_of(
    content: str | list[Any] | None,
    kinds: Mapping[str, type[Any]],
    place: str,
    left_out: LeftOut,
    *,
    notes: bool = False,
) -> str:
    """A message's text; of several parts, put together.

    Args:
        kinds: of parts that have a text, by their types.
        place: the field that it is in.
        notes: a part of another type becomes a note in words, as in a tool's result; else it is refused.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for at, part in typed(content, kinds, place, left_out):
        text, kind = (None, part) if isinstance(part, str) else (part.text, part.type)
        if text is None and not (notes and kind):
            raise ApiError(
                f"{at}.type is {kind[:80]!r}; expected text: {' or '.join(kinds)}", param=f"{at}.type"
            )
        noted = "a picture" if kind in PICTURES else f"a part of the type {kind[:80]}"
        texts.append(f"[{noted} is not shown to this model, which reads text]" if text is None else text)
    return joined(texts)


def check_arguments(texts: Sequence[str]) -> None:
    """Refuse the arguments of calls, JSON texts in a body, where they have as many values as no body may
    have.
    """
    parts = [text.encode("utf-8", "replace") for text in texts]
    if sum(map(count_marks, parts)) > MAX_VALUES and (count := sum(map(count_values, parts))) > MAX_VALUES:
        raise ApiError(f"the arguments of calls have {count} values of JSON; expected {MAX_VALUES} at most")


class Turns:
    """Collects pieces in their order. Pieces of one role that follow one another become one message."""

    def __init__(self) -> None:
        self._turns: list[dict[str, Any]] = []  # messages whose texts are lists of pieces
        self._names: dict[str, str] = {}  # of tools, by the ids of their calls

    def begin(self, role: str, name: str | None) -> None:
        """A message of its own, whatever was before it."""
        self._turns.append(
            {"role": role, "name": name, "content": [], "reasoning_content": [], "tool_calls": []}
        )

    def add_text(self, role: str, text: str) -> None:
        """A piece of what the role says."""
        self._of(role)["content"].append(text)

    def add_thinking(self, text: str) -> None:
        """What the assistant thought, if anything."""
        if text:
            self._of("assistant")["reasoning_content"].append(text)

    def add_call(self, call_id: str, name: str, given: str | dict[str, Any], place: str) -> None:
        """A call of the assistant's. Its arguments may be JSON text, ``place``: the field that they are
        in.
        """
        self._names[call_id] = name
        arguments = _arguments(given, place) if isinstance(given, str) else given
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._of("assistant")["tool_calls"].append(call)

    def add_result(self, call_id: str, text: str, place: str, name: str | None = None) -> None:
        """What an earlier call brought. ``place``: the field that ``call_id`` is in; ``name``: default:
        the tool's.
        """
        if call_id not in self._names:
            raise ApiError(f"{place} is {call_id[:80]!r}; no call before it has this id", param=place)
        name = name or self._names[call_id]
        self._turns.append({"role": "tool", "content": [text], "tool_call_id": call_id, "name": name})

    def messages(self) -> list[dict[str, Any]]:
        """All of it, as :attr:`kvant.server.generation.Generation.messages`."""
        texts = ("content", "reasoning_content")
        return [
            {
                key: joined(value) if key in texts else value
                for key, value in turn.items()
                if value or key == "content"
            }
            for turn in self._turns
        ]

    def _of(self, role: str) -> dict[str, Any]:
        """The turn that a piece of this role belongs to."""
        if not self._turns or self._turns[-1]["role"] != role:
            self.begin(role, None)
        return self._turns[-1]


def _arguments(text: str, place: str) -> dict[str, Any]:
    """The arguments in a JSON text; none if it is empty."""
    try:
        arguments = msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(
            f"{place} is {text[:80]!r}; expected the JSON text of an object: {error}", param=place
        ) from error
    check_depth(arguments)
    return arguments


def checked_tools(tools: Mapping[str, Tool]) -> tuple[Tool, ...]:
    """The tools by the fields of their names, each of which has to be another."""
    if len(tools) > MAX_TOOLS:
        raise ApiError(f"tools has {len(tools)}; expected at most {MAX_TOOLS}", param="tools")
    try:
        check_size("list of tools", [tool.parameters for tool in tools.values()])
    except GrammarError as error:
        raise ApiError(str(error), param="tools") from error
    seen: set[str] = set()
    for param, tool in tools.items():
        if not re.fullmatch(f"[a-zA-Z0-9_./:-]{{1,{MAX_NAME}}}", tool.name):
            said = f"expected 1 to {MAX_NAME} letters, digits and any of _-./:"
            raise ApiError(f"{param} is {tool.name[:80]!r}; {said}", param=param)
        if tool.name in seen:
            raise ApiError(
                f"{param} is {tool.name!r}, which another tool has; expected another name", param=param
            )
        seen.add(tool.name)
    return tuple(tools.values())


def tool_named(tools: Sequence[Tool], name: str, field: str = "tool_choice") -> Tool:
    """The tool that has to be called."""
    for tool in tools:
        if tool.name == name:
            return tool
    names = ", ".join(tool.name for tool in tools) or "none"
    raise ApiError(f"{field} names {name[:80]!r}; expected one of tools: {names[:200]}", param=field)


def shown_tools(service: Service, generation: Generation, *, deferred: bool = True) -> list[dict[str, Any]]:
    """Return the tools that the model is shown, in OpenAI's form; none if it must not call one.

    ``deferred``: include the tools that only the results of searches show.
    """
    if generation.tool_choice == "none" or not generation.tools:
        return []
    if service.tool_format is None:
        raise ApiError(f"tools: {NO_TOOLS}", param="tools")
    return [as_shown(tool) for tool in generation.tools if deferred or not tool.deferred]


def described(tools: Iterable[Tool]) -> str:
    """Return the text that shows the model the tools that a search found."""
    lines = [f"<function>{to_json(as_shown(tool)['function'])}</function>" for tool in tools]
    return "\n".join(lines) or "No tools were found."


def as_shown(tool: Tool) -> dict[str, Any]:
    """A tool in OpenAI's form, as templates take it."""
    described = {"description": tool.description} if tool.description else {}
    function = {"name": tool.name, **described, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def for_template(messages: Sequence[Mapping[str, Any]], form: ToolFormat | None) -> list[dict[str, Any]]:
    """Messages with calls, and the ids of calls, as the model's template takes them."""
    made = [dict(message) for message in messages]
    ids: dict[str, str] = {}
    count = itertools.count()
    for place, message in enumerate(made):
        if form is None:
            if "tool_calls" in message or message["role"] == "tool":
                raise ApiError(
                    f"messages[{place}] has to do with tools; {NO_TOOLS}", param=f"messages[{place}]"
                )
            continue
        calls = []
        for call in message.get("tool_calls", ()):
            function = dict(call["function"])
            ids[call["id"]] = own = form.call_id(call["id"], function["name"], next(count))
            if form.text_arguments:
                function["arguments"] = to_json(function["arguments"])
            calls.append({**call, "id": own, "function": function})
        if calls:
            message["tool_calls"] = calls
        if "tool_call_id" in message:
            message["tool_call_id"] = ids[message["tool_call_id"]]
    return made


def with_system(messages: Sequence[dict[str, Any]], place: str) -> list[dict[str, Any]]:
    """Messages with the system's where the chat template takes them, :func:`kvant.text.prompt.system_place`.

    The others go into the user's message behind them, else into the one before them.
    """
    made: list[dict[str, Any]] = []
    held: list[str] = []  # texts of the system

    def put_behind() -> None:
        """Put what is held into the user's message that was the last, or into one of its own."""
        if held:
            last = made.pop() if made and made[-1]["role"] == "user" else {"role": "user", "content": ""}
            made.append({**last, "content": joined([last["content"], *held])})
            held.clear()

    for message in messages:
        role = message["role"]
        if role == "system" and not (place == "anywhere" or (place == "first" and not made)):
            held.append(message["content"])
        elif held and role == "user":
            made.append({**message, "content": joined([*held, message["content"]])})
            held.clear()
        else:
            put_behind()
            made.append(message)
    put_behind()
    return made


def switched(tokenizer: Tokenizer, on: bool, field: str, left_out: LeftOut) -> dict[str, Any]:
    """Variables that switch thinking on or off. Where the model cannot do otherwise, the wish is left out."""
    if SWITCH in mentioned(tokenizer):
        return {SWITCH: on}
    if on is not (marks_of(tokenizer) is not None):
        left_out.add(field, "on" if on else "off")
    return {}


def with_effort(tokenizer: Tokenizer, effort: str | None, field: str, left_out: LeftOut) -> dict[str, Any]:
    """Variables for an effort of thinking, the nearest that templates know; "none" switches it off, None
    is free.
    """
    if effort is None:
        return {}
    if effort == "none":
        return switched(tokenizer, False, field, left_out)
    if effort not in EFFORTS or EFFORT not in mentioned(tokenizer):
        left_out.add(field, effort)
        return {}
    return {EFFORT: EFFORTS[effort]}


def opaque(thinking: str) -> str:
    """Thinking for a client that keeps it without showing it. It is encoded, not encrypted."""
    return OPAQUE + base64.b64encode(thinking.encode()).decode()


def from_opaque(text: str, field: str, left_out: LeftOut) -> str:
    """The thinking in a text of :func:`opaque`; that of another server is left out."""
    try:
        if text.startswith(OPAQUE):
            return base64.b64decode(text.removeprefix(OPAQUE), validate=True).decode()
    except ValueError:  # no ASCII, no base64, or no UTF-8 in it
        pass
    left_out.add(field)
    return ""


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """A logits processor of one prompt."""

    first: int  # the place of the answer's first token
    tokens: int  # of thinking, its marks in the answer among them
    start: int | None  # the token that begins thinking; None: the prompt has begun it
    end: int  # the token that ends it

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """``tokens``: all so far (T,); ``logits``: (1, vocab)."""
        if tokens.size - self.first < self.tokens - 1:
            return logits
        answer: list[int] = tokens[self.first :].tolist()  # type: ignore[assignment]
        if self.end in answer or (self.start is not None and self.start not in answer[:BEGINNING]):
            return logits
        return mx.where(mx.arange(logits.shape[-1]) == self.end, 0.0, -mx.inf)[None].astype(logits.dtype)


def thinking_tokens(tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Return the tokens that begin and end thinking; None if there are no marks or a mark is several
    tokens.
    """
    marks = marks_of(tokenizer)
    if marks is None:
        return None
    start, end = tokenizer.convert_tokens_to_ids([marks.starts[0], marks.end])
    unknown = (None, tokenizer.unk_token_id)
    return None if start in unknown or end in unknown else (start, end)


def thinking_budget(tokenizer: Tokenizer, prompt: str, first: int, tokens: int) -> ThinkingBudget:
    """Return the limit on thinking for the answers to a rendered prompt.

    Args:
        tokenizer: one for which :func:`thinking_tokens` is not None.
        prompt: its end may have opened the thinking.
        first: tokens of the prompt.
        tokens: the most tokens of thinking.
    """
    marks = marks_of(tokenizer)
    found = thinking_tokens(tokenizer)
    assert marks is not None
    assert found is not None
    start, end = found
    return ThinkingBudget(first, tokens, None if marks.opened_by(prompt) else start, end)

"""Check and convert a conversation's turns, its tools and its thinking for the chat template."""

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
MAX_NAME = 256  # OpenAI allows 64, Anthropic 128; tool servers add a prefix of their own
SWITCH = "enable_thinking"  # a variable of Qwen3's template and later ones
EFFORT = "reasoning_effort"  # a variable of gpt-oss's template
EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
PICTURES = ("image", "image_url", "input_image")  # types of content parts
OPAQUE = "kvant:"  # prefix of encoded thinking
BEGINNING = 4  # thinking must start within so many tokens: blank ones may precede its mark


def joined(texts: Sequence[str]) -> str:
    """Join the pieces of a text, with a line break between two that have no white space there.

    Some clients split a text where its cached prefix should end, and others send paragraphs.
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
    """Return a message's text, joined if it has several parts.

    Args:
        kinds: the structs of parts with a text, by type.
        place: the field of the content.
        notes: replace a part of another type by a note in words, as in a tool's result; else refuse it.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for at, piece in typed(content, kinds, place, left_out):
        text, kind = (None, piece) if isinstance(piece, str) else (piece.text, piece.type)
        if text is None and not (notes and kind):
            raise ApiError(
                f"{at}.type is {kind[:80]!r}; expected text: {' or '.join(kinds)}", param=f"{at}.type"
            )
        noted = "a picture" if kind in PICTURES else f"a part of the type {kind[:80]}"
        texts.append(f"[{noted} is not shown to this model, which reads text]" if text is None else text)
    return joined(texts)


def check_arguments(texts: Sequence[str]) -> None:
    """Refuse the arguments of calls, which are JSON texts, if they have more values than a body may have."""
    coded = [text.encode("utf-8", "replace") for text in texts]
    if sum(map(count_marks, coded)) > MAX_VALUES and (count := sum(map(count_values, coded))) > MAX_VALUES:
        raise ApiError(f"the arguments of calls have {count} values of JSON; expected {MAX_VALUES} at most")


class Turns:
    """Collects the pieces of a conversation. Adjacent pieces of a role become one message."""

    def __init__(self) -> None:
        self._turns: list[dict[str, Any]] = []  # messages, with texts as lists of pieces
        self._names: dict[str, str] = {}  # of tools, by call id

    def begin(self, role: str, name: str | None) -> None:
        """Begin a new message, even after one of the same role."""
        self._turns.append(
            {"role": role, "name": name, "content": [], "reasoning_content": [], "tool_calls": []}
        )

    def add_text(self, role: str, text: str) -> None:
        """Add a piece of a role's text."""
        self._of(role)["content"].append(text)

    def add_thinking(self, text: str) -> None:
        """Add the assistant's thinking unless it is empty."""
        if text:
            self._of("assistant")["reasoning_content"].append(text)

    def add_call(self, call_id: str, name: str, arguments: str | dict[str, Any], place: str) -> None:
        """Add a call of the assistant's. ``place``: the field of its arguments, which may be JSON text."""
        self._names[call_id] = name
        if isinstance(arguments, str):
            arguments = _arguments(arguments, place)
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._of("assistant")["tool_calls"].append(call)

    def add_result(self, call_id: str, text: str, place: str, name: str | None = None) -> None:
        """Add a call's result. ``place``: the field of ``call_id``; ``name``: default: the tool's."""
        if call_id not in self._names:
            raise ApiError(f"{place} is {call_id[:80]!r}; no earlier call has this id", param=place)
        name = name or self._names[call_id]
        self._turns.append({"role": "tool", "content": [text], "tool_call_id": call_id, "name": name})

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages as :attr:`kvant.server.generation.Generation.messages` has them."""
        texts = ("content", "reasoning_content")
        return [
            {
                key: joined(value) if key in texts else value
                for key, value in message.items()
                if value or key == "content"
            }
            for message in self._turns
        ]

    def _of(self, role: str) -> dict[str, Any]:
        """Return the message to which a piece of this role belongs."""
        if not self._turns or self._turns[-1]["role"] != role:
            self.begin(role, None)
        return self._turns[-1]


def _arguments(text: str, place: str) -> dict[str, Any]:
    """Parse the arguments in a JSON text; an empty text has none."""
    try:
        arguments = msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(
            f"{place} is {text[:80]!r}; expected the JSON text of an object: {error}", param=place
        ) from error
    check_depth(arguments)
    return arguments


def checked_tools(tools: Mapping[str, Tool]) -> tuple[Tool, ...]:
    """Return the tools after checking their number, size and names. The keys are the fields of the names."""
    if len(tools) > MAX_TOOLS:
        raise ApiError(f"tools has {len(tools)}; expected at most {MAX_TOOLS}", param="tools")
    try:
        check_size("list of tools", [tool.parameters for tool in tools.values()])
    except GrammarError as error:
        raise ApiError(str(error), param="tools") from error
    seen: set[str] = set()
    for param, tool in tools.items():
        if not re.fullmatch(f"[a-zA-Z0-9_./:-]{{1,{MAX_NAME}}}", tool.name):
            expected = f"expected 1 to {MAX_NAME} letters, digits and any of _-./:"
            raise ApiError(f"{param} is {tool.name[:80]!r}; {expected}", param=param)
        if tool.name in seen:
            raise ApiError(
                f"{param} is {tool.name!r}, which another tool has; expected another name", param=param
            )
        seen.add(tool.name)
    return tuple(tools.values())


def tool_named(tools: Sequence[Tool], name: str, field: str = "tool_choice") -> Tool:
    """Return the tool with a name, or refuse the name."""
    for tool in tools:
        if tool.name == name:
            return tool
    names = ", ".join(tool.name for tool in tools) or "none"
    raise ApiError(f"{field} names {name[:80]!r}; expected one of tools: {names[:200]}", param=field)


def shown_tools(service: Service, generation: Generation, *, deferred: bool = True) -> list[dict[str, Any]]:
    """Return the tools that the model is shown, in OpenAI's form; an empty list if it must not call one.

    ``deferred``: include the tools that only search results show.
    """
    if generation.tool_choice == "none" or not generation.tools:
        return []
    if service.tool_format is None:
        raise ApiError(f"tools: {NO_TOOLS}", param="tools")
    return [as_shown(tool) for tool in generation.tools if deferred or not tool.deferred]


def described(tools: Iterable[Tool]) -> str:
    """Return the text that shows the model the tools from a search."""
    lines = [f"<function>{to_json(as_shown(tool)['function'])}</function>" for tool in tools]
    return "\n".join(lines) or "No tools were found."


def as_shown(tool: Tool) -> dict[str, Any]:
    """Return a tool in OpenAI's form, which templates expect."""
    described = {"description": tool.description} if tool.description else {}
    function = {"name": tool.name, **described, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def for_template(messages: Sequence[Mapping[str, Any]], form: ToolFormat | None) -> list[dict[str, Any]]:
    """Return messages with calls and call ids in the form that the model's template expects."""
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
            ids[call["id"]] = call_id = form.call_id(call["id"], function["name"], next(count))
            if form.text_arguments:
                function["arguments"] = to_json(function["arguments"])
            calls.append({**call, "id": call_id, "function": function})
        if calls:
            message["tool_calls"] = calls
        if "tool_call_id" in message:
            message["tool_call_id"] = ids[message["tool_call_id"]]
    return made


def with_system(messages: Sequence[dict[str, Any]], place: str) -> list[dict[str, Any]]:
    """Move system messages to where the template accepts them, see :func:`kvant.text.prompt.system_place`.

    The others join the user message after them, or else the one before them.
    """
    made: list[dict[str, Any]] = []
    pending: list[str] = []  # system texts to put into a user message

    def put_behind() -> None:
        """Put the pending texts into the last message if it is the user's, or into a new one."""
        if pending:
            last = made.pop() if made and made[-1]["role"] == "user" else {"role": "user", "content": ""}
            made.append({**last, "content": joined([last["content"], *pending])})
            pending.clear()

    for message in messages:
        role = message["role"]
        if role == "system" and not (place == "anywhere" or (place == "first" and not made)):
            pending.append(message["content"])
        elif pending and role == "user":
            made.append({**message, "content": joined([*pending, message["content"]])})
            pending.clear()
        else:
            put_behind()
            made.append(message)
    put_behind()
    return made


def switched(tokenizer: Tokenizer, on: bool, field: str, left_out: LeftOut) -> dict[str, Any]:
    """Return variables that switch thinking on or off. The field is ignored if the model has no switch."""
    if SWITCH in mentioned(tokenizer):
        return {SWITCH: on}
    if on is not (marks_of(tokenizer) is not None):
        left_out.add(field, "on" if on else "off")
    return {}


def with_effort(tokenizer: Tokenizer, effort: str | None, field: str, left_out: LeftOut) -> dict[str, Any]:
    """Return variables for the nearest effort that templates know. "none" switches thinking off."""
    if effort is None:
        return {}
    if effort == "none":
        return switched(tokenizer, False, field, left_out)
    if effort not in EFFORTS or EFFORT not in mentioned(tokenizer):
        left_out.add(field, effort)
        return {}
    return {EFFORT: EFFORTS[effort]}


def opaque(thinking: str) -> str:
    """Encode thinking, without encryption, for a client that stores it without showing it."""
    return OPAQUE + base64.b64encode(thinking.encode()).decode()


def from_opaque(text: str, field: str, left_out: LeftOut) -> str:
    """Decode thinking from :func:`opaque`. Another server's is ignored."""
    try:
        if text.startswith(OPAQUE):
            return base64.b64decode(text.removeprefix(OPAQUE), validate=True).decode()
    except ValueError:  # not ASCII, base64 or UTF-8
        pass
    left_out.add(field)
    return ""


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """A logits processor that ends thinking after a number of tokens. It serves one prompt."""

    first: int  # position of the answer's first token
    tokens: int  # maximum of thinking, including its marks in the answer
    start: int | None  # the token that begins thinking; None: the prompt has opened it
    end: int  # the token that ends it

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """``tokens``: prompt and answer so far (T,); ``logits``: (1, vocab)."""
        if tokens.size - self.first < self.tokens - 1:
            return logits
        answer: list[int] = tokens[self.first :].tolist()  # type: ignore[assignment]
        if self.end in answer or (self.start is not None and self.start not in answer[:BEGINNING]):
            return logits
        return mx.where(mx.arange(logits.shape[-1]) == self.end, 0.0, -mx.inf)[None].astype(logits.dtype)


def thinking_tokens(tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Return the tokens that begin and end thinking, or None without marks that are single tokens."""
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
        prompt: rendered; its end may open the thinking.
        first: the number of tokens in the prompt.
        tokens: the maximum number of tokens of thinking.
    """
    marks = marks_of(tokenizer)
    pair = thinking_tokens(tokenizer)
    assert marks is not None
    assert pair is not None
    start, end = pair
    return ThinkingBudget(first, tokens, None if marks.opened_by(prompt) else start, end)

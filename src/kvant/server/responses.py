"""The supported parts of OpenAI's /v1/responses (platform.openai.com). Nothing is stored.

A field of type None may only be null, because ignoring it would mislead the client. Fields that are not
declared here are ignored and reported, see :class:`kvant.server.left_out.LeftOut`.
"""

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import msgspec

from kvant.engine.sampling import Sampling
from kvant.errors import ArgumentError
from kvant.server.body import (
    DraftField,
    Fields,
    SamplingFields,
    check_range,
    known_of,
    max_tokens,
    refused,
    sampling_options,
)
from kvant.server.endpoint import Dialect, Encoder
from kvant.server.errors import ApiError
from kvant.server.generation import Begun, Call, End, Generation, Text, Tool, ToolChoice
from kvant.server.left_out import LeftOut
from kvant.server.openai import (
    MAX_TOP_LOGPROBS,
    Function,
    JsonObjectFormat,
    NamedSchema,
    RefusalPart,
    TextFormat,
    format_of,
    logprobs_content,
    tool_of,
)
from kvant.server.service import Service
from kvant.server.turns import (
    Turns,
    check_arguments,
    checked_tools,
    described,
    from_opaque,
    joined,
    opaque,
    text_of,
    tool_named,
    with_effort,
)
from kvant.text.guidance import as_lark

ROLES = {"developer": "system"}  # OpenAI's newer name of a role that templates know
INCLUDED = ("reasoning.encrypted_content", "message.output_text.logprobs")
STORED = "this server stores nothing: send the whole conversation, with store false"


class InputText(Fields, frozen=True):
    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None  # prefixes of all prompts are cached anyway


class OutputText(Fields, frozen=True):
    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]] | None = None
    logprobs: list[dict[str, Any]] | None = None
    parsed: Any = None  # OpenAI's Python client stores its parsed text here


PARTS = {"input_text": InputText, "output_text": OutputText, "refusal": RefusalPart}
NAMESPACE = "__"  # between a namespace and the name of a function in it


class TextKind(NamedTuple):
    """The names that a kind of text has in items and events."""

    field: str  # the item's field with the content parts
    type: str  # the type of a content part
    part_event: str  # the name of events about the part
    text_event: str  # the name of events about its text


MESSAGE = TextKind("content", "output_text", "content_part", "output_text")
REASONING = TextKind("content", "reasoning_text", "content_part", "reasoning_text")
SUMMARY = TextKind("summary", "summary_text", "reasoning_summary_part", "reasoning_summary_text")


class MessageItem(Fields, frozen=True, kw_only=True):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Any]
    id: str | None = None
    status: Any = None
    phase: Any = None  # of an answer; templates have no such field


class CalledItem(Fields, frozen=True, kw_only=True):
    """The common fields of calls and their results."""

    call_id: str
    namespace: str | None = None
    id: str | None = None
    status: Any = None
    caller: Any = None


class CallItem(CalledItem, frozen=True, kw_only=True):
    type: Literal["function_call"]
    name: str
    arguments: str
    parsed_arguments: Any = None  # like OutputText.parsed


class CustomCallItem(CalledItem, frozen=True, kw_only=True):
    type: Literal["custom_tool_call"]
    name: str
    input: str


class ResultItem(CalledItem, frozen=True, kw_only=True):
    type: Literal["function_call_output", "custom_tool_call_output"]
    output: str | list[Any]
    name: str | None = None


class SummaryText(Fields, frozen=True):
    type: Literal["summary_text"]
    text: str


class ReasoningText(Fields, frozen=True):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Fields, frozen=True, kw_only=True):
    type: Literal["reasoning"]
    id: str | None = None
    summary: list[SummaryText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: Any = None


class ReferenceItem(Fields, frozen=True, kw_only=True):
    type: Literal["item_reference"]
    id: Any = None


class SearchCallItem(Fields, frozen=True, kw_only=True):
    """A search for tools. It has no ``call_id`` if OpenAI's server ran it."""

    type: Literal["tool_search_call"]
    call_id: str | None = None
    arguments: str | dict[str, Any] | None = None
    execution: Any = None
    id: str | None = None
    status: Any = None


class ToolsItem(Fields, frozen=True, kw_only=True):
    """Tools that become available at this item.

    Codex sends all tools of newer models as ``additional_tools``. A search returns ``tool_search_output``.
    """

    type: Literal["additional_tools", "tool_search_output"]
    tools: list[Any]
    role: Literal["developer"] = "developer"
    call_id: str | None = None  # of the client's search
    execution: Any = None
    id: str | None = None
    status: Any = None


Item = (
    MessageItem
    | CallItem
    | CustomCallItem
    | ResultItem
    | ReasoningItem
    | ReferenceItem
    | SearchCallItem
    | ToolsItem
)
ITEMS: Mapping[str, type[Item]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": ResultItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": ResultItem,
    "reasoning": ReasoningItem,
    "item_reference": ReferenceItem,
    "additional_tools": ToolsItem,
    "tool_search_call": SearchCallItem,
    "tool_search_output": ToolsItem,
}


class FunctionBody(Function, frozen=True, kw_only=True):
    type: Literal["function"]
    defer_loading: bool = False  # has an effect only in the output of a search


class GrammarFormat(Fields, frozen=True, tag="grammar"):
    syntax: Literal["lark", "regex"]
    definition: str


class CustomBody(Fields, frozen=True, kw_only=True):
    """A tool that takes text, optionally with a grammar."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: TextFormat | GrammarFormat | None = None
    defer_loading: bool = False


class NamespaceBody(Fields, frozen=True, kw_only=True):
    """A group of tools. Their calls have the name of the group."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[Any]


class SearchBody(Fields, frozen=True, kw_only=True):
    """A search for more tools, run by the client. One that the server should run is ignored."""

    type: Literal["tool_search"]
    execution: Literal["server", "client"] = "server"
    description: str | None = None
    parameters: dict[str, Any] | None = None


TOOLS: Mapping[str, Any] = {"function": FunctionBody, "custom": CustomBody}
OUTER_TOOLS: Mapping[str, Any] = {**TOOLS, "namespace": NamespaceBody, "tool_search": SearchBody}
SEARCH = "tool_search"  # the name of the function that the model calls to search
# the parameters of custom tools
INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class FunctionChoice(Fields, frozen=True, tag="function"):
    name: str


class CustomChoice(Fields, frozen=True, tag="custom"):
    name: str


class AllowedTools(Fields, frozen=True, tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: list[FunctionChoice | CustomChoice]


class JsonSchema(NamedSchema, frozen=True, tag="json_schema"):
    pass


class TextConfig(Fields, frozen=True):
    format: TextFormat | JsonObjectFormat | JsonSchema | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Fields, frozen=True):
    effort: str | None = None
    summary: Literal["auto", "detailed"] | None = None
    generate_summary: Literal["auto", "detailed"] | None = None  # the older name of summary


class ResponsesBody(SamplingFields, frozen=True, kw_only=True):
    """A body of /v1/responses, with the sampling fields of /v1/chat/completions."""

    model: str
    input: str | list[Any]  # items are converted one by one: a message may lack its type
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    draft: DraftField = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[Any] | None = None
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice | CustomChoice | AllowedTools | None = (
        None
    )
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    store: Literal[False] | None = None
    previous_response_id: str | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    # Labels of the client, without effect.
    metadata: Any = None
    client_metadata: Any = None
    user: Any = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # Not supported.
    background: bool | None = None
    conversation: None = None
    prompt: None = None


def responses_generation(body: ResponsesBody, service: Service, left_out: LeftOut) -> Generation:
    """Return the generation that a body of /v1/responses requests."""
    if body.previous_response_id is not None:
        raise ApiError(f"previous_response_id is set; {STORED}", param="previous_response_id")
    if body.background:
        raise ApiError(
            "background is true; expected false: this server only answers directly", param="background"
        )
    for at, name in enumerate(body.include or ()):
        if name not in INCLUDED:
            left_out.add(f"include[{at}]", name)
    top_logprobs = body.top_logprobs or 0
    check_range("top_logprobs", top_logprobs, 0, MAX_TOP_LOGPROBS)
    items = _items(body, left_out)
    added: dict[str, dict[str, Tool]] = {}  # tools of the input's items, by place of the item
    for place, item in items:
        if isinstance(item, ToolsItem):
            is_found = item.call_id is not None
            added[place] = dict(_tools_of(item.tools, f"{place}.tools", service, left_out, is_found=is_found))
    tools, choice = _tools(body, added, service, left_out)
    reasoning = body.reasoning or Reasoning()
    return Generation(
        messages=_messages(body, items, added, left_out),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        format=None if body.text is None else format_of(body.text.format),
        sampling=sampling_options(body),
        max_tokens=max_tokens(body.max_output_tokens, "max_output_tokens"),
        logprobs=top_logprobs > 0 or "message.output_text.logprobs" in (body.include or []),
        top_logprobs=top_logprobs,
        variables=with_effort(service.tokenizer, reasoning.effort, "reasoning.effort", left_out),
        draft=body.draft,
        field="input",
    )


def _items(body: ResponsesBody, left_out: LeftOut) -> list[tuple[str, Item]]:
    """Return the places and items of the input. A text is a user message."""
    if isinstance(body.input, str):
        return [("input", MessageItem(role="user", content=body.input))]
    if not body.input:
        raise ApiError("input is empty; expected text or at least one item", param="input")
    return known_of(body.input, ITEMS, "input", left_out, "message")


def _tools(
    body: ResponsesBody, added: Mapping[str, Mapping[str, Tool]], service: Service, left_out: LeftOut
) -> tuple[Sequence[Tool], ToolChoice | Tool]:
    """Return the tools and the choice among them. ``added`` has the tools of items by place of the item.

    A tool of an item replaces an earlier tool of the same name, in its position. A search result does not
    replace it, because the model was shown the earlier one.
    """
    made: dict[str, Tool] = {}
    places: dict[str, str] = {}  # of the tools in earlier lists, by name
    for listed in (dict(_tools_of(body.tools or (), "tools", service, left_out)), *added.values()):
        new_places: dict[str, str] = {}  # separate: checked_tools refuses a name that one list has twice
        for place, tool in listed.items():
            if tool.name not in places:
                made[place] = tool
                new_places[tool.name] = place
            elif not tool.deferred:
                made[places[tool.name]] = tool
        places |= new_places
    tools: Sequence[Tool] = checked_tools(made)
    choice = body.tool_choice
    if isinstance(choice, FunctionChoice | CustomChoice):
        return tools, tool_named(tools, choice.name)
    if isinstance(choice, AllowedTools):
        tools = tuple({each.name: tool_named(tools, each.name) for each in choice.tools}.values())
        choice = choice.mode
    if choice == "required" and not tools:
        raise ApiError("tool_choice is 'required'; expected tools with it", param="tool_choice")
    return tools, choice or "auto"


def _tools_of(
    entries: Sequence[Any], place: str, service: Service, left_out: LeftOut, *, is_found: bool = False
) -> Iterator[tuple[str, Tool]]:
    """Yield the field of each tool's name and the tool. A namespace is a prefix of its tools' names.

    ``is_found``: the list is a search result, which shows the tools to the model.
    """
    for outer, tool in known_of(entries, OUTER_TOOLS, place, left_out):
        if isinstance(tool, SearchBody):
            if tool.execution == "client":
                parameters = tool.parameters or {"type": "object"}
                yield f"{outer}.type", Tool(SEARCH, tool.description or "", parameters, search=True)
            else:
                left_out.add(outer, tool.type)
            continue
        space = tool.name if isinstance(tool, NamespaceBody) else None
        inner = [(outer, tool)] if space is None else known_of(tool.tools, TOOLS, f"{outer}.tools", left_out)
        for at, each in inner:
            if each.defer_loading and not is_found:
                left_out.add(f"{at}.defer_loading")
            made = _custom(each, at, service, left_out) if isinstance(each, CustomBody) else tool_of(each)
            name = _named(each.name, space)
            yield f"{at}.name", replace(made, name=name, namespace=space, deferred=is_found)


def _custom(tool: CustomBody, place: str, service: Service, left_out: LeftOut) -> Tool:
    """Return a tool that takes text as a function with one argument; its description has the grammar."""
    description = tool.description or ""
    form = tool.format
    if not isinstance(form, GrammarFormat):
        return Tool(tool.name, description, INPUT, custom=True)
    grammar = form.definition if form.syntax == "lark" else f"start: {as_lark(form.definition)}"
    is_enforced = service.tool_format is None or service.tool_format.writing is not None
    if not is_enforced:
        left_out.add(f"{place}.format", form.syntax)
    description += f"\n\nThe input is text that follows this grammar ({form.syntax}):\n{form.definition}"
    return Tool(tool.name, description, INPUT, strict=is_enforced, custom=True, grammar=grammar)


def _named(name: str, namespace: str | None) -> str:
    return name if namespace is None else f"{namespace}{NAMESPACE}{name}"


def _messages(
    body: ResponsesBody,
    items: Sequence[tuple[str, Item]],
    added: Mapping[str, Mapping[str, Tool]],
    left_out: LeftOut,
) -> list[dict[str, Any]]:
    turns = Turns()
    if body.instructions:
        turns.add_text("system", body.instructions)
    calls = [item.arguments for _, item in items if isinstance(item, CallItem | SearchCallItem)]
    check_arguments([arguments for arguments in calls if isinstance(arguments, str)])
    for place, item in items:
        if isinstance(item, ToolsItem) and item.call_id is not None:
            turns.add_result(item.call_id, described(added[place].values()), f"{place}.call_id")
        else:
            _add(turns, item, place, left_out)
    return turns.messages()


def _add(turns: Turns, item: Item, place: str, left_out: LeftOut) -> None:
    match item:
        case ReferenceItem():
            raise ApiError(f"{place} is an item_reference; {STORED}", param=place)
        case MessageItem():
            text = text_of(item.content, PARTS, f"{place}.content", left_out)
            turns.add_text(ROLES.get(item.role, item.role), text)
        case ReasoningItem():
            turns.add_thinking(_thinking(item, place, left_out))
        case CallItem():
            name = _named(item.name, item.namespace)
            turns.add_call(item.call_id, name, item.arguments, f"{place}.arguments")
        case CustomCallItem():
            turns.add_call(item.call_id, _named(item.name, item.namespace), {"input": item.input}, place)
        case SearchCallItem(call_id=None):
            left_out.add(place, item.type)
        case SearchCallItem(call_id=str() as call_id):
            turns.add_call(call_id, SEARCH, item.arguments or {}, f"{place}.arguments")
        case ResultItem():
            text = text_of(item.output, PARTS, f"{place}.output", left_out, notes=True)
            turns.add_result(item.call_id, text, f"{place}.call_id")


def _thinking(item: ReasoningItem, place: str, left_out: LeftOut) -> str:
    """Return an earlier answer's thinking, from whichever field the client received it in."""
    if item.content:
        return joined([piece.text for piece in item.content])
    if item.encrypted_content is not None:
        return from_opaque(item.encrypted_content, f"{place}.encrypted_content", left_out)
    return joined([piece.text for piece in item.summary or ()])


class ResponseStream(Encoder):
    """Encode events in the order of OpenAI's stream.

    response.created, response.in_progress, then each item with its parts, then response.completed,
    .incomplete or .failed. An item is a thinking, a text or a function call.
    """

    def __init__(
        self, name: str, body: ResponsesBody, generations: Sequence[Generation], service: Service
    ) -> None:
        (generation,) = generations
        try:
            sampling = generation.sampling.filled(service.sampling)
        except ArgumentError as error:
            raise refused(error) from error
        self._response = _response(name, body, generation, sampling)
        self._tools = {tool.name: tool for tool in generation.tools}
        self._thinking = REASONING if self._response["reasoning"]["summary"] is None else SUMMARY
        self._keeps_opaque = "reasoning.encrypted_content" in (body.include or [])
        self._logprobs = generation.logprobs
        self._events = 0
        self._open: TextKind | None = None
        self._pieces: list[str] = []  # text of the open item
        self._shown_logprobs: list[dict[str, Any]] = []  # its log-probabilities

    def begun(self, event: Begun) -> Iterator[dict[str, Any]]:
        yield self._event("response.created", response=self._response)
        yield from self.waiting()
        self._response["usage"] = {
            "input_tokens": event.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": event.prompt_tokens,
        }

    def waiting(self) -> Iterator[dict[str, Any]]:
        if not self._response["output"]:  # an event without news, for a client that waits for one
            yield self._event("response.in_progress", response=self._response | {"usage": None})

    def whole(self) -> dict[str, Any]:
        return self._response

    def failed(self, error: ApiError, request_id: str) -> Iterator[dict[str, Any]]:
        details = error.openai()["error"]  # OpenAI's clients raise an error at this first event
        yield self._event(
            "error", code=details["code"], message=details["message"], param=details["param"], error=details
        )
        self._response |= {"status": "failed", "error": {"code": "server_error", "message": error.message}}
        yield self._event("response.failed", response=self._response)

    def text(self, event: Text) -> Iterator[dict[str, Any]]:
        kind = self._thinking if event.thinking else MESSAGE
        if kind is not self._open:
            yield from self._close("completed")
            yield from self._begin(kind)
        self._pieces.append(event.text)
        logprobs = logprobs_content(event.logprobs) if self._logprobs and kind is MESSAGE else []
        self._shown_logprobs += logprobs
        fields = {"logprobs": logprobs} if kind is MESSAGE else {}
        yield self._of_text(kind, f"{kind.text_event}.delta", delta=event.text, **fields)

    def _begin(self, kind: TextKind) -> Iterator[dict[str, Any]]:
        """Open an item of text or thinking and its content part."""
        self._open = kind
        if kind is MESSAGE:
            item: dict[str, Any] = {"type": "message", "id": _id("msg"), "role": "assistant"}
        else:
            item = {"type": "reasoning", "id": _id("rs"), "summary": []}
        yield self._added({**item, "status": "in_progress", kind.field: []})
        yield self._of_text(kind, f"{kind.part_event}.added", part=self._content_part(kind, ""))

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        """Close the open item of text or thinking."""
        if (kind := self._open) is None:
            return
        text = "".join(self._pieces)
        content = self._content_part(kind, text)
        item = self._response["output"][-1] | {"status": status, kind.field: [content]}
        fields = {"logprobs": self._shown_logprobs} if kind is MESSAGE else {}
        yield self._of_text(kind, f"{kind.text_event}.done", text=text, **fields)
        yield self._of_text(kind, f"{kind.part_event}.done", part=content)
        if kind is not MESSAGE and self._keeps_opaque:
            item["encrypted_content"] = opaque(text)
        self._open = None
        self._pieces = []
        self._shown_logprobs = []
        yield self._done(item)

    def call(self, event: Call) -> Iterator[dict[str, Any]]:
        yield from self._close("completed")
        tool = self._tools.get(event.name, Tool(event.name))
        if tool.search:
            search = {
                "type": "tool_search_call",
                "id": _id("tsc"),
                "call_id": _id("call"),
                "execution": "client",
                "arguments": json.loads(event.arguments),
            }
            yield self._added({**search, "status": "in_progress"})
            yield self._done({**search, "status": "completed"})
            return
        named = {"name": tool.name}
        if tool.namespace is not None:
            named = {"name": tool.name.removeprefix(_named("", tool.namespace)), "namespace": tool.namespace}
        kind, field = ("custom_tool_call", "input") if tool.custom else ("function_call", "arguments")
        content = _input(event.arguments) if tool.custom else event.arguments
        item = {"type": kind, "id": _id("ctc" if tool.custom else "fc"), "call_id": _id("call"), **named}
        yield self._added({**item, field: "", "status": "in_progress"})
        yield self._of_item(f"response.{kind}_{field}.delta", delta=content)
        fields = {} if tool.custom else {"name": named["name"]}
        yield self._of_item(f"response.{kind}_{field}.done", **fields, **{field: content})
        yield self._done({**item, field: content, "status": "completed"})

    def end(self, event: End) -> Iterator[dict[str, Any]]:
        status = "incomplete" if event.reason == "length" else "completed"
        if not self._response["output"]:  # clients expect a message
            yield from self._begin(MESSAGE)
        yield from self._close(status)
        usage = self._response["usage"]
        usage["input_tokens_details"]["cached_tokens"] = event.cached_tokens
        usage["output_tokens"] = event.tokens
        usage["output_tokens_details"]["reasoning_tokens"] = event.thinking_tokens
        usage["total_tokens"] += event.tokens
        self._response["status"] = status
        if status == "incomplete":
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self._response["completed_at"] = int(time.time())
        yield self._event(f"response.{status}", response=self._response)

    def _content_part(self, kind: TextKind, text: str) -> dict[str, Any]:
        fields = {"annotations": [], "logprobs": list(self._shown_logprobs)} if kind is MESSAGE else {}
        return {"type": kind.type, "text": text, **fields}

    def _added(self, item: dict[str, Any]) -> dict[str, Any]:
        self._response["output"].append(item)
        return self._of_last("response.output_item.added", item=item)

    def _done(self, item: dict[str, Any]) -> dict[str, Any]:
        self._response["output"][-1] = item
        return self._of_last("response.output_item.done", item=item)

    def _of_text(self, kind: TextKind, event: str, **fields: Any) -> dict[str, Any]:
        return self._of_item(f"response.{event}", **{f"{kind.field}_index": 0}, **fields)

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._of_last(kind, item_id=self._response["output"][-1]["id"], **fields)

    def _of_last(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return an event about the last item."""
        return self._event(kind, output_index=len(self._response["output"]) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **fields}


def _response(model: str, body: ResponsesBody, generation: Generation, sampling: Sampling) -> dict[str, Any]:
    """Return a response before its first token, with the options in effect."""
    reasoning = body.reasoning or Reasoning()
    text = body.text or TextConfig()
    choice = generation.tool_choice
    form = {"type": "text"} if text.format is None else msgspec.to_builtins(text.format)
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": generation.parallel_tool_calls,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": sampling.temp,
        "text": {
            "format": {name: value for name, value in form.items() if value is not None},
            "verbosity": "medium",
        },
        "tool_choice": choice
        if isinstance(choice, str)
        else {"type": _shown_tool(choice)["type"], "name": choice.name},
        "tools": [_shown_tool(tool) for tool in generation.tools],
        "top_logprobs": generation.top_logprobs,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _shown_tool(tool: Tool) -> dict[str, Any]:
    """Return a tool in the shape of a response."""
    common = {"name": tool.name, "description": tool.description}
    if tool.search:
        return {"type": SEARCH, "execution": "client", **common, "parameters": tool.parameters}
    if not tool.custom:
        return {"type": "function", **common, "parameters": tool.parameters, "strict": tool.strict}
    grammar = {"type": "grammar", "syntax": "lark", "definition": tool.grammar}
    return {"type": "custom", **common, "format": grammar if tool.grammar else {"type": "text"}}


def _input(arguments: str) -> str:
    """Return the text for a custom tool, or the raw arguments if they have none."""
    text = json.loads(arguments).get("input")
    return text if isinstance(text, str) else arguments


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


RESPONSES = Dialect(ResponsesBody, lambda *arguments: [responses_generation(*arguments)], ResponseStream)

"""The supported parts of Anthropic's /v1/messages and /v1/messages/count_tokens (docs.claude.com).

Fields that are not declared here are ignored and reported, see :class:`kvant.server.left_out.LeftOut`.
"""

import asyncio
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse

from kvant.server.answering import read_prompt
from kvant.server.body import (
    DraftField,
    Fields,
    SamplingFields,
    check_range,
    known_of,
    max_tokens,
    sampling_options,
    stops,
    typed,
)
from kvant.server.endpoint import BodyReader, Dialect, Encoder, unless_gone
from kvant.server.errors import ApiError
from kvant.server.generation import Begun, Call, End, Format, Generation, Text, Tool, ToolChoice
from kvant.server.left_out import LeftOut
from kvant.server.registry import Registry
from kvant.server.service import Service
from kvant.server.turns import (
    Turns,
    checked_tools,
    described,
    from_opaque,
    opaque,
    switched,
    text_of,
    thinking_tokens,
    tool_named,
    with_effort,
)
from kvant.text.tokenizer import Tokenizer

CHOICES: Mapping[str, ToolChoice] = {"auto": "auto", "any": "required", "none": "none"}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
BILLING = "x-anthropic-billing-header:"
KEEP_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}
REFERENCE = "tool_reference"  # type of a block in a result; it names a tool that a search returned
EXPECTED = "text, a document of plain text, thinking, tool_use or tool_result"
# has no effect: prefixes of all prompts are cached
CacheControl = dict[str, Any] | None


class TextBlock(Fields, frozen=True):
    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    citations: Any = None


class DocumentBlock(Fields, frozen=True):
    """A document. Only plain text is supported."""

    type: Literal["document"]
    source: dict[str, Any]
    title: str | None = None
    context: str | None = None
    cache_control: CacheControl = None
    citations: Any = None

    @property
    def text(self) -> str | None:
        """Title, context and text, or None if the document is not plain text."""
        text = self.source.get("data")
        if self.source.get("type") != "text" or not isinstance(text, str):
            return None
        return "\n".join(filter(None, (self.title, self.context, text)))


class ThinkingBlock(Fields, frozen=True):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(Fields, frozen=True):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl = None
    caller: Any = None


class ToolResultBlock(Fields, frozen=True):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Any] | None = None
    is_error: bool | None = None
    cache_control: CacheControl = None


Block = TextBlock | DocumentBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
TEXTS: Mapping[str, type[TextBlock | DocumentBlock]] = {"text": TextBlock, "document": DocumentBlock}
BLOCKS: Mapping[str, type[Block]] = {
    **TEXTS,
    "thinking": ThinkingBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
}


class Message(Fields, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Any]


class ToolBody(Fields, frozen=True, kw_only=True):
    type: Literal["custom"] | None = None
    name: str
    description: str = ""
    input_schema: dict[str, Any]
    strict: bool = False
    defer_loading: bool = False  # has an effect only if a result refers to the tool
    cache_control: CacheControl = None
    eager_input_streaming: bool | None = None  # would set the pieces that a call is streamed in


class ToolChoiceBody(Fields, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingOn(Fields, frozen=True, tag="enabled"):
    budget_tokens: int
    display: Literal["summarized", "omitted"] | None = None


class ThinkingOff(Fields, frozen=True, tag="disabled"):
    pass


class ThinkingAdaptive(Fields, frozen=True, tag="adaptive"):
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Fields, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Fields, frozen=True):
    effort: str | None = None
    format: OutputFormat | None = None


class ContextManagement(Fields, frozen=True):
    """Edits of the conversation. Only the one that keeps all thinking is accepted; others are ignored."""

    edits: list[dict[str, Any]] | None = None


class Metadata(Fields, frozen=True):
    user_id: str | None = None


class Conversation(Fields, frozen=True, kw_only=True):
    """The fields that /v1/messages and /v1/messages/count_tokens share."""

    model: str
    messages: list[Message]
    system: str | list[TextBlock] | None = None
    tools: list[Any] | None = None
    tool_choice: ToolChoiceBody | None = None
    thinking: ThinkingOn | ThinkingOff | ThinkingAdaptive | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # output_config.format under its name in the beta
    context_management: ContextManagement | None = None
    cache_control: CacheControl = None
    thread: dict[str, Any] | None = None


class MessagesBody(Conversation, frozen=True, kw_only=True):
    """A body of /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    stop_sequences: list[str] | None = None
    draft: DraftField = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


def messages_generation(body: MessagesBody, service: Service, left_out: LeftOut) -> Generation:
    """Return the generation that a body of /v1/messages requests."""
    if body.temperature is not None:
        check_range("temperature", body.temperature, 0, 1)
    sampling = sampling_options(
        SamplingFields(temperature=body.temperature, top_p=body.top_p, top_k=body.top_k)
    )
    thinking = body.thinking
    budget = thinking.budget_tokens if isinstance(thinking, ThinkingOn) else None
    if budget is not None and not 1 <= budget < body.max_tokens:
        raise ApiError(
            f"thinking.budget_tokens is {budget}; expected 1 to {body.max_tokens - 1}, less than max_tokens",
            param="thinking.budget_tokens",
        )
    if budget is not None and thinking_tokens(service.tokenizer) is None:
        left_out.add("thinking.budget_tokens", budget)
        budget = None
    return replace(
        conversation(body, service, left_out),
        thinking_budget=budget,
        sampling=sampling,
        max_tokens=max_tokens(body.max_tokens),
        stop=stops(body.stop_sequences, "stop_sequences"),
        draft=body.draft,
    )


def conversation(body: Conversation, service: Service, left_out: LeftOut) -> Generation:
    """Return a generation with the body's messages, tools, format and template variables."""
    if body.thread is not None:  # this code makes Anthropic's clients continue without a thread
        raise ApiError(
            "thread is set, but this server stores nothing; send the whole conversation without it",
            param="thread",
            code="thread_unsupported_request",
        )
    management = body.context_management or ContextManagement()
    for at, edit in enumerate(management.edits or ()):
        if edit != KEEP_THINKING:
            left_out.add(f"context_management.edits[{at}]", edit.get("type", ""))
    tools = _tools(body, left_out)
    choice = body.tool_choice or ToolChoiceBody("auto")
    if (choice.type == "tool") is not (choice.name is not None):
        raise ApiError('tool_choice.name is expected with the type "tool" only', param="tool_choice.name")
    if choice.type in ("any", "tool") and not tools:
        raise ApiError(f"tool_choice is {choice.type!r}; expected tools with it", param="tool_choice")
    named = None if choice.name is None else tool_named(tools, choice.name, "tool_choice.name")
    return Generation(
        messages=_messages(body, tools, left_out),
        tools=tools,
        tool_choice=named or CHOICES[choice.type],
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        format=_format(body),
        variables=_variables(body, service.tokenizer, left_out),
    )


def _tools(body: Conversation, left_out: LeftOut) -> tuple[Tool, ...]:
    """Return the tools. Only a tool that a result refers to is deferred: the result shows it to the model."""
    shown_names = _referred_names(body)
    made: dict[str, Tool] = {}
    for at, each in known_of(body.tools, {"custom": ToolBody}, "tools", left_out, "custom"):
        deferred = each.defer_loading and each.name in shown_names
        if each.defer_loading and not deferred:
            left_out.add(f"{at}.defer_loading")
        tool = Tool(each.name, each.description, each.input_schema, each.strict, deferred=deferred)
        made[f"{at}.name"] = tool
    return checked_tools(made)


def _referred_names(body: Conversation) -> set[str]:
    """Return the names of the tools that the results in a conversation refer to."""
    names: set[str] = set()
    for message in body.messages:
        for block in _objects(message.content):
            for child in _objects(block.get("content")):
                if child.get("type") == REFERENCE:
                    names.add(str(child.get("tool_name")))
    return names


def _objects(value: object) -> list[dict[str, Any]]:
    """Return the JSON objects in a list, or an empty list if the value is not a list."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def shows_thinking(body: MessagesBody) -> bool:
    """Return whether the client asked for the text of the thinking."""
    return not (
        isinstance(body.thinking, ThinkingOn | ThinkingAdaptive) and body.thinking.display == "omitted"
    )


def _format(body: Conversation) -> Format | None:
    form = (body.output_config or OutputConfig()).format
    if form is not None and body.output_format is not None:
        raise ApiError(
            "output_config.format and output_format are both set; expected one of them", param="output_format"
        )
    form = form or body.output_format
    return None if form is None else Format("json_schema", form.schema)


def _variables(body: Conversation, tokenizer: Tokenizer, left_out: LeftOut) -> Mapping[str, Any]:
    variables: dict[str, Any] = {}
    # with "adaptive" the model decides, as its template does
    if isinstance(body.thinking, ThinkingOn | ThinkingOff):
        variables |= switched(tokenizer, isinstance(body.thinking, ThinkingOn), "thinking", left_out)
    effort = (body.output_config or OutputConfig()).effort
    return variables | with_effort(tokenizer, effort, "output_config.effort", left_out)


def _messages(body: Conversation, tools: Sequence[Tool], left_out: LeftOut) -> list[dict[str, Any]]:
    """Return the system prompt and the turns. As at Anthropic, adjacent messages of a role are one turn."""
    if not body.messages:
        raise ApiError("messages is empty; expected at least one", param="messages")
    if body.messages[-1].role == "assistant":
        raise ApiError(
            "the last of messages is the assistant's; expected the user's: the client cannot begin an answer",
            param="messages",
        )
    turns = Turns()
    unseen = {tool.name: tool for tool in tools}  # tools that no result has shown to the model so far
    if body.system:
        for at, text in enumerate(
            [body.system] if isinstance(body.system, str) else [b.text for b in body.system]
        ):
            if text.startswith(BILLING):  # it differs between sessions, which would prevent a shared prefix
                left_out.add(f"system[{at}]", BILLING)
            else:
                turns.add_text("system", text)
    for at, message in enumerate(body.messages):
        if isinstance(message.content, str):
            turns.add_text(message.role, message.content)
            continue
        for place, block in typed(message.content, BLOCKS, f"messages[{at}].content", left_out):
            # blocks of Anthropic's own tools, and redacted thinking
            if isinstance(block, str) and block and message.role == "assistant":
                left_out.add(place, block)
            elif isinstance(block, str):
                raise ApiError(f"{place}.type is {block[:80]!r}; expected {EXPECTED}", param=f"{place}.type")
            else:
                _add(turns, message.role, block, place, unseen, left_out)
    return turns.messages()


def _add(
    turns: Turns,
    role: str,
    block: Block,
    place: str,
    unseen: dict[str, Tool],
    left_out: LeftOut,
) -> None:
    match block, role:
        case DocumentBlock(text=None), _:
            kind = str(block.source.get("media_type") or block.source.get("type"))
            message = f"{place}.source is {kind[:80]!r}; expected a text of the type text/plain"
            raise ApiError(message, param=f"{place}.source")
        case TextBlock() | DocumentBlock(), _:
            turns.add_text(role, block.text or "")
        case ThinkingBlock(thinking="", signature=signature), "assistant":
            turns.add_thinking(from_opaque(signature, f"{place}.signature", left_out) if signature else "")
        case ThinkingBlock(thinking=thinking), "assistant":
            turns.add_thinking(thinking)
        case ToolUseBlock(), "assistant":
            turns.add_call(block.id, block.name, block.input, place)
        case ToolResultBlock(), "user":
            result = _result(block, place, unseen, left_out)
            turns.add_result(block.tool_use_id, result, f"{place}.tool_use_id")
        case _:
            raise ApiError(
                f"{place} has the type {block.type!r}, which the role {role!r} cannot have", param=place
            )


def _result(block: ToolResultBlock, place: str, unseen: dict[str, Tool], left_out: LeftOut) -> str:
    """Return the text of a tool's result. Templates have no field for an error, so the text says it."""
    content = block.content
    if isinstance(content, list):
        content = [_referred(each, unseen) for each in content]
    text = text_of(content, TEXTS, f"{place}.content", left_out, notes=True)
    return f"Error: {text}" if block.is_error and not text.lower().startswith("error") else text


def _referred(content: Any, unseen: dict[str, Tool]) -> Any:
    """Return a block of a result; the first reference to a tool becomes text that describes the tool."""
    if not isinstance(content, dict) or content.get("type") != REFERENCE:
        return content
    name = str(content.get("tool_name"))
    tool = unseen.pop(name, None)
    known = f"[the tool {name[:80]} was shown before, or is not part of this request]"
    return {"type": "text", "text": known if tool is None else described([tool])}


class MessageStream(Encoder):
    """Encode events in the order of Anthropic's stream.

    message_start, then for each block content_block_start, content_block_delta, content_block_stop, then
    message_delta and message_stop. A block is a text, a thinking or a tool call.
    """

    def __init__(self, name: str, *, shows_thinking: bool = True) -> None:
        self._message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {},
        }
        self._shows_thinking = shows_thinking
        self._pieces: list[str] = []  # text of the open block
        self._open = ""  # its type

    def begun(self, event: Begun) -> Iterator[dict[str, Any]]:
        self._message["usage"] = {
            "input_tokens": event.prompt_tokens,
            "cache_read_input_tokens": 0,  # known at the end
            "cache_creation_input_tokens": 0,
            "output_tokens": 0,
        }
        yield {"type": "message_start", "message": self._message}
        yield from self.waiting()

    def waiting(self) -> Iterator[dict[str, Any]]:
        yield {"type": "ping"}

    def whole(self) -> dict[str, Any]:
        return self._message

    def failed(self, error: ApiError, request_id: str) -> Iterable[dict[str, Any]]:
        return [error.anthropic(request_id)]

    def text(self, event: Text) -> Iterator[dict[str, Any]]:
        kind = "thinking" if event.thinking else "text"
        if kind != self._open:
            yield from self._close()
            self._open = kind
            yield self._begin({"type": kind, kind: "", **({"signature": ""} if event.thinking else {})})
        self._pieces.append(event.text)
        if self._shows_thinking or not event.thinking:
            yield self._of_block("delta", delta={"type": f"{kind}_delta", kind: event.text})

    def call(self, event: Call) -> Iterator[dict[str, Any]]:
        yield from self._close()
        block = {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": event.name, "input": {}}
        yield self._begin(block)
        yield self._of_block("delta", delta={"type": "input_json_delta", "partial_json": event.arguments})
        block["input"] = msgspec.json.decode(event.arguments)
        yield self._of_block("stop")

    def end(self, event: End) -> Iterator[dict[str, Any]]:
        yield from self._close()
        reason = "stop_sequence" if event.stop is not None else REASONS[event.reason]
        usage = self._message["usage"]
        usage["input_tokens"] -= event.cached_tokens
        usage["cache_read_input_tokens"] = event.cached_tokens
        usage["output_tokens"] = event.tokens
        usage["output_tokens_details"] = {"thinking_tokens": event.thinking_tokens}
        delta = {"stop_reason": reason, "stop_sequence": event.stop}
        self._message |= delta
        yield {"type": "message_delta", "delta": delta, "usage": dict(usage)}
        yield {"type": "message_stop"}

    def _begin(self, block: dict[str, Any]) -> dict[str, Any]:
        self._message["content"].append(block)
        return self._of_block("start", content_block=block)

    def _of_block(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return an event about the last block."""
        return {"type": f"content_block_{kind}", "index": len(self._message["content"]) - 1, **fields}

    def _close(self) -> Iterator[dict[str, Any]]:
        """End the open block of text or thinking."""
        kind = self._open
        text = "".join(self._pieces)
        if not kind:
            return
        self._open = ""
        self._pieces = []
        block = self._message["content"][-1]
        if kind == "text":
            block["text"] = text
        else:
            # Clients send a block back only with a signature. It has the thinking if they were not shown it.
            block["thinking"] = text if self._shows_thinking else ""
            block["signature"] = opaque("" if self._shows_thinking else text)
            yield self._of_block("delta", delta={"type": "signature_delta", "signature": block["signature"]})
        yield self._of_block("stop")


MESSAGES = Dialect(
    MessagesBody,
    lambda *arguments: [messages_generation(*arguments)],
    lambda name, body, generations, service: MessageStream(name, shows_thinking=shows_thinking(body)),
)


async def count_tokens(request: Request) -> JSONResponse:
    """Count the tokens of a conversation as rendered: system prompt, tools and the template's own text."""
    registry: Registry = request.app.state.registry
    left_out: LeftOut = request.state.left_out
    async with await BodyReader.of(request) as reader:
        body = await reader.decode(Conversation, left_out, registry.context)
        service, _ = await reader.use_model(body.model)
        generation = await reader.call(lambda: conversation(body, service, left_out))
    prompt = await unless_gone(request.receive, asyncio.to_thread(read_prompt, service, generation))
    return JSONResponse({"input_tokens": len(prompt.ids)})

"""Bodies of OpenAI's Responses API as this server's generations: items become messages for a chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvant.server.answer_limits import max_tokens
from kvant.server.body import decode
from kvant.server.errors import ApiError
from kvant.server.generation import Format, Generation, Tool, ToolChoice
from kvant.server.openai_body import JsonObjectFormat
from kvant.server.openai_messages import MAX_TOP_LOGPROBS, check_arguments
from kvant.server.responses_body import (
    AllowedTools,
    CallItem,
    FunctionChoice,
    InputText,
    Item,
    JsonSchema,
    MessageItem,
    OutputText,
    Part,
    ReasoningItem,
    Refusal,
    ResponsesBody,
    ResultItem,
)
from kvant.server.sampling import check_range, sampling_options
from kvant.server.service import Service
from kvant.server.thinking_options import from_opaque, with_effort
from kvant.server.tools import checked_tools, tool_named
from kvant.server.turns import Turns, call_arguments, joined, not_text

ITEMS: Mapping[str, type[Item]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": ResultItem,
    "reasoning": ReasoningItem,
}
ROLES = {"developer": "system"}  # OpenAI's newer name of the role that templates know
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
STORED = "this server stores nothing: send the whole conversation, with store false"


class _Kind(msgspec.Struct):
    type: str = "message"


def responses_generation(body: ResponsesBody, service: Service, salt: bytes) -> Generation:
    """What a body of /v1/responses asks for.

    Raises:
        ApiError: something that it cannot have.
    """
    if body.previous_response_id is not None:
        raise ApiError(f"previous_response_id is given; {STORED}", param="previous_response_id")
    if body.store:
        raise ApiError(f"store is true; {STORED} or left out", param="store")
    if body.stream_options is not None and not body.stream:
        raise ApiError("stream_options is given without stream: true", param="stream_options")
    top_logprobs = body.top_logprobs or 0
    check_range("top_logprobs", top_logprobs, 0, MAX_TOP_LOGPROBS)
    tools, choice = _tools(body)
    effort = body.reasoning.effort if body.reasoning is not None else None
    variables = {} if effort is None else with_effort(service.tokenizer, effort, "reasoning.effort")
    return Generation(
        messages=_messages(body),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        format=_format(body),
        sampling=sampling_options(body),
        max_tokens=max_tokens(body.max_output_tokens, "max_output_tokens"),
        logprobs=top_logprobs > 0 or "message.output_text.logprobs" in (body.include or []),
        top_logprobs=top_logprobs,
        variables=variables,
        draft=body.draft,
        salt=salt,
    )


def _tools(body: ResponsesBody) -> tuple[Sequence[Tool], ToolChoice | Tool]:
    """The tools, and which of them is to be called."""
    given = [
        Tool(each.name, each.description or "", each.parameters or NO_PARAMETERS, bool(each.strict))
        for each in body.tools or []
    ]
    tools = checked_tools(given, "tools[{}].name")
    choice = body.tool_choice
    if isinstance(choice, FunctionChoice):
        return tools, tool_named(tools, choice.name)
    if isinstance(choice, AllowedTools):
        tools = tuple({each.name: tool_named(tools, each.name) for each in choice.tools}.values())
        choice = choice.mode
    if choice == "required" and not tools:
        raise ApiError("tool_choice is 'required'; expected tools with it", param="tool_choice")
    return tools, choice or "auto"


def _format(body: ResponsesBody) -> Format | None:
    match body.text.format if body.text is not None else None:
        case JsonObjectFormat():
            return Format("json_object")
        case JsonSchema(schema=schema):
            return Format("json_schema", schema)
    return None


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    turns = Turns()
    if body.instructions:
        turns.add_text("system", body.instructions)
    if isinstance(body.input, str):
        turns.add_text("user", body.input)
        return turns.messages()
    if not body.input:
        raise ApiError("input is empty; expected text or at least one item", param="input")
    items = [_item(bytes(raw), f"input[{at}]") for at, raw in enumerate(body.input)]
    check_arguments([item.arguments for item in items if isinstance(item, CallItem)])
    for at, item in enumerate(items):
        _add(turns, item, f"input[{at}]")
    return turns.messages()


def _item(raw: bytes, place: str) -> Item:
    """One item of the input, by its type."""
    try:
        kind = msgspec.json.decode(raw, type=_Kind).type
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(f"{place}: {error}", param=place) from error
    if kind == "item_reference":
        raise ApiError(f"{place} is an item_reference; {STORED}", param=place)
    if kind not in ITEMS:
        raise ApiError(f"{place}.type is {kind[:80]!r}; expected one of {', '.join(ITEMS)}", param=f"{place}.type")
    try:
        return decode(raw, ITEMS[kind])
    except ApiError as error:
        raise ApiError(f"{place}: {error.message}", param=f"{place}.{error.param}" if error.param else place) from error


def _add(turns: Turns, item: Item, place: str) -> None:
    match item:
        case MessageItem():
            turns.add_text(ROLES.get(item.role, item.role), _text(item.content, f"{place}.content"))
        case ReasoningItem():
            turns.add_thinking(_thinking(item, place))
        case CallItem():
            turns.add_call(item.call_id, item.name, call_arguments(item.arguments, f"{place}.arguments"))
        case ResultItem():
            turns.add_result(item.call_id, _text(item.output, f"{place}.output"), f"{place}.call_id")


def _text(content: str | Sequence[Part], place: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for at, part in enumerate(content):
        match part:
            case InputText(text=text) | OutputText(text=text) | Refusal(refusal=text):
                texts.append(text)
            case _:
                raise not_text(f"{place}[{at}]", part)
    return joined(texts)


def _thinking(item: ReasoningItem, place: str) -> str:
    """An earlier answer's thinking, in whichever way the client was given it."""
    if item.content:
        return joined([part.text for part in item.content])
    if item.encrypted_content is not None:
        return from_opaque(item.encrypted_content, f"{place}.encrypted_content")
    return joined([part.text for part in item.summary or []])

"""Anthropic's conversations as this server's: turns of blocks become messages for a chat template."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvant.server.answer_limits import max_tokens, stops
from kvant.server.anthropic_body import (
    Block,
    Conversation,
    MessagesBody,
    TextBlock,
    ThinkingAdaptive,
    ThinkingBlock,
    ThinkingOff,
    ThinkingOn,
    ToolResultBlock,
    ToolUseBlock,
)
from kvant.server.body import NotText
from kvant.server.errors import ApiError
from kvant.server.generation import Format, Generation, Tool, ToolChoice
from kvant.server.sampling import SamplingFields, check_range, sampling_options
from kvant.server.service import Service
from kvant.server.thinking_options import from_opaque, switched, with_effort
from kvant.server.tools import checked_tools, tool_named
from kvant.server.turns import Turns, joined, not_text
from kvant.text.tokenizer import Tokenizer

CHOICES: Mapping[str, ToolChoice] = {"auto": "auto", "any": "required", "none": "none"}
MAX_NAME = 128  # characters of a tool's name


def messages_generation(body: MessagesBody, service: Service, salt: bytes) -> Generation:
    """What a body of /v1/messages asks for.

    Raises:
        ApiError: 400: a field that cannot be applied.
    """
    if body.temperature is not None:
        check_range("temperature", body.temperature, 0, 1)
    sampling = sampling_options(SamplingFields(temperature=body.temperature, top_p=body.top_p, top_k=body.top_k))
    thinking = body.thinking
    budget = thinking.budget_tokens if isinstance(thinking, ThinkingOn) else None
    if budget is not None and not 1 <= budget < body.max_tokens:
        raise ApiError(
            f"thinking.budget_tokens is {budget}; expected 1 to {body.max_tokens - 1}, less than max_tokens",
            param="thinking.budget_tokens",
        )
    return replace(
        conversation(body, service),
        thinking_budget=budget,
        sampling=sampling,
        max_tokens=max_tokens(body.max_tokens),
        stop=stops(body.stop_sequences, "stop_sequences"),
        draft=body.draft,
        salt=salt,
    )


def conversation(body: Conversation, service: Service) -> Generation:
    """The prompt that a body asks for: messages, tools, a format and the template's variables.

    Raises:
        ApiError: something that it cannot have.
    """
    if body.thread is not None:  # with this code Anthropic's clients go on without one
        raise ApiError(
            "thread is given; this server stores nothing: send the whole conversation without it",
            param="thread",
            code="thread_unsupported_request",
        )
    given = [Tool(each.name, each.description, each.input_schema, each.strict) for each in body.tools or []]
    tools = checked_tools(given, "tools[{}].name", MAX_NAME)
    choice = body.tool_choice
    wanted: ToolChoice | Tool = "auto"
    if choice is not None:
        if (choice.type == "tool") is not (choice.name is not None):
            raise ApiError('tool_choice.name goes with the type "tool", and only there', param="tool_choice.name")
        if choice.type in ("any", "tool") and not tools:
            raise ApiError(f"tool_choice is {choice.type!r}; expected tools with it", param="tool_choice")
        wanted = CHOICES[choice.type] if choice.name is None else tool_named(tools, choice.name, "tool_choice.name")
    return Generation(
        messages=_messages(body),
        tools=tools,
        tool_choice=wanted,
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        format=_format(body),
        variables=_variables(body, service.tokenizer),
    )


def shows_thinking(body: MessagesBody) -> bool:
    """Whether the client wants the text of the thinking."""
    return not (isinstance(body.thinking, ThinkingOn | ThinkingAdaptive) and body.thinking.display == "omitted")


def _format(body: Conversation) -> Format | None:
    given = body.output_config.format if body.output_config is not None else None
    if given is not None and body.output_format is not None:
        raise ApiError("output_config.format and output_format are given; expected one of them", param="output_format")
    given = given or body.output_format
    return None if given is None else Format("json_schema", given.schema)


def _variables(body: Conversation, tokenizer: Tokenizer) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    if isinstance(body.thinking, ThinkingOn | ThinkingOff):  # with "adaptive" the model decides, as its template does
        found |= switched(tokenizer, isinstance(body.thinking, ThinkingOn), "thinking")
    if body.output_config is not None and body.output_config.effort is not None:
        found |= with_effort(tokenizer, body.output_config.effort, "output_config.effort")
    return found


def _messages(body: Conversation) -> list[dict[str, Any]]:
    """The system prompt and the turns. Messages of one role that follow one another are one turn, as at Anthropic."""
    if not body.messages:
        raise ApiError("messages is empty; expected at least one", param="messages")
    if body.messages[-1].role == "assistant":
        raise ApiError(
            "messages ends with one of the assistant; expected the user's: an answer cannot be begun by the client",
            param="messages",
        )
    turns = Turns()
    if body.system:
        for text in [body.system] if isinstance(body.system, str) else [block.text for block in body.system]:
            turns.add_text("system", text)
    for at, message in enumerate(body.messages):
        if isinstance(message.content, str):
            turns.add_text(message.role, message.content)
            continue
        for number, block in enumerate(message.content):
            _add(turns, message.role, block, f"messages[{at}].content[{number}]")
    return turns.messages()


def _add(turns: Turns, role: str, block: Block, place: str) -> None:
    match block, role:
        case TextBlock(text=text), _:
            turns.add_text(role, text)
        case ThinkingBlock(thinking="", signature=signature), "assistant":
            turns.add_thinking(from_opaque(signature, f"{place}.signature") if signature else "")
        case ThinkingBlock(thinking=thinking), "assistant":
            turns.add_thinking(thinking)
        case ToolUseBlock(), "assistant":
            turns.add_call(block.id, block.name, block.input)
        case ToolResultBlock(), "user":
            turns.add_result(block.tool_use_id, _result(block, place), f"{place}.tool_use_id")
        case NotText(), _:
            raise not_text(place, block)
        case _:
            kind = block.__struct_config__.tag
            raise ApiError(f"{place} is of the type {kind!r}; it is no block of the {role}", param=place)


def _result(block: ToolResultBlock, place: str) -> str:
    """The text of a tool's result. That it is an error has to be said in the text: templates know no mark of it."""
    texts: list[str] = []
    for at, part in enumerate([TextBlock(block.content)] if isinstance(block.content, str) else block.content or []):
        if not isinstance(part, TextBlock):
            raise not_text(f"{place}.content[{at}]", part)
        texts.append(part.text)
    text = joined(texts)
    return f"Error: {text}" if block.is_error and not text.lower().startswith("error") else text

"""OpenAI's conversations, tools and formats as a generation asks for them."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvant.server.answer_limits import max_tokens, number_of_answers, stops
from kvant.server.errors import ApiError
from kvant.server.generation import Format, Generation, Tool, ToolChoice
from kvant.server.openai_body import (
    ChatBody,
    CommonBody,
    FunctionTool,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    NamedChoice,
    Part,
    StructuredOutputs,
    ToolCall,
)
from kvant.server.sampling import check_range, sampling_options
from kvant.server.security import MAX_VALUES, count_marks, count_values
from kvant.server.service import Service
from kvant.server.thinking_options import with_effort
from kvant.server.tools import checked_tools, tool_named
from kvant.server.turns import call_arguments, joined
from kvant.text.grammar_source import MAX_SOURCE, escaped
from kvant.text.variables import check_variables

MAX_TOP_LOGPROBS = 20  # OpenAI's


def chat_generation(body: ChatBody, service: Service, salt: bytes) -> Generation:
    """What a body of /v1/chat/completions asks for.

    Raises:
        ApiError: 400: a field that cannot be applied.
    """
    if body.store:
        raise ApiError("store is true; expected false: this server keeps no answers", param="store")
    if body.top_logprobs is not None:
        check_range("top_logprobs", body.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if body.top_logprobs and not body.logprobs:
            raise ApiError("top_logprobs has no effect without logprobs: true", param="top_logprobs")
    tools = tools_of(body.tools or ())
    return Generation(
        messages=messages_of(body.messages),
        tools=tools,
        tool_choice=_tool_choice(body, tools),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        format=_format(body),
        max_tokens=_max_tokens(body),
        logprobs=bool(body.logprobs),
        top_logprobs=body.top_logprobs or 0,
        variables=_variables(body, service),
        **common_fields(body, service, salt),
    )


def common_fields(body: CommonBody, service: Service, salt: bytes) -> dict[str, Any]:
    """The fields of a generation that chat and completions fill in the same way.

    Raises:
        ApiError: 400: a field that cannot be applied.
    """
    if body.stream_options is not None:
        if not body.stream:
            raise ApiError("stream_options has no effect without stream: true", param="stream_options")
        if body.stream_options.include_obfuscation:
            param = "stream_options.include_obfuscation"
            raise ApiError(f"{param} is true; expected false: a stream's lengths are not hidden", param=param)
    return {
        "sampling": sampling_options(body),
        "stop": stops(body.stop),
        "answers": number_of_answers(body.n, service),
        "ignore_eos": bool(body.ignore_eos),
        "draft": body.draft,
        "salt": salt,
    }


def messages_of(messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    """A conversation as :attr:`Generation.messages` has it.

    Raises:
        ApiError: 400: a message that no chat template can be given.
    """
    if not messages:
        raise ApiError("messages is empty; expected at least one message", param="messages")
    check_arguments([call.function.arguments for message in messages for call in message.tool_calls or ()])
    names: dict[str, str] = {}  # of tools, by the ids of their calls
    return [_message(f"messages[{place}]", message, names) for place, message in enumerate(messages)]


def _message(place: str, message: Message, names: dict[str, str]) -> Mapping[str, Any]:
    role = "system" if message.role == "developer" else message.role
    made: dict[str, Any] = {"role": role, "content": text_of(message.content, f"{place}.content")}
    if message.name is not None:
        made["name"] = message.name
    for name in ("tool_calls", "reasoning_content", "reasoning", "refusal"):
        if role != "assistant" and getattr(message, name):
            raise ApiError(f"{place} of the role {role!r} has {name}; expected it of an assistant", param=place)
    if (message.tool_call_id is None) is (role == "tool"):
        raise ApiError(f"{place}: expected tool_call_id of the role 'tool', and only there", param=place)
    if role == "tool":
        called = message.tool_call_id or ""
        if called not in names:
            param = f"{place}.tool_call_id"
            raise ApiError(f"{param} is {called[:80]!r}; no call before it has this id", param=param)
        return {"name": names[called], **made, "tool_call_id": called}
    if message.tool_calls:
        made["tool_calls"] = [_call(f"{place}.tool_calls[{at}]", call) for at, call in enumerate(message.tool_calls)]
        names |= {call.id: call.function.name for call in message.tool_calls}
    if reasoning := message.reasoning_content or message.reasoning:
        made["reasoning_content"] = reasoning
    if message.content is None:
        made["content"] = message.refusal or ""
        if role != "assistant" or not (message.tool_calls or message.refusal or reasoning):
            raise ApiError(f"{place} has no content; expected text", param=f"{place}.content")
    return made


def check_arguments(texts: Sequence[str]) -> None:
    """Refuse the arguments of calls, JSON texts in a body, where they have as many values as no body may have.

    Raises:
        ApiError: 400: they have.
    """
    parts = [text.encode("utf-8", "replace") for text in texts]
    if sum(map(count_marks, parts)) > MAX_VALUES and (count := sum(map(count_values, parts))) > MAX_VALUES:
        raise ApiError(f"the arguments of calls have {count} values of JSON; expected {MAX_VALUES} at most")


def _call(place: str, call: ToolCall) -> dict[str, Any]:
    """A call, its arguments an object as chat templates expect them."""
    arguments = call_arguments(call.function.arguments, f"{place}.function.arguments")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def text_of(content: str | Sequence[Part] | None, name: str) -> str:
    """A message's text; of several parts, put together.

    Raises:
        ApiError: a part that is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for place, part in enumerate(content):
        text = {"text": part.text, "refusal": part.refusal}.get(part.type)
        if text is None:
            given = f"{name}[{place}]"
            said = f"has no {part.type}" if part.type in ("text", "refusal") else f"is of the type {part.type[:40]!r}"
            raise ApiError(f"{given} {said}; the model reads text only", param=given)
        for other in {"text", "refusal", "image_url", "input_audio", "audio_url", "video_url", "file"} - {part.type}:
            if getattr(part, other) is not None:
                given = f"{name}[{place}].{other}"
                raise ApiError(f"{given} is given in a part of the type {part.type!r}", param=given)
        texts.append(text)
    return joined(texts)


def tools_of(tools: Sequence[FunctionTool]) -> tuple[Tool, ...]:
    """The functions that the model may call.

    Raises:
        ApiError: 400: too many, or one with a name that is none, or is another's.
    """
    made = []
    for tool in tools:
        function = tool.function
        given = {} if function.parameters is None else {"parameters": function.parameters}
        made.append(Tool(function.name, function.description or "", strict=bool(function.strict), **given))
    return checked_tools(made, "tools[{}].function.name")


def _tool_choice(body: ChatBody, tools: Sequence[Tool]) -> ToolChoice | Tool:
    choice = body.tool_choice
    if choice in (None, "none") or (choice == "auto" and not tools):
        return "auto" if choice is None else "none"
    if not tools:
        raise ApiError("tool_choice has no effect without tools", param="tool_choice")
    if not isinstance(choice, NamedChoice):
        return choice
    return tool_named(tools, choice.function.name)


def _format(body: ChatBody) -> Format | None:
    wanted = body.response_format
    if structured := structured_format(body.structured_outputs):
        if isinstance(wanted, JsonObjectFormat | JsonSchemaFormat):
            said = "response_format and structured_outputs are given; expected one of them"
            raise ApiError(said, param="response_format")
        return structured
    if isinstance(wanted, JsonObjectFormat):
        return Format("json_object")
    if isinstance(wanted, JsonSchemaFormat):
        return Format("json_schema", wanted.json_schema.schema)
    return None


def structured_format(given: StructuredOutputs | None) -> Format | None:
    """vLLM's structured_outputs.

    Raises:
        ApiError: 400: more or less than one format.
    """
    if given is None:
        return None
    found = [name for name in ("json", "regex", "choice", "grammar") if getattr(given, name) is not None]
    if len(found) != 1:
        said = ", ".join(found) or "nothing"
        raise ApiError(
            f"structured_outputs has {said}; expected one of json, regex, choice, grammar", param="structured_outputs"
        )
    if given.json is not None:
        return Format("json_schema", given.json)
    if given.choice is not None:
        if not given.choice:
            raise ApiError("structured_outputs.choice is empty; expected texts", param="structured_outputs.choice")
        if sum(map(len, given.choice)) > MAX_SOURCE:
            said = f"structured_outputs.choice has more than {MAX_SOURCE} characters"
            raise ApiError(said, param="structured_outputs.choice")
        return Format("regex", "|".join(map(escaped, given.choice)))
    return Format("regex", given.regex) if given.regex is not None else Format("grammar", given.grammar or "")


def _max_tokens(body: ChatBody) -> int | None:
    """The number that either field gives."""
    given = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(given) > 1:
        raise ApiError("max_tokens and max_completion_tokens differ; expected one of them", param="max_tokens")
    return max_tokens(given.pop() if given else None)


def _variables(body: ChatBody, service: Service) -> dict[str, Any]:
    """The client's variables of the chat template."""
    given = dict(body.chat_template_kwargs or {})
    try:
        check_variables(service.tokenizer, given)
    except ValueError as error:
        raise ApiError(f"chat_template_kwargs {error}", param="chat_template_kwargs") from error
    effort: Mapping[str, Any] = {}
    if body.reasoning_effort is not None:
        effort = with_effort(service.tokenizer, body.reasoning_effort, "reasoning_effort")
    if both := given.keys() & effort.keys():
        said = f"reasoning_effort and chat_template_kwargs both set {' and '.join(sorted(both))}"
        raise ApiError(f"{said}; expected one of them", param="reasoning_effort")
    return {**given, **effort}

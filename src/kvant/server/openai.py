"""OpenAI's /v1/chat/completions and /v1/completions (platform.openai.com), with additional fields.

A field of type None may only be null, because ignoring it would mislead the client. Null always counts as
absent. Fields that are not declared here are ignored and reported.
"""

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec

from kvant.server.body import (
    MAX_PROMPTS,
    MAX_TOKENS,
    DraftField,
    Fields,
    SamplingFields,
    check_range,
    known_of,
    max_tokens,
    sampling_options,
    stops,
)
from kvant.server.endpoint import Dialect, Encoder
from kvant.server.errors import ApiError
from kvant.server.generation import Begun, Call, End, Format, Generation, Text, TokenLogprob, Tool, ToolChoice
from kvant.server.left_out import LeftOut
from kvant.server.service import Service
from kvant.server.turns import Turns, check_arguments, checked_tools, text_of, tool_named, with_effort
from kvant.text.grammar_source import MAX_SOURCE, escaped
from kvant.text.prompt import RESERVED, check_variables, mentioned

MAX_TOP_LOGPROBS = 20  # OpenAI's, as are the following
MAX_LOGPROBS = 5  # of /v1/completions
DEFAULT_MAX_TOKENS = 16  # of /v1/completions


class StreamOptions(Fields, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TextPart(Fields, frozen=True):
    type: Literal["text"]
    text: str
    cache_control: Any = None  # prefixes of all prompts are cached anyway


class RefusalPart(Fields, frozen=True, kw_only=True):
    type: Literal["refusal"]
    text: str = msgspec.field(name="refusal")


PARTS = {"text": TextPart, "refusal": RefusalPart}


class CalledFunction(Fields, frozen=True):
    name: str
    arguments: str


class ToolCall(Fields, frozen=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None  # left over from a stream


class Message(Fields, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Any] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of reasoning_content
    refusal: str | None = None
    annotations: list[Any] | None = None  # answers have them; prompts do not use them
    provider_specific_fields: Any = None  # LiteLLM puts them into its answers
    function_call: None = None


class Function(Fields, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Fields, frozen=True):
    type: Literal["function"]
    function: Function


class FunctionName(Fields, frozen=True):
    name: str


class NamedChoice(Fields, frozen=True):
    type: Literal["function"]
    function: FunctionName


class TextFormat(Fields, frozen=True, tag="text"):
    pass


class JsonObjectFormat(Fields, frozen=True, tag="json_object"):
    schema: dict[str, Any] | None = None  # llama.cpp's and Together's


class NamedSchema(Fields, frozen=True):
    """A JSON schema. Answers satisfy it whether it is strict or not."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Fields, frozen=True, tag="json_schema"):
    json_schema: NamedSchema


class StructuredOutputs(Fields, frozen=True):
    """vLLM's field for formats that OpenAI does not have. Exactly one may be set."""

    json: dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


# The kind of Format for each of them.
STRUCTURED: Mapping[str, Any] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "regex",
    "grammar": "grammar",
}


class CommonBody(SamplingFields, frozen=True, kw_only=True):
    """The fields that both bodies share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stop_token_ids: list[int] | None = None  # vLLM's
    ignore_eos: bool | None = None
    draft: DraftField = None
    # Other servers' names of the same: llama.cpp's and Ollama's.
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    num_predict: int | None = None
    n_predict: int | None = None
    structured_outputs: StructuredOutputs | None = None
    user: Any = None  # a label of the client's


class ChatBody(CommonBody, frozen=True, kw_only=True):
    """A body of /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    tools: list[Any] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # These have no effect: labels, and hints to a cache or scheduler.
    metadata: Any = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prediction: dict[str, Any] | None = None
    # Other values are ignored.
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    verbosity: Literal["medium"] | None = None
    # Not supported.
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    functions: None = None
    function_call: None = None


class CompletionsBody(CommonBody, frozen=True, kw_only=True):
    """A body of /v1/completions."""

    prompt: str | list[str | int | list[int]]  # a list of numbers is one prompt
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


def chat_generation(body: ChatBody, service: Service, left_out: LeftOut) -> Generation:
    """Return the generation that a body of /v1/chat/completions requests."""
    if body.top_logprobs is not None:
        check_range("top_logprobs", body.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if body.top_logprobs and not body.logprobs:
            raise ApiError("top_logprobs has no effect without logprobs: true", param="top_logprobs")
    functions = known_of(body.tools, {"function": FunctionTool}, "tools", left_out)
    tools = checked_tools({f"{place}.function.name": tool_of(tool.function) for place, tool in functions})
    return Generation(
        messages=_messages(body.messages, left_out),
        tools=tools,
        tool_choice=_tool_choice(body, tools),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        format=_format(body),
        max_tokens=_max_tokens(body),
        logprobs=bool(body.logprobs),
        top_logprobs=body.top_logprobs or 0,
        variables=_variables(body, service, left_out),
        **_common_fields(body, service, left_out),
    )


def _common_fields(body: CommonBody, service: Service, left_out: LeftOut) -> dict[str, Any]:
    """Return the fields of a generation that chat and completions have in common."""
    if body.stream_options is not None and not body.stream:
        left_out.add("stream_options")
    answers = 1 if body.n is None else body.n
    most = service.settings.sequences
    if not 1 <= answers <= most:
        raise ApiError(f"n is {answers}; expected 1 to {most}, the sequences of this server", param="n")
    return {
        "sampling": sampling_options(_renamed(body)),
        "stop": stops(body.stop),
        "stop_tokens": _stop_tokens(body.stop_token_ids or (), service),
        "answers": answers,
        "ignore_eos": bool(body.ignore_eos),
        "draft": body.draft,
    }


def _stop_tokens(tokens: Sequence[int], service: Service) -> Sequence[int]:
    """Return vLLM's ``stop_token_ids`` after checking their number and range."""
    if len(tokens) > MAX_TOKENS:
        message = f"stop_token_ids has {len(tokens)} tokens; expected at most {MAX_TOKENS}"
        raise ApiError(message, param="stop_token_ids")
    last = service.model.config.vocab_size - 1
    for token in tokens:
        if not 0 <= token <= last:
            message = f"stop_token_ids has token {token}; the model knows 0 to {last}"
            raise ApiError(message, param="stop_token_ids")
    return tokens


def _renamed(body: CommonBody) -> CommonBody:
    """Return the body with other servers' sampling fields under their names here."""
    for theirs, ours in (
        ("repeat_penalty", "repetition_penalty"),
        ("repeat_last_n", "repetition_context_size"),
    ):
        if (value := getattr(body, theirs)) is not None:
            if getattr(body, ours) is not None:
                raise ApiError(f"{theirs} and {ours} are given; expected one of them", param=theirs)
            body = msgspec.structs.replace(body, **{ours: value})
    return body


def _messages(messages: Sequence[Message], left_out: LeftOut) -> list[dict[str, Any]]:
    """Return a conversation in the form of :attr:`Generation.messages`."""
    if not messages:
        raise ApiError("messages is empty; expected at least one message", param="messages")
    check_arguments([call.function.arguments for message in messages for call in message.tool_calls or ()])
    turns = Turns()
    for place, message in enumerate(messages):
        _add(turns, message, f"messages[{place}]", left_out)
    return turns.messages()


def _add(turns: Turns, message: Message, place: str, left_out: LeftOut) -> None:
    role = "system" if message.role == "developer" else message.role
    for name in ("tool_calls", "reasoning_content", "reasoning", "refusal"):
        if role != "assistant" and getattr(message, name):
            raise ApiError(
                f"{place} of the role {role!r} has {name}; expected it of an assistant", param=place
            )
    if (message.tool_call_id is None) is (role == "tool"):
        raise ApiError(f"{place}: expected tool_call_id of the role 'tool', and only there", param=place)
    text = text_of(message.content, PARTS, f"{place}.content", left_out, notes=role == "tool")
    if message.tool_call_id is not None:
        turns.add_result(message.tool_call_id, text, f"{place}.tool_call_id", message.name)
        return
    reasoning = message.reasoning_content or message.reasoning or ""
    if message.content is None and not (message.tool_calls or message.refusal or reasoning):
        raise ApiError(f"{place} has no content; expected text", param=f"{place}.content")
    if role != "system":  # adjacent system messages are joined, as at the other interfaces
        turns.begin(role, message.name)
    turns.add_text(role, text if message.content is not None else message.refusal or "")
    turns.add_thinking(reasoning)
    for at, call in enumerate(message.tool_calls or ()):
        function = call.function
        turns.add_call(
            call.id, function.name, function.arguments, f"{place}.tool_calls[{at}].function.arguments"
        )


def tool_of(function: Function) -> Tool:
    """Return a function that the model may call as a tool."""
    made = Tool(function.name, function.description or "", strict=bool(function.strict))
    return made if function.parameters is None else replace(made, parameters=function.parameters)


def _tool_choice(body: ChatBody, tools: Sequence[Tool]) -> ToolChoice | Tool:
    choice = body.tool_choice or "auto"
    if not tools and choice not in ("auto", "none"):
        raise ApiError("tool_choice has no effect without tools", param="tool_choice")
    return tool_named(tools, choice.function.name) if isinstance(choice, NamedChoice) else choice


def _format(body: ChatBody) -> Format | None:
    requested = format_of(body.response_format)
    structured = _structured_format(body.structured_outputs)
    if requested and structured:
        said = "response_format and structured_outputs are given; expected one of them"
        raise ApiError(said, param="response_format")
    return requested or structured


def format_of(response_format: Any) -> Format | None:
    """Return the format for a ``response_format``, or for a ``text.format`` of /v1/responses."""
    match response_format:
        case JsonObjectFormat(schema=None):
            return Format("json_object")
        case JsonObjectFormat(schema=schema) | NamedSchema(schema=schema):
            return Format("json_schema", schema or {})
        case JsonSchemaFormat(json_schema=NamedSchema(schema=schema)):
            return Format("json_schema", schema)
    return None


def _structured_format(structured: StructuredOutputs | None) -> Format | None:
    """Return the format for vLLM's structured_outputs."""
    if structured is None:
        return None
    kinds = [(name, source) for name in STRUCTURED if (source := getattr(structured, name)) is not None]
    if len(kinds) != 1:
        said = f"{', '.join(name for name, _ in kinds) or 'nothing'}; expected one of {', '.join(STRUCTURED)}"
        raise ApiError(f"structured_outputs has {said}", param="structured_outputs")
    ((name, source),) = kinds
    if name == "choice":
        if not source or sum(map(len, source)) > MAX_SOURCE:
            said = f"has more than {MAX_SOURCE} characters" if source else "is empty; expected texts"
            raise ApiError(f"structured_outputs.choice {said}", param="structured_outputs.choice")
        source = "|".join(map(escaped, source))
    return Format(STRUCTURED[name], source)


def _max_tokens(body: CommonBody, default: int | None = None) -> int | None:
    """Return the limit that any of these fields sets; -1 means no limit."""
    names = ("max_tokens", "max_completion_tokens", "num_predict", "n_predict")
    limits = {name: value for name in names if (value := getattr(body, name, None)) is not None}
    if len({*limits.values()}) > 1:
        raise ApiError(f"{' and '.join(limits)} differ; expected one of them", param="max_tokens")
    return max_tokens(next(iter(limits.values()), default))


def _variables(body: ChatBody, service: Service, left_out: LeftOut) -> dict[str, Any]:
    """Return the client's template variables. Those that the template does not mention are ignored."""
    variables = dict(body.chat_template_kwargs or {})
    known = mentioned(service.tokenizer) | RESERVED if variables else set()
    for name in [name for name in variables if name not in known]:
        left_out.add(f"chat_template_kwargs.{name}")
        del variables[name]
    try:
        check_variables(service.tokenizer, variables)
    except ValueError as error:
        raise ApiError(f"chat_template_kwargs {error}", param="chat_template_kwargs") from error
    effort = with_effort(service.tokenizer, body.reasoning_effort, "reasoning_effort", left_out)
    if both := variables.keys() & effort.keys():
        said = f"reasoning_effort and chat_template_kwargs both set {' and '.join(sorted(both))}"
        raise ApiError(f"{said}; expected one of them", param="reasoning_effort")
    return {**variables, **effort}


def completions_generations(body: CompletionsBody, service: Service, left_out: LeftOut) -> list[Generation]:
    """Return the generation that a body requests for each of its prompts."""
    if body.suffix:
        raise ApiError("suffix is given; the model only continues text", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        said = f"best_of is {body.best_of}; expected {body.n or 1}, which is n: every answer is returned"
        raise ApiError(said, param="best_of")
    if body.logprobs is not None:
        check_range("logprobs", body.logprobs, 0, MAX_LOGPROBS)
    only_prompt = bool(body.echo) and body.max_tokens == 0
    prompts = prompts_of(body.prompt)
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise ApiError(f"prompt has {len(prompts)} prompts; expected 1 to {MAX_PROMPTS}", param="prompt")
    generation = Generation(
        format=_structured_format(body.structured_outputs),
        max_tokens=1 if only_prompt else _max_tokens(body, DEFAULT_MAX_TOKENS),
        only_prompt=only_prompt,
        logprobs=body.logprobs is not None,
        top_logprobs=body.logprobs or 0,
        echo=bool(body.echo),
        field="prompt",
        **_common_fields(body, service, left_out),
    )
    return [replace(generation, prompt=prompt) for prompt in prompts]


def prompts_of(value: str | Sequence[str | int | list[int]], field: str = "prompt") -> list[str | list[int]]:
    """Return the prompts of a body's field, each text or token ids. A list of numbers is one prompt."""
    if isinstance(value, str):
        return [value]
    numbers = [each for each in value if isinstance(each, int)]
    prompts = [each for each in value if not isinstance(each, int)]
    if numbers and prompts:
        raise ApiError(
            f"{field} has numbers beside prompts; expected token ids, or texts and lists of ids", param=field
        )
    return [numbers] if numbers else prompts


class _Answers(Encoder):
    """The common base of both encoders: the objects' first fields and the token counts."""

    done = b"data: [DONE]\n\n"

    def __init__(self, name: str, prefix: str, body: CommonBody, generations: Sequence[Generation]) -> None:
        self._head = {
            "id": prefix + uuid.uuid4().hex,
            "object": "",
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": "kvant",
        }
        self._logprobs = generations[0].logprobs
        self._answers = generations[0].answers
        self._count = self._open = len(generations) * self._answers
        stream_options = body.stream_options or StreamOptions()
        self._wants_usage = bool(stream_options.include_usage)
        self._counts_on = self._wants_usage and bool(stream_options.continuous_usage_stats)
        self._tokens = [0] * self._count  # of each answer so far
        self._prompt = self._cached = self._thinking = 0

    def failed(self, error: ApiError, request_id: str) -> Iterable[dict[str, Any]]:
        return [error.openai()]

    def begun(self, event: Begun) -> Iterator[dict[str, Any]]:
        self._prompt += event.prompt_tokens
        return iter(())

    def _object(self, kind: str, choices: Sequence[Any], **fields: Any) -> dict[str, Any]:
        return {**self._head, "object": kind, "choices": choices, **fields}

    def _chunk(self, kind: str, choice: dict[str, Any]) -> dict[str, Any]:
        usage = self._usage() if self._counts_on else None
        return self._object(kind, [choice], **({"usage": usage} if self._wants_usage else {}))

    def _ended(self, event: End, kind: str) -> Iterator[dict[str, Any]]:
        """Count an answer's end. After the last one, yield the usage if the client asked for it."""
        self._open -= 1
        # once for each prompt
        self._cached += event.cached_tokens if event.answer % self._answers == 0 else 0
        self._tokens[event.answer] = event.tokens
        self._thinking += event.thinking_tokens
        if self._wants_usage and not self._open:
            yield self._object(kind, [], usage=self._usage())

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": sum(self._tokens),
            "total_tokens": self._prompt + sum(self._tokens),
            "prompt_tokens_details": {"cached_tokens": self._cached},
            "completion_tokens_details": {"reasoning_tokens": self._thinking},
        }


class ChatAnswers(_Answers):
    """The encoder of /v1/chat/completions."""

    def __init__(
        self, name: str, body: ChatBody, generations: Sequence[Generation], service: Service
    ) -> None:
        super().__init__(name, "chatcmpl-", body, generations)
        self._messages: list[dict[str, Any]] = [
            {"content": [], "reasoning_content": []} for _ in range(self._count)
        ]
        self._choices: list[dict[str, Any]] = [{"logprobs": []} for _ in range(self._count)]
        self._called: set[int] = set()  # answers whose last event was a call

    def begun(self, event: Begun) -> Iterator[dict[str, Any]]:
        yield from super().begun(event)
        for number in range(self._count):
            yield self._delta(number, {"role": "assistant", "content": ""})

    def text(self, event: Text) -> Iterator[dict[str, Any]]:
        kind = "reasoning_content" if event.thinking else "content"
        self._tokens[event.answer] = event.tokens
        message = self._messages[event.answer]
        said = event.text
        if said and not event.thinking and event.answer in self._called:
            self._called.discard(event.answer)
            if any(message["content"]):  # a message has one text, so text after a call begins a new line
                said = "\n" + said
        message[kind].append(said)
        content = [] if event.thinking else logprobs_content(event.logprobs)
        self._choices[event.answer]["logprobs"] += content
        logprobs = {"content": content, "refusal": None} if self._logprobs and not event.thinking else None
        yield self._delta(event.answer, {kind: said}, logprobs=logprobs)

    def call(self, event: Call) -> Iterator[dict[str, Any]]:
        function = {"name": event.name, "arguments": event.arguments}
        call = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
        self._messages[event.answer].setdefault("tool_calls", []).append(call)
        self._called.add(event.answer)
        yield self._delta(event.answer, {"tool_calls": [{"index": event.index, **call}]})

    def end(self, event: End) -> Iterator[dict[str, Any]]:
        self._choices[event.answer]["finish_reason"] = event.reason
        yield self._delta(event.answer, {}, event.reason)
        yield from self._ended(event, "chat.completion.chunk")

    def _delta(
        self, answer: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None
    ) -> Any:
        choice = {"index": answer, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._chunk("chat.completion.chunk", choice)

    def whole(self) -> dict[str, Any]:
        choices = []
        for number, (message, choice) in enumerate(zip(self._messages, self._choices, strict=True)):
            text = "".join(message["content"])
            thinking = "".join(message["reasoning_content"])
            made: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if thinking:
                made["reasoning_content"] = thinking
            if "tool_calls" in message:
                made |= {"content": text or None, "tool_calls": message["tool_calls"]}
            logprobs = {"content": choice["logprobs"], "refusal": None} if self._logprobs else None
            reason = choice.get("finish_reason")
            choices.append({"index": number, "message": made, "logprobs": logprobs, "finish_reason": reason})
        return self._object("chat.completion", choices, usage=self._usage())


class CompletionsAnswers(_Answers):
    """The encoder of /v1/completions."""

    def __init__(
        self, name: str, body: CompletionsBody, generations: Sequence[Generation], service: Service
    ) -> None:
        super().__init__(name, "cmpl-", body, generations)
        self._texts: list[list[Text]] = [[] for _ in range(self._count)]
        self._reasons: list[str | None] = [None] * self._count

    def text(self, event: Text) -> Iterator[dict[str, Any]]:
        self._texts[event.answer].append(event)
        self._tokens[event.answer] = event.tokens
        yield self._chunk("text_completion", self._choice(event.answer, [event], None))

    def end(self, event: End) -> Iterator[dict[str, Any]]:
        self._reasons[event.answer] = event.reason
        yield self._chunk("text_completion", self._choice(event.answer, [], event.reason))
        yield from self._ended(event, "text_completion")

    def whole(self) -> dict[str, Any]:
        answers = enumerate(zip(self._texts, self._reasons, strict=True))
        choices = [self._choice(number, texts, reason) for number, (texts, reason) in answers]
        return self._object("text_completion", choices, usage=self._usage())

    def _choice(self, number: int, texts: Sequence[Text], reason: str | None) -> dict[str, Any]:
        """Return the pieces of an answer as a choice of the response or of a chunk."""
        logprobs = _legacy([each for piece in texts for each in piece.logprobs]) if self._logprobs else None
        text = "".join(piece.text for piece in texts)
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason}


def logprobs_content(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return log-probabilities as chat's ``logprobs.content``."""
    return [{**_token(each), "top_logprobs": [_token(other) for other in each.top]} for each in logprobs]


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes)}


def _legacy(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return log-probabilities in the older shape of parallel lists; ``text_offset`` counts characters."""
    # As at OpenAI, the most probable tokens include the token itself, or are null if none are requested.
    tops = [
        {_name(other): other.logprob for other in (each, *each.top)} if each.top else None
        for each in logprobs
    ]
    return {
        "tokens": [_name(each) for each in logprobs],
        "token_logprobs": [each.logprob for each in logprobs],
        "top_logprobs": tops,
        "text_offset": [each.place for each in logprobs],
    }


def _name(token: TokenLogprob) -> str:
    """Return a token's text, or its bytes in OpenAI's notation if they are not whole characters."""
    if token.text.encode() == token.bytes:
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)


CHAT = Dialect(ChatBody, lambda *arguments: [chat_generation(*arguments)], ChatAnswers)
COMPLETIONS = Dialect(CompletionsBody, completions_generations, CompletionsAnswers)

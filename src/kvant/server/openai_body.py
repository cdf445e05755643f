"""Bodies of /v1/chat/completions and /v1/completions: OpenAI's fields, and further ones.

A field with the type None is one of OpenAI's that cannot be heeded here: it may be null. Null is a field that was not
given, throughout.
"""

from typing import Any, Literal

from kvant.engine.drafting.drafts import ServedSource
from kvant.server.body import Fields
from kvant.server.sampling import SamplingFields


class StreamOptions(Fields, frozen=True):
    """Of a streamed answer."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Part(Fields, frozen=True):
    """A part of a message's content. What is no text is declared to be refused by its type."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    audio_url: Any = None
    video_url: Any = None
    file: Any = None
    cache_control: Any = None  # every prompt's beginning is shared anyway


class CalledFunction(Fields, frozen=True):
    """What was called, with arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Fields, frozen=True):
    """A call that the assistant made."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None  # left over from a stream


class Message(Fields, frozen=True):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of it
    refusal: str | None = None
    annotations: list[Any] | None = None  # as answers have them; they are not part of a prompt
    provider_specific_fields: Any = None  # LiteLLM puts them into its answers
    audio: None = None
    function_call: None = None


class Function(Fields, frozen=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Fields, frozen=True):
    """A tool."""

    type: Literal["function"]
    function: Function


class FunctionName(Fields, frozen=True):
    """The name of a function."""

    name: str


class NamedChoice(Fields, frozen=True):
    """The tool that has to be called."""

    type: Literal["function"]
    function: FunctionName


class TextFormat(Fields, frozen=True, tag="text"):
    """Any text."""


class JsonObjectFormat(Fields, frozen=True, tag="json_object"):
    """Any JSON object."""


class NamedSchema(Fields, frozen=True):
    """A JSON schema. Answers keep to it whether it is strict or not."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Fields, frozen=True, tag="json_schema"):
    """JSON of a schema."""

    json_schema: NamedSchema


class StructuredOutputs(Fields, frozen=True):
    """vLLM's field for formats that OpenAI does not have; one of them."""

    json: dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class CommonBody(SamplingFields, frozen=True, kw_only=True):
    """What both bodies have."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    ignore_eos: bool | None = None
    draft: ServedSource | None = None
    structured_outputs: StructuredOutputs | None = None
    user: str | None = None  # a label of the client's

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatBody(CommonBody, frozen=True, kw_only=True):
    """A body of /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # These cannot change an answer: labels, and hints to a cache or to a scheduler that is not here.
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prediction: dict[str, Any] | None = None
    # Only with the value that asks for nothing else.
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
    # Not to be had here.
    audio: None = None
    functions: None = None
    function_call: None = None
    web_search_options: None = None
    moderation: None = None


class CompletionsBody(CommonBody, frozen=True, kw_only=True):
    """A body of /v1/completions."""

    prompt: str | list[str | int | list[int]]  # a list of numbers is one prompt
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

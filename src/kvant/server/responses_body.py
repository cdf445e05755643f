"""Bodies of OpenAI's Responses API (platform.openai.com), as far as this server follows it.

A field with the type None is one of OpenAI's that this server cannot heed: it may be null.
"""

from typing import Any, Literal

import msgspec

from kvant.engine.drafting.drafts import ServedSource
from kvant.server.body import Caller, Fields, NotText
from kvant.server.openai_body import JsonObjectFormat, TextFormat
from kvant.server.sampling import SamplingFields

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class InputText(Fields, frozen=True, tag="input_text"):
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None  # every prompt's beginning is shared anyway


class OutputText(Fields, frozen=True, tag="output_text"):
    text: str
    annotations: list[dict[str, Any]] | None = None
    logprobs: list[dict[str, Any]] | None = None
    parsed: Any = None  # OpenAI's Python client notes here what it made of the text


class Refusal(Fields, frozen=True, tag="refusal"):
    refusal: str


class InputImage(NotText, frozen=True, tag="input_image"):
    pass


class InputFile(NotText, frozen=True, tag="input_file"):
    pass


class InputAudio(NotText, frozen=True, tag="input_audio"):
    pass


Part = InputText | OutputText | Refusal | InputImage | InputFile | InputAudio
Status = Literal["in_progress", "completed", "incomplete"] | None


class MessageItem(Fields, frozen=True, kw_only=True):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    id: str | None = None
    status: Status = None
    phase: Literal["commentary", "final_answer"] | None = None  # of an answer; templates know no such mark


class CallItem(Fields, frozen=True, kw_only=True):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status = None
    caller: Caller | None = None
    namespace: None = None
    parsed_arguments: Any = None  # as OutputText.parsed


class ResultItem(Fields, frozen=True, kw_only=True):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Part]
    id: str | None = None
    status: Status = None
    caller: Caller | None = None
    name: str | None = None
    namespace: None = None


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
    status: Status = None


Item = MessageItem | CallItem | ResultItem | ReasoningItem


class FunctionBody(Fields, frozen=True, kw_only=True):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    output_schema: None = None


class NamedFunction(Fields, frozen=True):
    type: Literal["function"]
    name: str


class FunctionChoice(Fields, frozen=True, tag="function"):
    name: str


class AllowedTools(Fields, frozen=True, tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: list[NamedFunction]


class JsonSchema(Fields, frozen=True, tag="json_schema"):
    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None  # the answer keeps to the schema either way


class TextConfig(Fields, frozen=True):
    format: TextFormat | JsonObjectFormat | JsonSchema | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Fields, frozen=True):
    effort: Effort | None = None
    summary: Literal["auto", "detailed"] | None = None
    generate_summary: Literal["auto", "detailed"] | None = None  # the older name of summary
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class StreamOptions(Fields, frozen=True):
    include_obfuscation: Literal[False] | None = None


class ResponsesBody(SamplingFields, frozen=True, kw_only=True):
    """A body of /v1/responses. Its fields of sampling are those of /v1/chat/completions."""

    model: str
    input: str | list[msgspec.Raw]  # of items, read one by one: a message may lack its type
    instructions: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = None
    draft: ServedSource | None = None
    top_logprobs: int | None = None
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] | None = None
    tools: list[FunctionBody] | None = None
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    background: Literal[False] | None = None
    # Harmless: labels of the client's.
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    # Not to be had here.
    context_management: None = None
    conversation: None = None
    max_tool_calls: None = None
    moderation: None = None
    prompt: None = None

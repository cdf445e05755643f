"""Bodies of Anthropic's Messages API (docs.claude.com), as far as this server follows it.

A field with the type None is one of Anthropic's that this server cannot heed: it may be null.
"""

from typing import Any, Literal

from kvant.engine.drafting.drafts import ServedSource
from kvant.server.body import Caller, Fields, NotText

CacheControl = dict[str, Any] | None  # changes nothing: every prompt's beginning is shared with those that follow


class TextBlock(Fields, frozen=True, tag="text"):
    text: str
    cache_control: CacheControl = None
    citations: None = None


class ThinkingBlock(Fields, frozen=True, tag="thinking"):
    thinking: str
    signature: str = ""


class ToolUseBlock(Fields, frozen=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl = None
    caller: Caller | None = None
    toolset_name: None = None


class Image(NotText, frozen=True, tag="image"):
    pass


class Document(NotText, frozen=True, tag="document"):
    pass


class SearchResult(NotText, frozen=True, tag="search_result"):
    pass


class RedactedThinking(NotText, frozen=True, tag="redacted_thinking"):
    pass


class ToolResultBlock(Fields, frozen=True, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | Image | Document | SearchResult] | None = None
    is_error: bool | None = None
    cache_control: CacheControl = None
    toolset_name: None = None


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | Image | Document | SearchResult | RedactedThinking


class Message(Fields, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolBody(Fields, frozen=True, kw_only=True):
    type: Literal["custom"] | None = None
    name: str
    description: str = ""
    input_schema: dict[str, Any]
    strict: bool = False
    cache_control: CacheControl = None
    eager_input_streaming: bool | None = None  # in which pieces a call comes
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    input_examples: None = None


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
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class KeepThinking(Fields, frozen=True):
    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Fields, frozen=True):
    """Edits of the conversation before it is fed; only the one that leaves it as it is."""

    edits: list[KeepThinking] | None = None


class Metadata(Fields, frozen=True):
    user_id: str | None = None


class Conversation(Fields, frozen=True, kw_only=True):
    """What is common to a message and to counting its tokens."""

    model: str
    messages: list[Message]
    system: str | list[TextBlock] | None = None
    tools: list[ToolBody] | None = None
    tool_choice: ToolChoiceBody | None = None
    thinking: ThinkingOn | ThinkingOff | ThinkingAdaptive | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the name of output_config.format while it was in beta
    context_management: ContextManagement | None = None
    cache_control: CacheControl = None
    speed: Literal["standard"] | None = None
    thread: dict[str, Any] | None = None


class MessagesBody(Conversation, frozen=True, kw_only=True):
    """A body of /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    stop_sequences: list[str] | None = None
    draft: ServedSource | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: None = None
    diagnostics: None = None
    inference_geo: None = None

"""A client's request and the events of its answers, independent of the interface."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvant.engine.drafts import ServedSource
from kvant.engine.sampling import SamplingOptions

ToolChoice = Literal["auto", "none", "required"]
EndReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    # JSON schema
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False  # a grammar makes its arguments satisfy the schema
    custom: bool = False  # it takes text; the model passes it as the only argument, ``input``
    grammar: str = ""  # of a custom tool's text, in llguidance's variant of Lark; "": none
    namespace: str | None = None  # the client's namespace of the tool; a prefix of ``name``
    search: bool = False  # a call makes the client search for more tools
    deferred: bool = False  # a search result shows it to the model, not the start of the prompt


@dataclass(frozen=True, slots=True)
class Format:
    """The format that an answer's text must have."""

    kind: Literal["json_object", "json_schema", "regex", "grammar"]  # "json_object", or what ``source`` is
    # a JSON schema, a regex, or a grammar in llguidance's variant of Lark
    source: Mapping[str, Any] | str | bool = ""


@dataclass(frozen=True, slots=True)
class Generation:
    """A checked request of any interface: a conversation or a prompt, and how to continue it."""

    # For the chat template: ``role``, ``content`` (text), ``reasoning_content``, ``tool_calls`` ([{"id",
    # "type": "function", "function": {"name", "arguments": an object}}]). The role "tool" also has
    # ``tool_call_id`` and ``name``.
    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: str | Sequence[int] | None = None  # text or token ids instead of messages, without a template
    tools: Sequence[Tool] = ()  # passed to the template
    tool_choice: ToolChoice | Tool = "auto"  # a mode, or the tool that must be called
    parallel_tool_calls: bool = True  # an answer may have several calls
    format: Format | None = None  # of the text; None: any
    # the client's options; the model's are filled in later
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    max_tokens: int | None = None  # of each answer; None: only the context limits it
    stop: Sequence[str] = ()  # texts that end an answer; excluded from it
    stop_tokens: Sequence[int] = ()  # ids that end an answer, even with ``ignore_eos``; not part of it
    answers: int = 1  # number of answers; answer i samples with seed + i
    logprobs: bool = False  # return log-probabilities, and those of ``top_logprobs`` other tokens
    top_logprobs: int = 0
    ignore_eos: bool = False  # continue after the model's end of text
    # the answer's text begins with the prompt, and ``logprobs`` with the prompt's
    echo: bool = False
    only_prompt: bool = False  # generate nothing; with ``echo``
    # of the chat template; they override the server's
    variables: Mapping[str, Any] = field(default_factory=dict)
    thinking_budget: int | None = None  # maximum tokens of thinking; None: no limit
    draft: ServedSource | None = None  # where drafts come from; None: the server's default
    salt: bytes = b""  # requests share prefixes only if they have the same salt
    client: str = ""  # the client's address; clients take turns at compiling grammars
    field: str = "messages"  # the body's field with the prompt, for errors


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's text and bytes, its log-probability, and the most probable tokens at its position.

    The first token of a prompt has no log-probability.
    """

    text: str
    logprob: float | None
    bytes: bytes
    top: Sequence["TokenLogprob"] = ()
    # Offset in the whole text, in characters; tokens that share a character have the same offset.
    place: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Begun:
    """The first event: the request was accepted. Its prompt is not read yet."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of an answer's text, or of its thinking."""

    answer: int
    text: str
    thinking: bool = False
    logprobs: Sequence[TokenLogprob] = ()  # of the tokens that end in this piece
    tokens: int = field(default=0, compare=False)  # generated in the answer so far


@dataclass(frozen=True, slots=True)
class Call:
    """A complete call of a known tool. Without a grammar its arguments may violate the tool's schema."""

    answer: int
    index: int  # of the call within the answer, from 0
    name: str
    arguments: str  # JSON text of an object


@dataclass(frozen=True, slots=True)
class End:
    """The end of one answer."""

    answer: int
    reason: EndReason
    tokens: int  # generated, including ``thinking_tokens``
    thinking_tokens: int = 0
    stop: str | None = None  # the one of ``Generation.stop`` that ended it
    cached_tokens: int = 0  # prompt tokens from a shared prefix


Event = Begun | Text | Call | End

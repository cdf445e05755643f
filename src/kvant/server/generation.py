"""What a client wants generated, and what comes of it: the same for every interface."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvant.engine.drafts import ServedSource
from kvant.engine.sampling import SamplingOptions

ToolChoice = Literal["auto", "none", "required"]
FormatKind = Literal["json_object", "json_schema", "regex", "grammar"]
EndReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: the JSON schema of its arguments, an object.
        strict: its arguments keep to the schema by a grammar.
        custom: it takes text, which is its one argument, ``input``, for the model.
        grammar: of the text, in llguidance's form of Lark's language; "": any, or there is no text.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False
    custom: bool = False
    grammar: str = ""
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """What an answer's text has to be.

    Attributes:
        kind: "json_object", or what ``source`` is.
        source: a JSON schema, a regular expression, or a grammar in llguidance's form of Lark's.
    """

    kind: FormatKind
    source: Mapping[str, Any] | str | bool = ""


@dataclass(frozen=True, slots=True)
class Generation:
    """A checked request of any interface.

    Attributes:
        messages: a conversation for the chat template: ``role``, ``content`` (text), ``reasoning_content``,
            ``tool_calls`` ([{"id", "type": "function", "function": {"name", "arguments": an object}}]) and, of the role
            "tool", ``tool_call_id`` and ``name``. None where ``prompt`` is given.
        prompt: text or token ids, without a template.
        tools: that the template is given.
        tool_choice: one of the words, or the :class:`Tool` that has to be called.
        parallel_tool_calls: there may be more than one call in an answer.
        format: of the text; None: free.
        sampling: the client's options; the model's defaults are filled in later.
        max_tokens: of each answer; None: as many as there is room for.
        stop: texts that end an answer and are not part of it.
        answers: how many; answer i draws with the seed + i.
        logprobs: log-probabilities are wanted, and of ``top_logprobs`` other tokens.
        ignore_eos: go on after the model's end of text.
        echo: the prompt is part of the answer's text, with its log-probabilities where they are wanted.
        only_prompt: nothing is generated; with ``echo``.
        variables: of the chat template, such as ``enable_thinking``; they go before the server's own.
        thinking_budget: tokens after which thinking ends; None: the model ends it.
        draft: what its answers draft from, "none", "prompt" or "model"; None: what the server's do.
        salt: prefixes are shared between requests with the same one.
        field: of the body that the prompt came from, for errors.
    """

    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: str | Sequence[int] | None = None
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice | Tool = "auto"
    parallel_tool_calls: bool = True
    format: Format | None = None
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    answers: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    ignore_eos: bool = False
    echo: bool = False
    only_prompt: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    thinking_budget: int | None = None
    draft: ServedSource | None = None
    salt: bytes = b""
    field: str = "messages"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's text and bytes, its log-probability, and the most probable tokens at its place.

    The first token of a prompt has no log-probability.
    """

    text: str
    logprob: float | None
    bytes: bytes
    top: Sequence["TokenLogprob"] = ()


@dataclass(frozen=True, slots=True)
class Begun:
    """The first thing that comes: the request was taken in. Its prompt is still to be fed."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of an answer's text, or of its thinking.

    Attributes:
        logprobs: of the tokens that it ends.
        tokens: of the answer so far.
    """

    answer: int
    text: str
    thinking: bool = False
    logprobs: Sequence[TokenLogprob] = ()
    tokens: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Call:
    """A whole call of a known tool. Without a grammar its arguments may not keep to the tool's schema.

    Attributes:
        index: of the call in its answer, from 0.
        arguments: JSON text of an object.
    """

    answer: int
    index: int
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class End:
    """The end of one answer.

    Attributes:
        stop: the text of ``Generation.stop`` that ended it.
        tokens: generated, of which ``thinking_tokens`` were thinking.
        cached_tokens: of the prompt, that a shared prefix had.
    """

    answer: int
    reason: EndReason
    tokens: int
    thinking_tokens: int = 0
    stop: str | None = None
    cached_tokens: int = 0


Event = Begun | Text | Call | End

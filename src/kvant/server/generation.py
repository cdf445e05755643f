"""What a client wants generated, and what comes of it: the same for every interface."""

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
    strict: bool = False  # its arguments keep to the schema by a grammar
    custom: bool = False  # it takes text, which is its one argument, ``input``, for the model
    grammar: str = ""  # of the text, in llguidance's form of Lark's language; "": any, or there is no text
    namespace: str | None = None  # that the client knows it in; its name begins with it
    search: bool = False  # a call is a search for more tools, which the client does
    deferred: bool = False  # the model is shown it by the result of a search, not at the start of the prompt


@dataclass(frozen=True, slots=True)
class Format:
    """What an answer's text has to be."""

    kind: Literal["json_object", "json_schema", "regex", "grammar"]  # "json_object", or what ``source`` is
    # a JSON schema, a regex, a grammar in llguidance's form of Lark's
    source: Mapping[str, Any] | str | bool = ""


@dataclass(frozen=True, slots=True)
class Generation:
    """A checked request of any interface: a conversation or a prompt, and how to go on from it."""

    # For the chat template: ``role``, ``content`` (text), ``reasoning_content``, ``tool_calls`` ([{"id",
    # "type": "function", "function": {"name", "arguments": an object}}]); of the role "tool" ``tool_call_id``
    # and ``name``.
    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: str | Sequence[int] | None = None  # in their place text or token ids, without a template
    tools: Sequence[Tool] = ()  # that the template is given
    tool_choice: ToolChoice | Tool = "auto"  # one of the words, or the tool that has to be called
    parallel_tool_calls: bool = True  # there may be more than one call in an answer
    format: Format | None = None  # of the text; None: free
    # the client's; the model's are filled in later
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    max_tokens: int | None = None  # of each answer; None: as many as there is room for
    stop: Sequence[str] = ()  # texts that end an answer and are not part of it
    stop_tokens: Sequence[int] = ()  # ids that end an answer, also with ``ignore_eos``; not part of its text
    answers: int = 1  # how many; answer i draws with the seed + i
    logprobs: bool = False  # log-probabilities are wanted, and of ``top_logprobs`` other tokens
    top_logprobs: int = 0
    ignore_eos: bool = False  # go on after the model's end of text
    # the prompt is part of the answer's text, with its log-probabilities where they are wanted
    echo: bool = False
    only_prompt: bool = False  # nothing is generated; with ``echo``
    # of the chat template; they go before the server's own
    variables: Mapping[str, Any] = field(default_factory=dict)
    thinking_budget: int | None = None  # tokens after which thinking ends; None: the model ends it
    draft: ServedSource | None = None  # what its answers draft from; None: what the server's do
    salt: bytes = b""  # prefixes are shared between requests with the same one
    client: str = ""  # the client's address; clients take turns at compiling grammars
    field: str = "messages"  # of the body that the prompt came from, for errors


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's text and bytes, its log-probability, and the most probable tokens at its place.

    The first token of a prompt has no log-probability.
    """

    text: str
    logprob: float | None
    bytes: bytes
    top: Sequence["TokenLogprob"] = ()
    # Characters of the whole text before it; tokens that are bytes of one character have the same number.
    place: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Begun:
    """The first thing that comes: the request was taken in. Its prompt is still to be fed."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of an answer's text, or of its thinking."""

    answer: int
    text: str
    thinking: bool = False
    logprobs: Sequence[TokenLogprob] = ()  # of the tokens that it ends
    tokens: int = field(default=0, compare=False)  # of the answer so far


@dataclass(frozen=True, slots=True)
class Call:
    """A whole call of a known tool. Without a grammar its arguments may not keep to the tool's schema."""

    answer: int
    index: int  # of the call in its answer, from 0
    name: str
    arguments: str  # JSON text of an object


@dataclass(frozen=True, slots=True)
class End:
    """The end of one answer."""

    answer: int
    reason: EndReason
    tokens: int  # generated, of which ``thinking_tokens`` were thinking
    thinking_tokens: int = 0
    stop: str | None = None  # the text of ``Generation.stop`` that ended it
    cached_tokens: int = 0  # of the prompt, that a shared prefix had


Event = Begun | Text | Call | End

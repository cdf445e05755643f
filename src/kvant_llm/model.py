"""A model of kvant for ``llm``."""

import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import llm
from pydantic import Field

if TYPE_CHECKING:
    from llm.parts import StreamEvent

    from kvant.engine.conversation import Conversation
    from kvant.engine.sampling import Sampling
    from kvant.models import LanguageModel
    from kvant.text.tokenizer import Tokenizer

PREFIX = "kvant/"
MAX_TOKENS = 2048

log = logging.getLogger("kvant")
# At most one entry each. llm makes a KvantModel for every call; the conversation's cache has the last
# exchange.
_loaded: "dict[str, tuple[LanguageModel, Tokenizer]]" = {}
_idle: "dict[tuple[Any, ...], Conversation]" = {}


class KvantOptions(llm.Model.Options):
    """Options for ``llm -o``. kvant checks the values when the model is used."""

    temperature: float | None = Field(
        None, description="Sampling temperature; 0: always the likeliest token."
    )
    top_p: float | None = Field(
        None, description="Sample from the likeliest tokens that have this probability."
    )
    top_k: int | None = Field(None, description="Sample from this many of the likeliest tokens; 0: all.")
    min_p: float | None = Field(
        None, description="Drop tokens less likely than this share of the likeliest one."
    )
    repetition_penalty: float | None = Field(
        None, description="Divide the logits of recent tokens by this; 1: off."
    )
    seed: int | None = Field(None, description="Seed of the random numbers.")
    max_tokens: int | None = Field(
        None, description=f"Generate at most this many tokens; default: {MAX_TOKENS}."
    )
    stop: str | None = Field(None, description="End the text before this string.")
    max_kv_size: int | None = Field(
        None, description="Tokens reserved in the cache; default: the model's context, at most 4096."
    )
    kv_bits: int | None = Field(
        None, description="Bits of a cached key or value: 8, 4, or 0 for no quantization; default: 8."
    )
    kv_group_size: int | None = Field(None, description="Cached values that share one scale; default: 32.")


class KvantModel(llm.Model):
    """A model that kvant loads on the first question."""

    can_stream = True
    Options = KvantOptions  # type: ignore[assignment]  # as in every llm plugin

    def __init__(self, name: str) -> None:
        """``name``: an argument of ``kvant.load``."""
        self.name = name
        self.model_id = PREFIX + name

    def __str__(self) -> str:
        return f"kvant: {self.model_id}"

    def execute(
        self, prompt: llm.Prompt, stream: bool, response: llm.Response, conversation: llm.Conversation | None
    ) -> "Iterator[str | StreamEvent]":
        """Answer the last message of a conversation. The cache is reused, so only new tokens are fed."""
        from kvant.errors import ArgumentError, KvantError

        try:
            yield from _answer(self.name, prompt, stream, response)
        except ArgumentError as error:
            raise llm.ModelError(
                error.worded(lambda name: "temperature" if name == "temp" else name)
            ) from error
        except (KvantError, ValueError) as error:
            raise llm.ModelError(str(error)) from error


def _answer(
    name: str, prompt: llm.Prompt, stream: bool, response: llm.Response
) -> "Iterator[str | StreamEvent]":
    from llm.parts import StreamEvent

    options = prompt.options
    assert isinstance(options, KvantOptions)
    max_tokens = MAX_TOKENS if options.max_tokens is None else options.max_tokens
    *history, question = _messages(prompt)
    if question["role"] != "user":
        raise llm.ModelError(f"the last message is the {question['role']}'s; expected the user's")
    sampling = _sampling(options, name)
    model, _ = _load(name)
    sampler, processors = sampling.build(model.config.vocab_size)
    reserved = name, options.max_kv_size, options.kv_bits, options.kv_group_size
    talk = _idle.pop(reserved, None) or _begin(*reserved)  # so that nobody else uses it meanwhile
    try:
        talk.messages = [*history]
        answer = talk.send(
            question["content"],
            max_tokens=max_tokens,
            sampler=sampler,
            logits_processors=processors,
            stop=options.stop,
        )
        thinking = talk.thinking()
        last = None
        shown = "\n"
        for last in answer:
            pieces = [(False, last.text)] if thinking is None else thinking.add(last.text)
            if thinking is not None and last.finish_reason:
                pieces += thinking.finish()
            for is_thinking, text in pieces:
                if text:
                    shown = text
                    yield StreamEvent(type="reasoning", chunk=text) if is_thinking else text
        assert last is not None
        response.set_usage(
            input=talk.reused_tokens + last.prompt_tokens,
            output=last.generation_tokens,
            details={"cached_tokens": talk.reused_tokens} if talk.reused_tokens else None,
        )
        response.response_json = {"finish_reason": last.finish_reason}
        notes = []
        if talk.forgotten:
            notes.append(f"the context is full; {talk.forgotten} of the oldest messages were left out")
        if last.finish_reason == "length":
            notes.append(f"the answer was cut at max_tokens, {max_tokens}")
        elif last.finish_reason == "context":
            notes.append(f"the answer was cut; the context of {talk.limit} tokens is full")
        if notes and stream and not shown.endswith("\n") and not log.hasHandlers():
            print(file=sys.stderr)  # in a terminal, notes would follow the answer's last word
        for note in notes:
            log.warning("kvant: %s", note)
    finally:
        _idle.clear()
        _idle[reserved] = talk


def _load(name: str) -> "tuple[LanguageModel, Tokenizer]":
    """Load a model and its tokenizer, after freeing the previous ones."""
    from kvant.engine.load import load

    if name not in _loaded:
        _idle.clear()
        _loaded.clear()
        _loaded[name] = load(name)
    return _loaded[name]


def _sampling(options: KvantOptions, name: str) -> "Sampling":
    """Return the user's options, completed by the model authors' settings."""
    from kvant.engine.load import find_model
    from kvant.engine.sampling import NEUTRAL, SamplingOptions, read_model_sampling

    names = ("top_p", "top_k", "min_p", "repetition_penalty", "seed")
    settings = SamplingOptions(temp=options.temperature, **{name: getattr(options, name) for name in names})
    named = [option for option in NEUTRAL if getattr(settings, option) is not None]
    return settings.filled(read_model_sampling(find_model(name), named))


def _begin(
    name: str, max_kv_size: int | None, kv_bits: int | None, kv_group_size: int | None
) -> "Conversation":
    """Start a conversation with a new cache."""
    from kvant.engine.conversation import Conversation
    from kvant.engine.prompt_cache import make_prompt_cache

    _idle.clear()  # free its memory before reserving more
    model, tokenizer = _load(name)
    cache = make_prompt_cache(model, max_kv_size, kv_bits=kv_bits, kv_group_size=kv_group_size)
    return Conversation(model, tokenizer, cache, overflow="forget")


def _messages(prompt: llm.Prompt) -> list[dict[str, str]]:
    """Convert llm's messages for chat templates."""
    from llm.parts import ReasoningPart, TextPart

    messages: list[dict[str, str]] = []
    for message in prompt.messages:
        answer = ""
        thought = ""
        for piece in message.parts:
            if isinstance(piece, TextPart):
                answer += piece.text
            elif isinstance(piece, ReasoningPart):
                thought += piece.text
            else:
                raise llm.ModelError(f"the conversation has a {type(piece).__name__}; kvant takes text")
        messages.append(
            {"role": message.role, "content": answer} | ({"reasoning_content": thought} if thought else {})
        )
    if prompt.system:  # llm leaves out the system message of a later exchange
        others = messages[1:] if messages and messages[0]["role"] == "system" else messages
        messages = [{"role": "system", "content": prompt.system}, *others]
    if not messages:
        raise llm.ModelError("the prompt is empty")
    return messages

"""A checked request to the engine, and what it generates, as it comes."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvant.engine.batch_engine import Deliver
from kvant.engine.processors import Frequency, Presence
from kvant.engine.request import Request, Token
from kvant.errors import ArgumentError, ContextError, EngineError, KvantError, QueueFullError
from kvant.models import LanguageModel
from kvant.server.answer_text import AnswerParts, AnswerText
from kvant.server.errors import ApiError
from kvant.server.generation import Begun, Call, End, EndReason, Event, Generation, Text
from kvant.server.sampling import refused
from kvant.text.detokenizer import ByteDetokenizer
from kvant.text.prompt import encode_prompt, encode_rendered, render_chat
from kvant.text.tokenizer import Tokenizer

RETRY_AFTER_S = 1  # what a client is told to wait where the queue is full


class Service(Protocol):
    """What is used here of the server's service."""

    model: LanguageModel
    tokenizer: Tokenizer
    sampling: Mapping[str, Any]
    settings: Any

    def check_model(self, name: str) -> str: ...
    def submit(self, request: Request, deliver: Deliver) -> None: ...
    def cancel(self, request: Request, answer: int | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is fed: token ids, and their text where there is one."""

    text: str
    ids: list[int]


async def answer(service: Service, generation: Generation) -> AsyncGenerator[Event, None]:
    """What is generated, as it comes: first :class:`Begun`, and :class:`End` once for each answer.

    Closing the iterator, or cancelling whoever waits for it, ends the generation.

    Raises:
        ApiError: before the first event, what is wrong with the request, or that there is no place for it now; later,
            an engine that was closed or has failed.
        Exception: what failed in the engine for this request alone.
    """
    prompt = await asyncio.to_thread(read_prompt, service, generation)
    request = await asyncio.to_thread(_request, service, generation, prompt)
    loop, tokens = asyncio.get_running_loop(), asyncio.Queue[Token]()
    try:
        service.submit(request, lambda token: loop.call_soon_threadsafe(tokens.put_nowait, token))
    except (KvantError, ValueError) as error:
        raise _failure(error, generation) from error
    try:
        async for event in _events(service, generation, prompt, request, tokens):
            yield event
    finally:
        service.cancel(request)


def read_prompt(service: Service, generation: Generation) -> Prompt:
    """The prompt of a request. It waits for the tokenizer, for 10 s at most.

    Raises:
        ApiError: 400: a chat template that fails on these messages, or nothing to read.
    """
    try:
        if generation.messages is not None:
            text = render_chat(service.tokenizer, list(generation.messages), generation.variables)
            return Prompt(text, encode_rendered(service.tokenizer, text))
        prompt = "" if generation.prompt is None else generation.prompt
        ids = encode_prompt(service.tokenizer, prompt, service.model.config.vocab_size)
        if isinstance(prompt, str):
            return Prompt(prompt, ids)
        return Prompt(service.tokenizer.decode(ids) if generation.echo else "", ids)
    except (KvantError, ValueError) as error:
        raise _failure(error, generation) from error


def _request(service: Service, generation: Generation, prompt: Prompt) -> Request:
    """The engine's request."""
    tokenizer, vocab_size = service.tokenizer, service.model.config.vocab_size
    options = generation.sampling
    try:
        special: list[int] = []
        if options.xtc_probability:  # as in mlx-lm, XTC never leaves out the ends of a line and of the text
            special = [*tokenizer.encode("\n", add_special_tokens=False), *tokenizer.eos_token_ids]
        sampler, processors = options.filled(service.sampling).build(vocab_size, special)
    except ArgumentError as error:
        raise refused(error) from error
    # OpenAI's penalties count the tokens of the answer.
    counted = [
        replace(each, first=len(prompt.ids)) if isinstance(each, Presence | Frequency) else each for each in processors
    ]
    return Request(
        prompt.ids,
        max_tokens=-1 if generation.max_tokens is None else generation.max_tokens,
        sampler=sampler,
        logits_processors=counted,
        stop_tokens=() if generation.ignore_eos else tokenizer.eos_token_ids,
        salt=generation.salt,
        top_logprobs=generation.top_logprobs,
        answers=generation.answers,
    )


async def _events(
    service: Service, generation: Generation, prompt: Prompt, request: Request, tokens: "asyncio.Queue[Token]"
) -> AsyncGenerator[Event, None]:
    """The events of a request under way, from the tokens that come."""
    tokenizer = service.tokenizer
    # Some tokenizers decode in their own process: whoever waits for that must not be the server's loop.
    waits = not isinstance(tokenizer.detokenizer, ByteDetokenizer)
    texts = {
        number: AnswerText(
            number, tokenizer, AnswerParts(tokenizer, prompt.text), generation.stop, logprobs=generation.logprobs
        )
        for number in range(generation.answers)
    }
    has_begun = False
    while texts:
        token = await tokens.get()
        if (text := texts.get(token.answer)) is None:
            continue  # it ended before its last token came
        if token.error is not None:
            raise _failure(token.error, generation) if isinstance(token.error, KvantError) else token.error
        if token.token is None:
            raise ApiError("the server is shutting down", status=503)
        if not has_begun:
            has_begun = True
            yield Begun(len(prompt.ids), token.cached_tokens)
            for number in texts if generation.echo and prompt.text else ():
                yield Text(number, prompt.text)
        read: Callable[[], list[Text | Call]] = lambda text=text, token=token: text.take(token)  # type: ignore[misc]  # noqa: E731
        for event in await asyncio.to_thread(read) if waits else read():
            yield event
        if text.stop is None and token.finish_reason is None:
            continue
        if token.finish_reason is None:
            service.cancel(request, token.answer)
        del texts[token.answer]
        yield End(token.answer, _reason(text, token), text.tokens, text.thinking_tokens, text.stop)


def _reason(text: AnswerText, token: Token) -> EndReason:
    if text.stop is None and token.finish_reason != "stop":
        return "length"
    return "tool_calls" if text.calls else "stop"


def _failure(error: Exception, generation: Generation) -> ApiError:
    """What a client is told of an error that it, or the server's state, is to blame for."""
    if isinstance(error, ArgumentError):
        return refused(error)
    if isinstance(error, QueueFullError):
        return ApiError(str(error), status=429, code="rate_limit_exceeded", headers={"Retry-After": str(RETRY_AFTER_S)})
    if isinstance(error, EngineError):
        return ApiError(str(error), status=503)
    param = "prompt" if generation.messages is None else "messages"
    return ApiError(
        str(error), param=param, code="context_length_exceeded" if isinstance(error, ContextError) else None
    )

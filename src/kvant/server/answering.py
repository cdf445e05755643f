"""A checked request to the engine, and what it generates, as it comes."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from kvant.engine.processors import Frequency, LogitsProcessor, Presence
from kvant.engine.request import Request, Token
from kvant.errors import ArgumentError, ContextError, EngineError, KvantError, QueueFullError
from kvant.server.answer_text import AnswerText
from kvant.server.constraints import grammar_of
from kvant.server.errors import ApiError
from kvant.server.generation import Begun, End, EndReason, Event, Generation, Text
from kvant.server.sampling import refused
from kvant.server.service import Service
from kvant.server.thinking_budget import thinking_budget
from kvant.server.tools import for_template, shown_tools
from kvant.text.answer_parts import AnswerParts
from kvant.text.detokenizer import ByteDetokenizer
from kvant.text.prompt import encode_prompt, encode_rendered, render_chat

RETRY_AFTER_S = 1  # what a client is told to wait where the queue is full


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
    prompt, request = await asyncio.to_thread(_prepare, service, generation)
    try:
        grammar = await grammar_of(service, generation, prompt.text)
    except KvantError as error:
        raise _failure(error, generation) from error
    if grammar is not None:
        request = replace(request, logits_processors=[*request.logits_processors, grammar])
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
            variables = {**service.settings.template_variables, **generation.variables}
            variables["tools"] = shown_tools(service, generation) or None
            text = render_chat(service.tokenizer, for_template(generation.messages, service.tool_format), variables)
            service.check_length(text)
            return Prompt(text, encode_rendered(service.tokenizer, text))
        prompt = "" if generation.prompt is None else generation.prompt
        service.check_length(prompt)
        ids = encode_prompt(service.tokenizer, prompt, service.model.config.vocab_size)
        if isinstance(prompt, str):
            return Prompt(prompt, ids)
        return Prompt(service.tokenizer.decode(ids) if generation.echo else "", ids)
    except (KvantError, ValueError) as error:
        raise _failure(error, generation) from error


def _prepare(service: Service, generation: Generation) -> tuple[Prompt, Request]:
    """The prompt, and the engine's request."""
    prompt = read_prompt(service, generation)
    tokenizer, vocab_size = service.tokenizer, service.model.config.vocab_size
    try:
        sampler, processors = generation.sampling.filled(service.sampling).build_for(tokenizer, vocab_size)
    except ArgumentError as error:
        raise refused(error) from error
    # OpenAI's penalties count the tokens of the answer.
    counted: list[LogitsProcessor] = [
        replace(each, first=len(prompt.ids)) if isinstance(each, Presence | Frequency) else each for each in processors
    ]
    if generation.thinking_budget is not None:
        counted.append(thinking_budget(tokenizer, prompt.text, len(prompt.ids), generation.thinking_budget))
    request = Request(
        prompt.ids,
        max_tokens=-1 if generation.max_tokens is None else generation.max_tokens,
        sampler=sampler,
        logits_processors=counted,
        stop_tokens=() if generation.ignore_eos else tokenizer.eos_token_ids,
        salt=generation.salt,
        top_logprobs=generation.top_logprobs,
        answers=generation.answers,
        drafts=service.drafts_of(generation.draft),
    )
    return prompt, request


async def _events(
    service: Service, generation: Generation, prompt: Prompt, request: Request, tokens: "asyncio.Queue[Token]"
) -> AsyncGenerator[Event, None]:
    """The events of a request under way, from the tokens that come."""
    tokenizer = service.tokenizer
    # Some tokenizers decode in their own process: whoever waits for that must not be the server's loop.
    waits = not isinstance(tokenizer.detokenizer, ByteDetokenizer)
    texts = {number: _text(service, generation, prompt, number) for number in range(generation.answers)}
    has_begun = False
    while texts:
        token = await tokens.get()
        if (text := texts.get(token.answer)) is None:
            continue  # it ended before its last token came
        if token.error is not None:
            if not isinstance(token.error, KvantError):
                raise token.error
            raise _failure(token.error, generation) from token.error
        if token.token is None:
            raise ApiError("the server is shutting down", status=503)
        if not has_begun:
            has_begun = True
            yield Begun(len(prompt.ids), token.cached_tokens)
            for number in texts if generation.echo and prompt.text else ():
                yield Text(number, prompt.text)
        for event in await asyncio.to_thread(text.take, token) if waits else text.take(token):
            yield event
        if token.finish_reason is None:
            if text.stop is None and (generation.parallel_tool_calls or not text.calls):
                continue
            service.cancel(request, token.answer)
        del texts[token.answer]
        yield End(token.answer, _reason(text, token), text.tokens, text.thinking_tokens, text.stop)


def _text(service: Service, generation: Generation, prompt: Prompt, number: int) -> AnswerText:
    parts = None
    if generation.messages is not None:
        tools = shown_tools(service, generation)
        parts = AnswerParts(service.tokenizer, prompt.text, tools, service.tool_format)
    return AnswerText(number, service.tokenizer, parts, generation.stop, logprobs=generation.logprobs)


def _reason(text: AnswerText, token: Token) -> EndReason:
    if text.stop is None and token.finish_reason in ("length", "context"):
        return "length"
    return "tool_calls" if text.calls else "stop"


def _failure(error: Exception, generation: Generation) -> ApiError:
    """What a client is told of an error that it, or the server's state, is to blame for."""
    if isinstance(error, ArgumentError):
        return refused(error)
    if isinstance(error, QueueFullError):
        return ApiError(str(error), status=429, code="rate_limit_exceeded", headers={"Retry-After": str(RETRY_AFTER_S)})
    if isinstance(error, EngineError):  # what it failed by is for the log alone
        said = (
            str(error) if error.__cause__ is None else "the engine failed; the server's log has the kind of the error"
        )
        return ApiError(said, status=503)
    if not isinstance(error, ValueError):
        return ApiError(str(error), status=500)
    param = "prompt" if generation.messages is None else "messages"
    return ApiError(
        str(error), param=param, code="context_length_exceeded" if isinstance(error, ContextError) else None
    )

"""OpenAI's /v1/completions: text that is continued as it is, without a chat template."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvant.server.answer_limits import max_tokens
from kvant.server.answering import answer
from kvant.server.body import decode
from kvant.server.chat_completions import head
from kvant.server.errors import ApiError
from kvant.server.generation import Begun, End, Event, Generation, Text, TokenLogprob
from kvant.server.openai_body import CompletionsBody
from kvant.server.openai_messages import common_fields, structured_format
from kvant.server.openai_results import Usage
from kvant.server.sampling import check_range
from kvant.server.service import Service
from kvant.server.streaming import EventStream, begin, json_response, sse, unless_gone

MAX_PROMPTS = 128
MAX_LOGPROBS = 5  # OpenAI's
DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def endpoint(request: Request) -> Response:
    """Continue one prompt or several.

    Raises:
        ApiError: see :func:`kvant.server.answering.answer`; 499: the client went away.
    """
    service: Service = request.app.state.service
    body = decode(await request.body(), CompletionsBody)
    name = service.check_model(body.model)
    generations = completions_generations(body, service, request.state.salt)
    events = together(
        [answer(service, each) for each in generations], service.settings.sequences // generations[0].answers
    )
    beginning = head(name, "text_completion", "cmpl-")
    if not body.stream:
        return json_response(await unless_gone(request, _whole(events, generations, beginning)))
    begun = await begin(request, events)
    lines = _chunks(begun, generations, beginning, body.wants_usage)
    return EventStream(begun, lines, lambda error: sse(error.openai()))


def completions_generations(body: CompletionsBody, service: Service, salt: bytes) -> list[Generation]:
    """What a body asks for, of each of its prompts.

    Raises:
        ApiError: 400: a field that cannot be applied.
    """
    if body.suffix:
        raise ApiError("suffix is given; the model only continues text", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        said = f"best_of is {body.best_of}; expected {body.n or 1}, which is n: every answer is returned"
        raise ApiError(said, param="best_of")
    if body.logprobs is not None:
        check_range("logprobs", body.logprobs, 0, MAX_LOGPROBS)
        if body.echo:
            raise ApiError("echo has no log-probabilities; expected echo or logprobs", param="echo")
    prompts = _prompts(body.prompt)
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise ApiError(f"prompt has {len(prompts)} prompts; expected 1 to {MAX_PROMPTS}", param="prompt")
    generation = Generation(
        format=structured_format(body.structured_outputs),
        max_tokens=max_tokens(body.max_tokens) or DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs is not None,
        top_logprobs=body.logprobs or 0,
        echo=bool(body.echo),
        **common_fields(body, service, salt),
    )
    return [replace(generation, prompt=prompt) for prompt in prompts]


def _prompts(given: str | Sequence[str | int | list[int]]) -> list[str | list[int]]:
    """The prompts, each text or token ids. A list of numbers is one prompt.

    Raises:
        ApiError: 400: numbers beside something else.
    """
    if isinstance(given, str):
        return [given]
    numbers = [each for each in given if isinstance(each, int)]
    prompts = [each for each in given if not isinstance(each, int)]
    if numbers and prompts:
        raise ApiError(
            "prompt has numbers beside prompts; expected token ids, or texts and lists of ids", param="prompt"
        )
    return [numbers] if numbers else prompts


async def together(
    streams: Sequence[AsyncGenerator[Event, None]], at_once: int
) -> AsyncGenerator[tuple[int, Event], None]:
    """The events of several generations as they come, with the number of each, of so many at once.

    No more than one of them waits for its first event: together they take one place of the engine's queue. Closing it
    ends all of them.
    """
    queue: asyncio.Queue[tuple[int, Event | None] | Exception] = asyncio.Queue()
    places, turn = asyncio.Semaphore(at_once), asyncio.Lock()

    async def follow(number: int, events: AsyncGenerator[Event, None]) -> None:
        try:
            async with places, aclosing(events):
                async with turn:
                    queue.put_nowait((number, await anext(events)))
                async for event in events:
                    queue.put_nowait((number, event))
            queue.put_nowait((number, None))
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.ensure_future(follow(number, events)) for number, events in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            told = await queue.get()
            if isinstance(told, Exception):
                raise told
            number, event = told
            if event is None:
                left -= 1
            else:
                yield number, event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _whole(
    events: AsyncGenerator[tuple[int, Event], None], generations: Sequence[Generation], beginning: dict[str, Any]
) -> dict[str, Any]:
    """The answers in one object."""
    answers, usage = generations[0].answers, Usage()
    choices = [_Choice(number, generations[0].logprobs) for number in range(len(generations) * answers)]
    async with aclosing(events):
        async for number, event in events:
            usage.take(event)
            if not isinstance(event, Begun):
                choices[number * answers + event.answer].take(event)
    return {**beginning, "choices": [choice.shaped() for choice in choices], "usage": usage.shaped()}


class _Choice:
    """One answer, gathered; or, of a stream, what is to be sent of it."""

    def __init__(self, number: int, with_logprobs: bool) -> None:
        self._number, self._with_logprobs = number, with_logprobs
        self._offset = 0  # characters that were sent
        self._reason: str | None = None
        self._clear()

    def _clear(self) -> None:
        self._texts: list[str] = []
        self._logprobs: list[tuple[int, TokenLogprob]] = []

    def take(self, event: Event) -> None:
        """Gather an event."""
        if isinstance(event, Text):
            at = self._offset + sum(map(len, self._texts))
            for each in event.logprobs:
                self._logprobs.append((at, each))
                at += len(each.text)
            self._texts.append(event.text)
        elif isinstance(event, End):
            self._reason = event.reason

    def shaped(self) -> dict[str, Any]:
        """What was gathered, as a choice; further events come after it."""
        text = "".join(self._texts)
        logprobs = _legacy(self._logprobs) if self._with_logprobs else None
        self._offset += len(text)
        self._clear()
        return {"index": self._number, "text": text, "logprobs": logprobs, "finish_reason": self._reason}


def _legacy(logprobs: Sequence[tuple[int, TokenLogprob]]) -> dict[str, Any]:
    """Log-probabilities in the older shape: lists side by side; ``text_offset`` counts characters."""
    # OpenAI's have the token itself among the most probable ones, and nothing where none of these are wanted.
    tops = [{_name(other): other.logprob for other in (each, *each.top)} if each.top else None for _, each in logprobs]
    return {
        "tokens": [_name(each) for _, each in logprobs],
        "token_logprobs": [each.logprob for _, each in logprobs],
        "top_logprobs": tops,
        "text_offset": [at for at, _ in logprobs],
    }


def _name(token: TokenLogprob) -> str:
    """A token's text; its bytes where they are no whole characters, as OpenAI writes them."""
    if token.text.encode() == token.bytes:
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)


async def _chunks(
    events: AsyncIterator[tuple[int, Event]],
    generations: Sequence[Generation],
    beginning: dict[str, Any],
    usage_too: bool,
) -> AsyncGenerator[bytes, None]:
    """The answers as server-sent events."""
    answers, usage = generations[0].answers, Usage()
    choices = [_Choice(number, generations[0].logprobs) for number in range(len(generations) * answers)]
    no_usage = {"usage": None} if usage_too else {}
    async for number, event in events:
        usage.take(event)
        if not isinstance(event, Begun):
            choice = choices[number * answers + event.answer]
            choice.take(event)
            yield sse({**beginning, "choices": [choice.shaped()], **no_usage})
    if usage_too:
        yield sse({**beginning, "choices": [], "usage": usage.shaped()})
    yield b"data: [DONE]\n\n"

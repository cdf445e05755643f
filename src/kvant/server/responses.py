"""OpenAI's /v1/responses. Nothing is stored: each request has the whole conversation."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvant.errors import ArgumentError
from kvant.server.answering import answer
from kvant.server.body import decode
from kvant.server.chat_completions import salt_of
from kvant.server.errors import ApiError
from kvant.server.generation import Event
from kvant.server.response_stream import ResponseStream
from kvant.server.responses_body import ResponsesBody
from kvant.server.responses_input import responses_generation
from kvant.server.sampling import refused
from kvant.server.service import Service
from kvant.server.streaming import EventStream, begin, json_response, sse, unless_gone


async def endpoint(request: Request) -> Response:
    """Answer a conversation.

    Raises:
        ApiError: see :func:`kvant.server.answering.answer`; 499: the client went away.
    """
    service: Service = request.app.state.service
    body = decode(await request.body(), ResponsesBody)
    name = service.check_model(body.model)
    generation = responses_generation(body, service, salt_of(request))
    try:
        sampling = generation.sampling.filled(service.sampling)
    except ArgumentError as error:
        raise refused(error) from error
    response = ResponseStream(name, body, generation, sampling)
    events = answer(service, generation)
    try:
        if not body.stream:
            return json_response(await unless_gone(request, _whole(events, response)))
        begun = await begin(request, events)
    except ApiError as error:
        if error.param == "messages":  # what this interface calls otherwise
            error.param = "input"
        raise

    def failed(error: ApiError) -> bytes:
        return b"".join(sse(told, told["type"]) for told in response.failed(error))

    return EventStream(begun, _lines(begun, response), failed)


async def _whole(events: AsyncGenerator[Event, None], response: ResponseStream) -> dict[str, Any]:
    """The answer in one object."""
    async with aclosing(events):
        async for event in events:
            for _ in response.add(event):
                pass
    return response.response


async def _lines(events: AsyncIterator[Event], response: ResponseStream) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events."""
    async for event in events:
        for told in response.add(event):
            yield sse(told, told["type"])

"""One way from a request to its answer, whole or streamed, for every interface.

A client that goes away ends what was begun for it.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvant.server.answering import answer
from kvant.server.body import decode, json_response, sse
from kvant.server.errors import ApiError, described, log_cause, logger
from kvant.server.generation import Begun, Event, Generation
from kvant.server.service import Service

T = TypeVar("T")
GONE = 499  # a status that nobody reads; nginx's
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # a proxy passes on each event as it comes


class Encoder(Protocol):
    """Turns the events of one request into an interface's answer.

    Attributes:
        done: the bytes that end a stream.
    """

    done: bytes

    def add(self, event: Event) -> Iterable[dict[str, Any]]:
        """The stream's events for the next one; they have to be taken all."""

    def whole(self) -> dict[str, Any]:
        """The answer in one object, of all events so far."""

    def failed(self, error: ApiError, request_id: str) -> Iterable[dict[str, Any]]:
        """The stream's last events of an answer that could not be ended."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """An interface that answers with generated text.

    Attributes:
        body: the type of its bodies, which have ``model`` and ``stream``.
        generations: what a body asks for; several of one prompt each. It raises an ApiError for what cannot be had.
        encoder: of the served model's name, the body and the generations.
    """

    body: type[Any]
    generations: Callable[[Any, Service], Sequence[Generation]]
    encoder: Callable[[str, Any, Sequence[Generation], Service], Encoder]

    async def endpoint(self, request: Request) -> Response:
        """Answer a request."""
        service: Service = request.app.state.service
        body = decode(await request.body(), self.body)
        name = service.check_model(body.model)
        generations = [replace(each, salt=request.state.salt) for each in self.generations(body, service)]
        encoder = self.encoder(name, body, generations, service)
        events = together(
            [answer(service, each) for each in generations],
            generations[0].answers,
            service.settings.sequences // generations[0].answers,
        )
        if body.stream:
            return EventStream(await unless_gone(request, anext(events)), events, encoder)
        await unless_gone(request, _take_all(events, encoder))
        return json_response(encoder.whole())


async def together(
    streams: Sequence[AsyncGenerator[Event, None]], answers: int, at_once: int
) -> AsyncGenerator[Event, None]:
    """The events of several generations as they come, of so many at once; their answers are numbered on.

    No more than one of them waits for its first event: together they take one place of the engine's queue. Closing it
    ends all of them.
    """
    queue: asyncio.Queue[Event | Exception | None] = asyncio.Queue()
    places, first = asyncio.Semaphore(at_once), asyncio.Lock()

    async def follow(number: int, events: AsyncGenerator[Event, None]) -> None:
        def put(event: Event) -> None:
            queue.put_nowait(
                event if isinstance(event, Begun) else replace(event, answer=event.answer + number * answers)
            )

        try:
            async with places, aclosing(events):
                async with first:
                    put(await anext(events))
                async for event in events:
                    put(event)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    if len(streams) == 1:
        async with aclosing(streams[0]):
            async for event in streams[0]:
                yield event
        return
    tasks = [asyncio.ensure_future(follow(number, events)) for number, events in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            told = await queue.get()
            if isinstance(told, Exception):
                raise told
            if told is None:
                left -= 1
            else:
                yield told
    finally:
        await end(*tasks)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Wait for work that is cancelled when the client goes away. The body must have been read."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError("the client went away", status=GONE)
        return working.result()
    finally:
        await end(working, watching)


async def end(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel what has not ended, and wait for it."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    """Wait until the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _take_all(events: AsyncGenerator[Event, None], encoder: Encoder) -> None:
    async with aclosing(events):
        async for event in events:
            for _ in encoder.add(event):
                pass


class EventStream(Response):
    """Server-sent events of an answer, the first of whose events has come."""

    def __init__(self, first: Event, rest: AsyncGenerator[Event, None], encoder: Encoder) -> None:
        self.status_code = 200
        self.media_type = "text/event-stream"
        self.background = None
        self.init_headers(HEADERS)
        self._first, self._rest, self._encoder = first, rest, encoder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send, scope["state"]["request_id"]))
        watching = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await end(sending, watching)
            await self._rest.aclose()

    async def _send(self, send: Send, request_id: str) -> None:
        async def tell(events: Iterable[dict[str, Any]]) -> None:
            for each in events:
                line = sse(each, each.get("type"))
                await send({"type": "http.response.body", "body": line, "more_body": True})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        last = b""
        try:
            await tell(self._encoder.add(self._first))
            async for event in self._rest:
                await tell(self._encoder.add(event))
            last = self._encoder.done
        except ApiError as error:
            log_cause(request_id, error)
            await tell(self._encoder.failed(error, request_id))
        except Exception as error:
            logger.error("%s: an answer failed after it had begun: %s", request_id, described(error))
            failed = ApiError("the answer failed; the server's log says why", status=500)
            await tell(self._encoder.failed(failed, request_id))
        await send({"type": "http.response.body", "body": last, "more_body": False})

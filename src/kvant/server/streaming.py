"""Responses to requests that may be left before their end: a client that goes away ends what was begun for it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable
from contextlib import aclosing
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvant.server.errors import ApiError, described, log_cause, logger

T = TypeVar("T")
GONE = 499  # a status that nobody reads; nginx's
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # a proxy passes on each event as it comes


class Events(Generic[T]):
    """An answer's events, the first of which has come already."""

    def __init__(self, first: T, rest: AsyncGenerator[T, None]) -> None:
        self._first: T | None = first
        self._rest = rest

    def __aiter__(self) -> "Events[T]":
        return self

    async def __anext__(self) -> T:
        if (first := self._first) is not None:
            self._first = None
            return first
        return await anext(self._rest)

    async def aclose(self) -> None:
        """End the generation."""
        await self._rest.aclose()


async def begin(request: Request, events: AsyncGenerator[T, None]) -> Events[T]:
    """Wait for the first event: an error before it is the response.

    Raises:
        ApiError: of the answer, or 499: the client went away.
    """
    return Events(await unless_gone(request, anext(events)), events)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Wait for work that is cancelled when the client goes away. The body must have been read.

    Raises:
        ApiError: 499: it did; nobody reads this.
        Exception: of the work.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(gone(request.receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError("the client went away", status=GONE)
        return working.result()
    finally:
        await end(working, watching)


async def gone(receive: Receive) -> None:
    """Wait until the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def end(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel what has not ended, and wait for it."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events of an answer."""

    def __init__(
        self,
        events: Events[Any],
        lines: AsyncGenerator[bytes, None],
        failed: Callable[[ApiError], bytes],
    ) -> None:
        """For events that have begun.

        Args:
            lines: made of the events: what is sent.
            failed: the lines of an error.
        """
        self.status_code = 200
        self.media_type = "text/event-stream"
        self.background = None
        self.init_headers(HEADERS)
        self._events, self._lines, self._failed = events, lines, failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send, scope["state"]["request_id"]))
        watching = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await end(sending, watching)
            await self._lines.aclose()
            await self._events.aclose()

    async def _send(self, send: Send, request_id: str) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for line in self._all(request_id):
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _all(self, request_id: str) -> AsyncIterator[bytes]:
        try:
            async for line in self._lines:
                yield line
        except ApiError as error:
            log_cause(request_id, error)
            yield self._failed(error)
        except Exception as error:
            logger.error("%s: an answer failed after it had begun: %s", request_id, described(error))
            yield self._failed(ApiError("the answer failed; the server's log says why", status=500))


async def take_all(events: AsyncGenerator[T, None], told: Callable[[T], Iterable[object]]) -> None:
    """Take all events of an answer that is sent in one object. ``told``: makes something of each."""
    async with aclosing(events):
        async for event in events:
            for _ in told(event):
                pass


async def named_events(
    events: AsyncIterator[T], told: Callable[[T], Iterable[dict[str, Any]]]
) -> AsyncGenerator[bytes, None]:
    """Server-sent events that ``told`` makes of an answer's events, each with its type as its name."""
    async for event in events:
        for each in told(event):
            yield sse(each, each["type"])


def sse(data: Any, event: str | None = None) -> bytes:
    """One event of JSON."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + msgspec.json.encode(data) + b"\n\n"


def json_response(data: Any) -> Response:
    """A response of JSON."""
    return Response(msgspec.json.encode(data), media_type="application/json")

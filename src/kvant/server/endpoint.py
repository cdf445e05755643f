"""Turn a request into its answer, whole or streamed, for every interface.

If the client disconnects, its generation is cancelled.
"""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kvant.errors import QueueFullError
from kvant.server.answering import answer, busy
from kvant.server.body import decode
from kvant.server.compiling import unheld_formats
from kvant.server.errors import ApiError, described, log_cause, logger
from kvant.server.generation import Begun, Call, End, Event, Generation, Text
from kvant.server.left_out import LeftOut
from kvant.server.registry import Registry
from kvant.server.request_log import Usage
from kvant.server.security import FORGET, count_marks
from kvant.server.service import Service

T = TypeVar("T")
PAUSE_S = 10.0  # without an event until a stream shows that it is alive, before clients and proxies give up
COMMENT = b": the prompt is read\n\n"
GONE = 499  # nginx's status; only a client that closed just its sending side can read it
SMALL_BODY = 64 << 10  # bytes; a body of this size is decoded in a few milliseconds, whatever it contains
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies forward each event immediately


class Encoder(ABC):
    """Converts the events of one request to an interface's answer."""

    done = b""  # ends a stream

    def add(self, event: Event) -> Iterator[dict[str, Any]]:
        """Return the stream's messages for an event; the caller must exhaust them."""
        match event:
            case Begun():
                return self.begun(event)
            case Text(text="", logprobs=[] | ()):
                return iter(())
            case Text():
                return self.text(event)
            case Call():
                return self.call(event)
            case End():
                return self.end(event)

    @abstractmethod
    def begun(self, event: Begun) -> Iterator[dict[str, Any]]: ...

    @abstractmethod
    def text(self, event: Text) -> Iterator[dict[str, Any]]: ...

    def call(self, event: Call) -> Iterator[dict[str, Any]]:
        raise NotImplementedError("continued text has no calls")

    @abstractmethod
    def end(self, event: End) -> Iterator[dict[str, Any]]: ...

    def waiting(self) -> Iterator[dict[str, Any]]:
        """Return the stream's messages after a pause; if there are none, a comment is sent."""
        return iter(())

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Return the answer as one object, from all events so far."""

    @abstractmethod
    def failed(self, error: ApiError, request_id: str) -> Iterable[dict[str, Any]]:
        """Return the stream's last messages for an answer that failed."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """An interface that answers with generated text."""

    body: type[Any]  # the type of bodies, with ``model`` and ``stream``
    # returns the generations of a body, each with one prompt
    generations: Callable[[Any, Service, LeftOut], Sequence[Generation]]
    encoder: Callable[[str, Any, Sequence[Generation], Service], Encoder]  # ``str``: the served model's name

    async def endpoint(self, request: Request) -> Response:
        """Answer a request."""
        registry: Registry = request.app.state.registry
        left_out: LeftOut = request.state.left_out
        usage: Usage = request.state.usage
        async with await BodyReader.of(request) as reader:
            body = await reader.decode(self.body, left_out, registry.context)
            service, name = await reader.use_model(body.model)
            usage.model = body.model

            def read() -> tuple[Sequence[Generation], Encoder]:
                salt, client = _whose(request)
                asked = [
                    replace(each, salt=salt, client=client)
                    for each in self.generations(body, service, left_out)
                ]
                for each in sorted(unheld_formats(asked[0])):
                    left_out.add("format", each)
                return asked, self.encoder(name, body, asked, service)

            generations, encoder = await reader.call(read)
        events = together(
            [answer(service, each) for each in generations],
            generations[0].answers,
            service.settings.sequences // generations[0].answers,
        )
        events = usage.count(events, generations[0].answers)
        first = await unless_gone(request.receive, anext(events))
        getattr(request.state, FORGET)()  # an answer can take minutes
        if body.stream:
            return EventStream(_lines(first, events, encoder, request.state.request_id))
        await unless_gone(request.receive, _take_all(first, events, encoder))
        return Response(msgspec.json.encode(encoder.whole()), media_type="application/json")


def _whose(request: Request) -> tuple[bytes, str]:
    """Return the salt of a request's key, and its address."""
    return request.state.salt, request.client.host if request.client else ""


class BodyReader:
    """Calls functions that process the body of a request.

    Small bodies are processed immediately. Large ones are processed in a thread, one at a time.
    """

    def __init__(self, request: Request, body: bytes) -> None:
        self._request = request
        self._body = body
        self._marks = 0 if len(body) <= SMALL_BODY else count_marks(body)
        self._slot: AsyncExitStack | None = None  # while this body has the queue's slot

    @classmethod
    async def of(cls, request: Request) -> "BodyReader":
        """Return a reader of a request's whole body."""
        body = b"".join([chunk async for chunk in request.stream()])  # Request.body() would cache it
        return cls(request, body)

    async def __aenter__(self) -> "BodyReader":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._release_slot()

    async def decode(self, kind: type[T], left_out: LeftOut | None = None, tokens: float = math.inf) -> T:
        """Decode the body with :func:`kvant.server.body.decode`, and release its bytes."""
        body = self._body
        self._body = b""
        return await self.call(partial(decode, body, kind, left_out, tokens))

    async def use_model(self, name: str | None) -> tuple[Service, str]:
        """Return the service of the model with this name, and the name for the answer.

        The model is loaded if needed, and stays loaded until the request has ended.
        """
        registry: Registry = self._request.app.state.registry
        model = registry.find(name)
        acquired = registry.acquire(model, self._request.state.leases)
        if model.service is not None:
            return await acquired, model.name
        await self._release_slot()
        return await unless_gone(self._request.receive, acquired), model.name

    async def call(self, function: Callable[[], T]) -> T:
        """Call a function whose duration depends on the size of the body."""
        if not self._marks:
            return function()
        try:
            return await unless_gone(self._request.receive, self._in_thread(function))
        except QueueFullError as error:
            raise busy(error) from error

    async def _in_thread(self, function: Callable[[], T]) -> T:
        registry: Registry = self._request.app.state.registry
        if self._slot is None:
            room = registry.settings.max_queue
            slot = AsyncExitStack()
            await slot.enter_async_context(registry.reading.slot(_whose(self._request), self._marks, room))
            self._slot = slot
        return await registry.reading.call(function)

    async def _release_slot(self) -> None:
        if self._slot is not None:
            await self._slot.aclose()
            self._slot = None


async def together(
    streams: Sequence[AsyncGenerator[Event, None]], answers: int, at_once: int
) -> AsyncGenerator[Event, None]:
    """Yield the events of several generations as they arrive, ``at_once`` of them at a time.

    Answers are numbered consecutively, ``answers`` per generation. At most one generation waits for its
    prompt, so that together they use one place in the engine's queue. Closing the generator ends all of them.
    """
    queue: asyncio.Queue[Event | Exception | None] = asyncio.Queue()
    places = asyncio.Semaphore(at_once)
    first = asyncio.Lock()

    async def follow(number: int, events: AsyncGenerator[Event, None]) -> None:
        def put(event: Event) -> None:
            queue.put_nowait(
                event if isinstance(event, Begun) else replace(event, answer=event.answer + number * answers)
            )

        try:
            async with places, aclosing(events):
                async with first:  # until its prompt is fed
                    for _ in range(2):
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
            message = await queue.get()
            if isinstance(message, Exception):
                raise message
            if message is None:
                left -= 1
            else:
                yield message
    finally:
        await _end(*tasks)


async def unless_gone(receive: Receive, awaitable: Awaitable[T]) -> T:
    """Await something, or cancel it if the client disconnects. The body must have been read."""
    working = asyncio.ensure_future(awaitable)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            message = (
                "the client closed its side of the connection; keep it open until the answer has arrived"
            )
            raise ApiError(message, status=GONE)
        return working.result()
    finally:
        await _end(working, watching)


async def _end(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel tasks that have not ended, and wait for them."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _take_all(first: Event, rest: AsyncGenerator[Event, None], encoder: Encoder) -> None:
    async with aclosing(rest):
        for _ in encoder.add(first):
            pass
        async for event in rest:
            for _ in encoder.add(event):
                pass


class EventStream(StreamingResponse):
    """Server-sent events of an answer, which ends if the client disconnects."""

    def __init__(self, lines: AsyncGenerator[bytes, None]) -> None:
        super().__init__(lines, headers=HEADERS, media_type="text/event-stream")
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._lines):
            with suppress(ApiError):  # the client disconnected
                await unless_gone(receive, self.stream_response(send))


async def _lines(
    first: Event, rest: AsyncGenerator[Event, None], encoder: Encoder, request_id: str
) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a stream."""
    async with aclosing(rest):
        try:
            for message in encoder.add(first):
                yield _line(message)
            async with aclosing(_with_pauses(rest)) as events:
                async for event in events:
                    if event is None:
                        yield b"".join(map(_line, encoder.waiting())) or COMMENT
                        continue
                    for message in encoder.add(event):
                        yield _line(message)
        except Exception as error:
            if isinstance(error, ApiError):
                failed = error
                log_cause(request_id, error)
            else:
                logger.error("%s: an answer failed after it had begun: %s", request_id, described(error))
                failed = ApiError("the answer failed; see the server's log", status=500)
            for message in encoder.failed(failed, request_id):
                yield _line(message)
        else:
            yield encoder.done


async def _with_pauses(events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event | None, None]:
    """Yield events as they arrive, and None after each PAUSE_S seconds without one."""
    coming: asyncio.Future[Event] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(events))
            done, _ = await asyncio.wait({coming}, timeout=PAUSE_S)
            if not done:
                yield None
                continue
            arrived = coming
            coming = None
            try:
                yield arrived.result()
            except StopAsyncIteration:
                return
    finally:
        if coming is not None:
            await _end(coming)


def _line(message: dict[str, Any]) -> bytes:
    name = f"event: {message['type']}\n".encode() if "type" in message else b""
    return name + b"data: " + msgspec.json.encode(message) + b"\n\n"

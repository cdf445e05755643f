"""Run the server as a process: listen, answer until a signal comes, finish open requests, and exit.

The number of connections is bounded, and so is the time for each phase of a connection, so that idle clients
cannot occupy the server.
"""

import asyncio
import errno
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvant.errors import EXIT_INTERRUPTED, KvantError, one_line
from kvant.server.app import make_app
from kvant.server.errors import described, logger
from kvant.server.registry import Registry
from kvant.server.security import HALF_CLOSED
from kvant.server.settings import Limits, Settings

BACKLOG = 1024  # connections waiting to be accepted
LAST_S = 2  # for writing responses after the engine has ended
OTHER_FILES = 64  # open files other than connections
ACCEPTED = 4  # connections accepted at once: each is a file before it is counted. Others queue in the kernel
# read at once: parsing this many bytes as one-byte chunks blocks the event loop for 20 ms
READ_BYTES = 16 << 10
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
SAME_S = 60  # before a repeated message of the event loop is logged again


class Connection(H11Protocol):
    """Add time limits to uvicorn's connection: for a request's headers, and for a client that does not read.

    The headers of the first request must arrive within ``header_s`` of the connection's start, those of later
    requests within ``header_s`` of their first byte. :class:`kvant.server.security.Bodies` limits the body.
    """

    limits = Limits()  # a subclass sets the server's

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._headers_due: asyncio.TimerHandle | None = None
        self._read_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # An attribute of asyncio's sockets, 256 KiB otherwise.
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        if len(self.connections) > self.limits.connections:
            self._refuse(BUSY)
        else:
            self._expect_headers()

    def connection_lost(self, error: Exception | None) -> None:
        for due in (self._headers_due, self._read_due):
            if due is not None:
                due.cancel()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._answering:
            if self._headers_due is not None:
                self._headers_due.cancel()
                self._headers_due = None
        elif self._headers_due is None:
            self._expect_headers()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to keep a connection whose client closed its sending side: if an answer is due.

        Such a client looks like one that has disconnected, so the generation ends as at a disconnect.
        """
        if not self._answering or self.cycle.more_body:
            return False
        self.cycle.keep_alive = False
        self.scope["state"][HALF_CLOSED] = True
        self.cycle.message_event.set()
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read_due = self.loop.call_later(self.limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read_due is not None:
            self._read_due.cancel()

    @property
    def _answering(self) -> bool:
        """Whether a request with complete headers has no complete answer yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_headers(self) -> None:
        self._headers_due = self.loop.call_later(self.limits.header_s, self._refuse, LATE)

    def _refuse(self, answer: bytes) -> None:
        self._headers_due = None
        if not self.transport.is_closing() and not self._answering:
            self.transport.write(answer)
            self.transport.close()


def bind(settings: Settings) -> socket.socket:
    """Return a socket bound to the server's address that does not listen yet."""
    with _can_listen(settings):
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host.strip("[]"), settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # for a restart
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
    return bound


def serve(
    registry: Registry, bound: socket.socket, announce: Callable[[str], None] = lambda line: None
) -> int:
    """Answer requests until SIGTERM, SIGHUP or SIGINT. Return the process's exit code.

    Args:
        registry: closed at the end.
        bound: from :func:`bind`; closed at the end.
        announce: called with a line when the server listens, and with another when it begins to end.
    """
    try:
        with _can_listen(registry.settings):
            bound.listen(BACKLOG)
        server = Server(make_app(registry), registry, announce)
        server.run(sockets=[bound])
        return server.exit_code
    finally:
        bound.close()
        registry.close(0 if registry.draining else 10)  # if draining, it was already waited for
        for service in registry.loaded:
            service.tokenizer.close()


def url_of(bound: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Make uvicorn's server answer open requests before it ends, while new ones get 503."""

    def __init__(self, app: Starlette, registry: Registry, announce: Callable[[str], None]) -> None:
        limits = registry.settings.limits
        limits = replace(
            limits, connections=min(limits.connections, _allowed_connections(limits.connections))
        )
        config = uvicorn.Config(
            app,
            http=type("OwnConnection", (Connection,), {"limits": limits}),
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=limits.idle_s,  # type: ignore[arg-type]  # seconds for the event loop
            timeout_graceful_shutdown=LAST_S,
            h11_max_incomplete_event_size=limits.header_bytes,
            backlog=ACCEPTED,
        )
        super().__init__(config)
        self.exit_code = 0
        self._registry = registry
        self._announce = announce
        self._ending: asyncio.Task[None] | None = None
        self._logged: dict[str, float] = {}  # time by the event loop's message

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(self._log)
        logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns about every client that disconnects
        await super().startup(sockets)
        self._registry.start()
        assert sockets is not None
        for each in sockets:
            each.listen(BACKLOG)  # asyncio listened with ACCEPTED, which it also accepts at once
        self._announce(url_of(sockets[0]))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        signals = [signal.SIGINT, signal.SIGTERM]
        if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # of nohup
            signals.append(signal.SIGHUP)
        for number in signals:
            loop.add_signal_handler(number, self._on_signal, number)
        yield  # The handlers stay until the loop is closed: it may wait for a load.

    def _on_signal(self, number: int) -> None:
        if self._ending is not None:
            os._exit(EXIT_INTERRUPTED)
        self.exit_code = EXIT_INTERRUPTED if number == signal.SIGINT else 0
        self._ending = asyncio.get_running_loop().create_task(self.end())

    async def end(self) -> None:
        """Refuse new requests, wait for open ones, and stop."""
        registry = self._registry
        limits = registry.settings.limits
        registry.drain()
        if registry.active:
            self._announce(
                f"ending when {registry.active} requests are answered, after {limits.drain_s:g} seconds at "
                "most; another signal ends at once"
            )
        until = time.monotonic() + limits.drain_s
        while registry.active and registry.alive and time.monotonic() < until:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(registry.close)
        self.should_exit = True

    def _log(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log the type and place, not the text, of an error in the event loop that nobody awaits."""
        message = context["message"]
        now = time.monotonic()
        if now - self._logged.get(message, -math.inf) >= SAME_S:
            self._logged[message] = now
            error = context.get("exception")
            logger.error("%s%s", message, "" if error is None else f": {described(error)}")


def _allowed_connections(connections: int) -> int:
    """Return how many connections the limit of open files allows, after raising that limit if possible."""
    if sys.platform == "win32":
        return connections
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = connections + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    if soft == resource.RLIM_INFINITY or soft >= count:
        return connections
    # The margin: connections that are accepted but not counted, or refused but not closed, and a new process.
    return max(1, soft - len(os.listdir("/dev/fd")) - 6 * ACCEPTED)


@contextmanager
def _can_listen(settings: Settings) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = one_line(error)
        if error.errno == errno.EADDRINUSE:
            reason = "another process listens there; choose another --port, or 0 for any that is free"
        message = f"cannot listen on {settings.host} port {settings.port}: {reason}"
        raise KvantError(message) from error

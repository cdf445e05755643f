"""A connection that cannot be held for nothing: bounded in number, and in the time that each of its parts takes."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from kvant.server.settings import Limits

READ_BYTES = 16 << 10  # at once: so many bytes of chunks of one byte each take 20 ms, in which nothing else is done
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Connection(H11Protocol):
    """uvicorn's, with a time for the headers of a request, which it has not, and for a client that does not read.

    A request's headers have ``header_s`` from the connection's start, and later ones from their first byte. The body's
    time is bounded where it is read, :class:`kvant.server.security.Bodies`.
    """

    limits = Limits()  # a subclass has the server's

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._headers_due: asyncio.TimerHandle | None = None
        self._read_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # of asyncio's sockets; 256 KiB otherwise
        if len(self.connections) > self.limits.connections:
            self._refuse(BUSY)
        else:
            self._expect_headers()

    def connection_lost(self, error: Exception | None) -> None:
        self._cancel()
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

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read_due = self.loop.call_later(self.limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read_due is not None:
            self._read_due.cancel()

    @property
    def _answering(self) -> bool:
        """Whether there is a request with all its headers that has no whole answer yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_headers(self) -> None:
        self._headers_due = self.loop.call_later(self.limits.header_s, self._refuse, LATE)

    def _refuse(self, answer: bytes) -> None:
        self._headers_due = None
        if not self.transport.is_closing() and not self._answering:
            self.transport.write(answer)
            self.transport.close()

    def _cancel(self) -> None:
        for due in (self._headers_due, self._read_due):
            if due is not None:
                due.cancel()

"""Messages between ranks: JSON behind its length, over TCP. One byte of its own is a sign of life, a beat.

Nothing that arrives is executed or unpickled, and its size is bounded before it is read.
"""

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from kvant.errors import RanksError

MAX_BYTES = 64 * 2**20  # of a message
BEAT = b"\0"
MESSAGE = b"\1"
LENGTH = struct.Struct(">I")
FULL_WAIT_S = 0.01  # until a full connection is tried again


def frame(message: Any) -> bytes:
    """The bytes that carry a message.

    Raises:
        RanksError: longer than MAX_BYTES.
    """
    body = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
    if len(body) > MAX_BYTES:
        raise RanksError(f"a message between ranks has {len(body)} bytes; expected at most {MAX_BYTES}")
    return MESSAGE + LENGTH.pack(len(body)) + body


class Connection:
    """One TCP connection. One thread reads, others may send."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # each message at once: they are small
        sock.settimeout(None)
        self._socket = sock
        self._until: float | None = None
        self._heard: Callable[[], None] = lambda: None
        self._sending = threading.Lock()

    def messages(self, heard: Callable[[], None]) -> Iterator[Any]:
        """Every message; ``heard`` is called whenever bytes arrive. Ends as :meth:`read` does, with an error."""
        self._heard = heard
        while True:
            yield self.read()

    def read(self, max_bytes: int = MAX_BYTES) -> Any:
        """Wait for the next message; beats are passed over.

        Raises:
            EOFError: closed by the other side.
            OSError: the connection failed.
            ValueError: something else than a message.
        """
        while (kind := self._read(1)) == BEAT:
            pass
        if kind != MESSAGE:
            raise ValueError(f"byte {kind!r} where a message begins")
        (size,) = LENGTH.unpack(self._read(LENGTH.size))
        if size > max_bytes:
            raise ValueError(f"a message of {size} bytes")
        try:
            return json.loads(self._read(size))
        except RecursionError as error:
            raise ValueError("a message that is nested too deeply") from error

    def read_exactly(self, expected: bytes) -> None:
        """Read these bytes, or raise ValueError at the first that differs."""
        for byte in expected:
            if self._read(1)[0] != byte:
                raise ValueError(f"expected {expected!r}")

    def _read(self, count: int) -> bytes:
        data = bytearray(count)
        rest = memoryview(data)
        while rest:
            if self._until is not None:
                self._socket.settimeout(max(0.001, self._until - time.monotonic()))
            received = self._socket.recv_into(rest)
            if not received:
                raise EOFError
            self._heard()
            rest = rest[received:]
        return bytes(data)

    def send(self, data: bytes) -> None:
        """Send all of it; waits where the other side does not read."""
        with self._sending:
            self._socket.sendall(data)

    def send_within(self, data: bytes, seconds: float) -> None:
        """Send it, or raise TimeoutError; then nothing more can be sent."""
        until = time.monotonic() + seconds
        if not self._sending.acquire(timeout=max(0.0, seconds)):
            raise TimeoutError
        try:
            while data:
                try:
                    data = data[self._socket.send(data, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise TimeoutError from None
                    time.sleep(FULL_WAIT_S)
        finally:
            self._sending.release()

    def beat(self) -> None:
        """Show that this process lives. Never waits: data that is on its way shows the same."""
        if not self._sending.acquire(blocking=False):
            return
        with suppress(OSError):  # full, or closed: who reads notices
            self._socket.send(BEAT, socket.MSG_DONTWAIT)  # one byte is sent whole or not at all
        self._sending.release()

    def hold(self) -> int:
        """Let nothing be sent until :meth:`release`; the connection's descriptor, for another process to send on."""
        self._sending.acquire()
        return self._socket.fileno()

    def release(self) -> None:
        self._sending.release()

    def finish(self) -> None:
        """Nothing more will be sent; what was sent still arrives, whatever this process does next."""
        with suppress(OSError):  # closed already
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()

    def limit(self, seconds: float | None) -> None:
        """Bound the time of all that is read, and of each send. Lift it before other threads use the connection."""
        self._until = None if seconds is None else time.monotonic() + seconds
        self._socket.settimeout(seconds)

    def same_address(self) -> bool:
        """Whether both ends have one address: a connection inside this machine, or through a tunnel."""
        try:
            return bool(self._socket.getpeername()[0] == self._socket.getsockname()[0])
        except OSError:
            return False

"""Connections that are slow, idle, too many, or speak no HTTP."""

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from support.counts import count
from support.server import Running, read_all, served, wait

from kvant.server.settings import Limits

ASK = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
SENT: list[int] = []  # bytes of the endless answer
ENDED: list[str] = []


async def endless(request: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        try:
            while True:
                await asyncio.sleep(0)
                SENT.append(1 << 16)
                yield b"x" * (1 << 16)
        finally:
            ENDED.append("endless")

    return StreamingResponse(parts())


@pytest.fixture(scope="module")
def strict(pocket: Any) -> Iterator[Running]:
    """A server of few connections and short times."""
    limits = Limits(connections=6, header_s=0.7, idle_s=0.7, write_s=0.7)
    with served(*pocket, routes=[Route("/endless", endless)], limits=limits) as found:
        yield found


def _is_closed(connection: socket.socket, pieces: Iterator[bytes]) -> bool:
    """Whether the server closes a connection on which these come, one each 0.05 s, within 4 s."""
    end = time.monotonic() + 4
    connection.settimeout(0.05)
    try:
        while time.monotonic() < end:
            with suppress(TimeoutError):
                if connection.recv(4096) == b"":
                    return True
            connection.sendall(next(pieces, b""))
    except ConnectionError:
        return True
    return False


def _read_answers(connection: socket.socket, number: int) -> None:
    answers = b""
    while answers.count(b"}") < number:
        part = connection.recv(4096)
        assert part
        answers += part
    assert answers.count(b"HTTP/1.1 200") == number


@pytest.mark.parametrize(
    ("first", "pieces"),
    [
        (b"", []),
        (b"", [b"G"] * 1),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", [b"X-a: b\r\n"] * 200),
        (ASK, [b"GET /health HTTP/1.1\r\n"] + [b"X-a: b\r\n"] * 200),
        (ASK, []),
        (b"POST /nothing HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 999\r\n\r\n", [b"x"] * 200),
    ],
    ids=["silent", "a byte", "slow headers", "slow headers of a second request", "idle", "a slow body nobody reads"],
)
def test_a_connection_cannot_be_held(strict: Running, first: bytes, pieces: list[bytes]) -> None:
    with strict.connect() as connection:
        connection.sendall(first)
        assert _is_closed(connection, iter(pieces))


def test_one_connection_for_many_requests(strict: Running) -> None:
    with strict.connect() as connection:
        for _ in range(8):
            connection.sendall(ASK)
            _read_answers(connection, 1)
            time.sleep(0.1)
        connection.sendall(ASK * 5)  # and some at once
        _read_answers(connection, 5)


def test_too_many_connections(strict: Running) -> None:
    with ExitStack() as held:
        for _ in range(6):
            held.enter_context(strict.connect())
        time.sleep(0.1)
        answer = strict.exchange(b"")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in answer
        closing = ASK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        wait(lambda: strict.exchange(closing).startswith(b"HTTP/1.1 200"))


def test_a_client_that_does_not_read(strict: Running) -> None:
    SENT.clear()
    ENDED.clear()
    with strict.connect() as connection:
        connection.sendall(ASK.replace(b"/health", b"/endless"))
        wait(lambda: ENDED)
        assert sum(SENT) < 64 << 20
        read_all(connection)


def test_headers_that_are_too_long(server: Running) -> None:
    for line in (b"GET /" + b"x" * 300_000 + b" HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nX-a: " + b"x" * 300_000 + b"\r\n"):
        assert server.exchange(line + b"Host: localhost\r\n\r\n")[:12] in (b"HTTP/1.1 400", b"")
    assert server.client.get("/health").status_code == 200


def test_bytes_that_are_no_http(pocket: Any) -> None:
    rng = random.Random(0)
    whole = (
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 17\r\n"
        b'Connection: close\r\n\r\n{"prompt": "abc"}'
    )
    statuses = set()
    with served(*pocket, limits=Limits(header_s=0.3, body_s=0.3, idle_s=0.3)) as server:
        for _ in range(count(3, 100)):
            with ExitStack() as held:
                connections = [held.enter_context(server.connect()) for _ in range(80)]
                for connection in connections:
                    changed = bytearray(whole)
                    for _ in range(rng.randint(0, 6)):
                        at = rng.randrange(len(changed))
                        changed[at : at + rng.randint(0, 4)] = rng.randbytes(rng.randint(0, 4))
                    connection.sendall(changed)
                statuses |= {read_all(connection)[9:12] for connection in connections}
        assert {b"200", b"400", b"403", b"404", b"408"} <= statuses <= {b"200", b"400", b"403", b"404", b"405", b"408"}
        assert server.client.get("/health").json() == {"status": "ok", "waiting": 0, "running": 0}
        assert server.service.active == 0

"""Connections that are slow, idle, too many, or speak no HTTP; clients that go away or come when there is
no place.
"""

import asyncio
import json
import os
import random
import re
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import load_test
import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from support.counts import count
from support.interfaces import CHAT, COMPLETIONS, FOX, MESSAGES, RESPONSES, Interface
from support.server import Running, read_all, served, wait

from kvant.models import Decoder
from kvant.server import endpoint
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
    ids=[
        "silent",
        "a byte",
        "slow headers",
        "slow headers of a second request",
        "idle",
        "a slow body nobody reads",
    ],
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


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/health", "", 200),
        ("GET", "/v1/models", "", 200),
        ("POST", "/tokenize", '{"prompt": "Once upon a time"}', 200),
        ("POST", "/tokenize", "{", 400),
        ("GET", "/nothing", "", 404),
        ("POST", CHAT.path, json.dumps(CHAT.body(tokens=400, ignore_eos=True)), 499),
    ],
)
def test_a_client_that_closes_its_sending_side(
    server: Running, method: str, path: str, body: str, status: int
) -> None:
    """It gets its answer; a text would be generated for a client that may have gone, and it is told. It
    got nothing.
    """
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with server.connect() as connection:
        connection.sendall((head + body).encode())
        connection.shutdown(socket.SHUT_WR)
        answered = read_all(connection)
    assert answered.startswith(f"HTTP/1.1 {status} ".encode())
    found = json.loads(answered.partition(b"\r\n\r\n")[2])
    if status == 200:
        assert found == json.loads(server.client.request(method, path, content=body).content)
    elif status == 499:
        assert "closed its side" in found["error"]["message"]
    wait(lambda: is_free(server))


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
    for line in (
        b"GET /" + b"x" * 300_000 + b" HTTP/1.1\r\n",
        b"GET / HTTP/1.1\r\nX-a: " + b"x" * 300_000 + b"\r\n",
    ):
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
        assert (
            {b"200", b"400", b"403", b"404", b"408"}
            <= statuses
            <= {b"200", b"400", b"403", b"404", b"405", b"408"}
        )
        assert server.client.get("/health").json() == {
            "status": "ok",
            "waiting": 0,
            "running": 0,
            "loaded": ["pocket"],
        }
        assert server.registry.active == 0


Pocket = tuple[Decoder, Any]


@pytest.fixture(scope="module")
def narrow(pocket: Pocket) -> Iterator[Running]:
    """Two sequences and one place in the queue."""
    with served(*pocket, sequences=2, max_kv_size=2048, max_queue=1) as found:
        yield found


def is_free(server: Running) -> bool:
    counts = server.service.engine.counts
    busy = counts.waiting or counts.prefilling or counts.running
    return not busy and counts.free_pages == server.service.pool.num_pages


def ended(server: Running) -> dict[str, float]:
    """How many answers ended, by reason."""
    lines = re.findall(
        r'^kvant_answers_total{reason="(\w+)"} (.*)$', server.client.get("/metrics").text, re.M
    )
    return {reason: float(number) for reason, number in lines}


def send(server: Running, to: Interface = CHAT, asked: Any = FOX, **fields: Any) -> socket.socket:
    """A connection that has asked for a long answer and has read nothing."""
    body = json.dumps(to.body(asked, **{"tokens": 1900, "ignore_eos": True, **fields})).encode()
    connection = server.connect()
    head = f"POST {to.path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return connection


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("to", "fields"), [(CHAT, {}), (CHAT, {"n": 2}), (COMPLETIONS, {"asked": ["A", "B", "C"]})]
)
def test_a_client_that_goes_away(
    narrow: Running, to: Interface, fields: dict[str, Any], stream: bool
) -> None:
    wait(lambda: is_free(narrow))
    before = ended(narrow)
    for reads in (True, False):
        with send(narrow, to, stream=stream, **fields) as connection:
            wait(lambda: narrow.service.engine.counts.running > 0)
            if stream and reads:
                assert b"200 OK" in connection.recv(4096)
        wait(lambda: is_free(narrow))
    after = ended(narrow)
    assert after.pop("cancelled") > before.pop("cancelled", 0)
    assert after == before


def test_a_client_that_goes_away_while_it_waits(narrow: Running) -> None:
    with send(narrow, n=2, stream=True) as first:
        assert b"200 OK" in first.recv(4096)
        wait(lambda: narrow.service.engine.counts.running == 2)
        with send(narrow, stream=True):
            wait(lambda: narrow.service.engine.counts.waiting == 1)
            # The queue is full: another one is told so.
            refused = CHAT.post(narrow, stream=True)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        wait(lambda: narrow.service.engine.counts.waiting == 0)
    wait(lambda: is_free(narrow))


@pytest.mark.parametrize(
    ("to", "said"),
    [(CHAT, b"\n: the prompt"), (MESSAGES, b"\nevent: ping"), (RESPONSES, b"\nevent: response.in_progress")],
)
def test_a_stream_goes_on_before_its_prompt_is_read(
    narrow: Running, monkeypatch: pytest.MonkeyPatch, to: Interface, said: bytes
) -> None:
    """Its headers and first event come at once, and it says again and again that it goes on."""
    monkeypatch.setattr(endpoint, "PAUSE_S", 0.02)
    with send(narrow, n=2, stream=True) as first:
        assert b"200 OK" in first.recv(4096)
        wait(lambda: narrow.service.engine.counts.running == 2)
        with send(narrow, to, stream=True) as waiting:
            read = b""
            while read.count(said) < 5:
                more = waiting.recv(4096)
                assert more
                read += more
            assert read.startswith(b"HTTP/1.1 200 OK")
            assert narrow.service.engine.counts.waiting == 1
    wait(lambda: is_free(narrow))


def test_a_slow_reader_holds_nobody_up(narrow: Running) -> None:
    fields: dict[str, Any] = {"stream": True, "logprobs": True, "top_logprobs": 20, "tokens": 200}
    for listening in narrow.server.servers[0].sockets:  # what is accepted from it buffers little
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with send(narrow, **fields) as slow:
        wait(lambda: narrow.service.engine.counts.running > 0)
        CHAT.ask(narrow, tokens=5)
        # The engine is done with the slow one before anything of it is read.
        wait(lambda: is_free(narrow))
        time.sleep(0.1)
        assert narrow.registry.active == 1  # its answer is not sent
        read = b""
        while not read.endswith(b"0\r\n\r\n"):
            read += slow.recv(1 << 20)
    assert read.count(b'"finish_reason":"length"') == 1
    assert read.count(b'"top_logprobs"') == 200


def test_only_answers_that_are_allowed_and_every_page_is_free_afterwards(server: Running) -> None:
    figures = load_test.load(server.url, os.getpid(), count(1.5, 20.0), count(60, 200))
    assert load_test.judge(figures, health_ms=5000) == []
    for change in ({"statuses": {"200": 1, "400": 1, "429": 1, "500": 1}}, {"idle_afterwards": False}):
        (found,) = load_test.judge(figures | change, health_ms=5000)
        assert found.startswith(*change)
    assert figures["health_asked"] > 3
    assert set(figures["kinds"]) == set(load_test.KINDS)

"""Clients that go away, read slowly, or come when there is no place: what others get does not depend on them."""

import json
import os
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import load_test
import pytest
from support.counts import count
from support.interfaces import CHAT, COMPLETIONS, FOX, Interface
from support.server import Running, served, wait

from kvant.models import Decoder

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
    lines = re.findall(r'^kvant_answers_total{reason="(\w+)"} (.*)$', server.client.get("/metrics").text, re.M)
    return {reason: float(number) for reason, number in lines}


def send(server: Running, to: Interface = CHAT, asked: Any = FOX, **fields: Any) -> socket.socket:
    """A connection that has asked for a long answer and has read nothing."""
    body = json.dumps(to.body(asked, **{"tokens": 1900, "ignore_eos": True, **fields})).encode()
    connection = server.connect()
    head = f"POST {to.path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return connection


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("to", "fields"), [(CHAT, {}), (CHAT, {"n": 2}), (COMPLETIONS, {"asked": ["A", "B", "C"]})])
def test_a_client_that_goes_away(narrow: Running, to: Interface, fields: dict[str, Any], stream: bool) -> None:
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
        with send(narrow, stream=True):
            wait(lambda: narrow.service.engine.counts.waiting == 1)
            # The queue is full: another one is told so.
            refused = CHAT.post(narrow, stream=True)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        wait(lambda: narrow.service.engine.counts.waiting == 0)
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
        assert narrow.service.active == 1  # its answer is not sent
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

"""Clients that go away, read slowly, or come when there is no place: what others get does not depend on them."""

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.server import Running, running, start

from kvant.models import Decoder
from kvant.server.settings import Settings

Pocket = tuple[Decoder, Any]
PATH = "/v1/chat/completions"
SOON = 20  # seconds until which a test waits for what takes milliseconds


@pytest.fixture(scope="module")
def narrow(pocket: Pocket) -> Iterator[Running]:
    """Two sequences and one place in the queue."""
    settings = Settings(port=0, sequences=2, max_kv_size=2048, max_queue=1)
    with running(start(settings, *pocket)) as found:
        yield found


def wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def is_free(server: Running) -> bool:
    counts = server.service.engine.counts
    return not (counts.waiting or counts.prefilling or counts.running) and (
        counts.free_pages == server.service.pool.num_pages
    )


def ended(server: Running) -> dict[str, float]:
    """How many answers ended, by reason."""
    lines = re.findall(r'^kvant_answers_total{reason="(\w+)"} (.*)$', server.client.get("/metrics").text, re.M)
    return {reason: float(number) for reason, number in lines}


def send(server: Running, path: str = PATH, **fields: Any) -> socket.socket:
    """A connection that has asked for a long answer and has read nothing."""
    given: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me a story."}]} if path == PATH else {}
    body = json.dumps({"model": "pocket", "max_tokens": 1900, "ignore_eos": True} | given | fields).encode()
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=SOON)
    head = f"POST {path} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return connection


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (PATH, {"stream": True}),
        (PATH, {"stream": False}),
        (PATH, {"stream": True, "n": 2}),
        ("/v1/completions", {"stream": True, "prompt": ["A", "B", "C"]}),
        ("/v1/completions", {"stream": False, "prompt": ["A", "B", "C"]}),
    ],
)
def test_a_client_that_goes_away(narrow: Running, path: str, fields: dict[str, Any]) -> None:
    wait(lambda: is_free(narrow))
    before = ended(narrow)
    for reads in (True, False):
        with send(narrow, path, **fields) as connection:
            wait(lambda: narrow.service.engine.counts.running > 0)
            if fields["stream"] and reads:
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
            body = {"model": "pocket", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
            refused = narrow.client.post(PATH, json=body)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        wait(lambda: narrow.service.engine.counts.waiting == 0)
    wait(lambda: is_free(narrow))


def test_a_slow_reader_holds_nobody_up(narrow: Running) -> None:
    fields = {"stream": True, "logprobs": True, "top_logprobs": 20, "temperature": 0, "max_tokens": 200}
    for listening in narrow.server.servers[0].sockets:  # what is accepted from it buffers little
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with send(narrow, **fields) as slow:
        wait(lambda: narrow.service.engine.counts.running > 0)
        body = {"model": "pocket", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
        assert narrow.client.post(PATH, json=body).status_code == 200
        # The engine is done with the slow one before anything of it is read.
        wait(lambda: is_free(narrow))
        time.sleep(0.1)
        assert narrow.service.active == 1  # its answer is not sent
        read = b""
        while not read.endswith(b"0\r\n\r\n"):
            read += slow.recv(1 << 20)
    assert read.count(b'"finish_reason":"length"') == 1
    assert read.count(b'"top_logprobs"') == 200

"""A streaming server as an engine, against a local one that speaks the protocol: its text, and each
failure.
"""

import json
import os
import socket
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.completions import Reply

from kvant.errors import KvantError
from kvant.tools.bench.server_client import StreamingServer, check_url

USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
KEY = "sk-secret-0123456789"


def _chunk(text: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}


def _event(text: str) -> bytes:
    return f"data: {json.dumps(_chunk(text))}\n\n".encode()


def _fails(url: str, message: str, timeout_s: float = 5.0) -> str:
    """The error, which is one printable line that is not long."""
    with pytest.raises(KvantError, match=message) as caught:
        list(StreamingServer(url, timeout_s=timeout_s).pieces("Hi", 3))
    said = str(caught.value)
    assert said.startswith(f"{url}: ") or KEY in os.environ.get("OPENAI_API_KEY", "")
    assert said.isprintable()
    assert len(said) < 300
    assert KEY not in said
    return said


@pytest.mark.parametrize("chunked", [True, False])
def test_pieces_and_counts(served: tuple[str, Reply], chunked: bool) -> None:
    url, reply = served
    reply.chunked = chunked
    reply.say(_chunk(""), _chunk("One"), _chunk(" day"), _chunk(" é\n", "length"), USAGE)
    server = StreamingServer(f"{url}/v1/", model="fox")
    assert list(server.pieces("Tell", 3)) == ["One", " day", " é\n"]
    assert server.usage == USAGE["usage"]
    assert reply.path == "/v1/completions"
    assert reply.bodies == [
        {
            "prompt": "Tell", "max_tokens": 3, "temperature": 0, "stream": True, "model": "fox",
            "stream_options": {"include_usage": True}, "ignore_eos": True, "cache_prompt": False,
        }
    ]  # fmt: skip
    assert "Authorization" not in reply.headers
    reply.say(_chunk("a"))
    assert list(server.pieces("Tell", 3)) == ["a"]
    assert server.usage == {}


def test_pieces_come_when_they_are_sent(served: tuple[str, Reply]) -> None:
    """The server goes on only when a piece has arrived; the end is the event, not the connection's."""
    url, reply = served
    arrived = [threading.Event() for _ in "abc"]
    over = threading.Event()
    reply.parts = [part for pair in zip(map(_event, "abc"), arrived, strict=True) for part in pair]
    reply.parts += [b"data: [DONE]", over]
    reply.chunked = True
    for text, piece, event in zip("abc", StreamingServer(url).pieces("Hi", 3), arrived, strict=True):
        assert text == piece
        event.set()
    over.set()


@pytest.mark.parametrize("size", [1, 2, 7])
def test_text_however_it_is_cut(served: tuple[str, Reply], size: int) -> None:
    url, reply = served
    reply.say(_chunk("é"), _chunk(" b"), USAGE)
    whole = b": a comment\r\nid: 7\r\n" + b"".join(part for part in reply.parts if isinstance(part, bytes))
    whole = whole.replace(b"\n\n", b"\r\n\r\n")
    reply.parts = [whole[start:end] for start, end in pairwise([*range(0, len(whole), size), len(whole)])]
    assert list(StreamingServer(url).pieces("Hi", 3)) == ["é", " b"]


def test_the_key_is_sent_and_never_shown_and_goes_to_no_other_host(
    served: tuple[str, Reply], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, reply = served
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    reply.status, reply.content_type = 401, "application/json"
    reply.parts = [json.dumps({"error": {"message": f"Incorrect API key provided: {KEY}"}}).encode()]
    _fails(url, r"answered 401 Unauthorized .*Incorrect API key provided: \*\*\*")
    assert reply.headers["Authorization"] == f"Bearer {KEY}"
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.setblocking(False)
        for status in (301, 307):
            reply.status, reply.location = status, f"http://127.0.0.1:{other.getsockname()[1]}/v1/completions"
            _fails(url, f"answered {status} ")
        with pytest.raises(BlockingIOError):
            other.accept()
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\r\nX: y")
    _fails(url, "OPENAI_API_KEY has characters")


def test_the_environment_names_no_proxy_and_no_login(
    served: tuple[str, Reply], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url, reply = served
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password hunter2\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    reply.say(_chunk("a"))
    assert list(StreamingServer(url).pieces("Hi", 3)) == ["a"]
    assert "Authorization" not in reply.headers


def test_extras_a_server_refuses_are_left_out(served: tuple[str, Reply]) -> None:
    url, reply = served

    def choose(reply: Reply, body: dict[str, Any]) -> None:
        refused = next((name for name in ("cache_prompt", "ignore_eos") if name in body), None)
        if refused:
            reply.status, reply.content_type = 400, "application/json"
            reply.parts = [json.dumps({"error": {"message": f"Unrecognized argument: {refused}"}}).encode()]
        else:
            reply.status, reply.content_type = 200, "text/event-stream"
            reply.say(_chunk("a"))

    reply.before = choose
    server = StreamingServer(url)
    assert [list(server.pieces("Hi", 3)) for _ in range(2)] == [["a"], ["a"]]
    assert [len(body) for body in reply.bodies] == [7, 6, 5, 5]  # it is remembered


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (404, b'{"error": {"message": "model \\"x\\" not found"}}', "answered 404 Not Found .*not found"),
        (
            500,
            b"<h1>out of\n memory\x1b[31m</h1>" + b"x" * 10**6,
            r"answered 500 .*out of memory \[31m</h1>xxx",
        ),
        (503, b"", "answered 503 Service Unavailable"),
        (200, b'{"error": "streaming is off"}', "with application/json: .*streaming is off"),
    ],
)
def test_refusals(served: tuple[str, Reply], status: int, body: bytes, message: str) -> None:
    url, reply = served
    reply.status, reply.content_type, reply.parts = status, "application/json", [body]
    _fails(url, message)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([_event("a")], "cut off after 1 events"),
        ([b'data: {"choices": [{"te'], "cut off after 0 events"),
        ([b"data: {oops\n\n"], "not a completion: {oops"),
        ([b"data: [1]\n\n"], r"not a completion: \[1\]"),
        ([b'data: {"choices": "x"}\n\n'], "not a completion"),
        ([b"data: " + b"[" * 100_000 + b"\n\n"], r"not a completion: \[\[\["),
        ([b'data: {"error": {"message": "slot unavailable"}}\n\n'], "slot unavailable"),
        ([b'error: {"error": "no slot"}\n\n'], "no slot"),
        ([b"event: error\ndata: gone\n\n"], "gone"),
        ([b"data: [DONE]\n\n"], "without any text"),
        ([_event("a")] * 40, "sent 23 events for 3 tokens"),
        ([b"data: "] + [b"x" * 65536] * 100, "a line of more than"),
    ],
)
def test_streams_that_are_not_whole(served: tuple[str, Reply], parts: list[Any], message: str) -> None:
    url, reply = served
    reply.parts, reply.cut = parts, True
    for reply.chunked in (True, False):
        _fails(url, message)


@pytest.mark.parametrize("parts", [[60.0], [b": alive\n\n", 0.1] * 600], ids=["silence", "only comments"])
def test_waiting_ends(served: tuple[str, Reply], parts: list[Any]) -> None:
    url, reply = served
    reply.parts = parts
    _fails(url, "nothing came for 1 s", timeout_s=1.0)  # the server goes on for 60 s


def test_a_long_answer_is_waited_for_while_text_comes(served: tuple[str, Reply]) -> None:
    url, reply = served
    reply.parts = [*(part for text in "abcdefghijkl" for part in (0.2, _event(text))), b"data: [DONE]\n\n"]
    assert "".join(StreamingServer(url, timeout_s=2.0).pieces("Hi", 12)) == "abcdefghijkl"


def test_servers_that_are_not_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    _fails(f"http://127.0.0.1:{port}", "the connection failed: .*Connection refused")
    _fails(f"http://a{'b' * 70}.invalid", "the connection failed")


@pytest.mark.parametrize(
    "url",
    [
        "", "127.0.0.1:8080", "ftp://host", "http://", "http://host:port", "http://host:99999", "http://host/?key=1",
        "http://host/#x", "http://ho st", "http://host\n", "http://[::1", "http://hést", "http://me:hunter2@host:x y",
    ],
)  # fmt: skip
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match="server URL") as caught:
        check_url(url)
    assert "\n" not in str(caught.value)
    assert "hunter2" not in str(caught.value)

"""A streaming server as an engine, against a local one that speaks the protocol: known delays, and each failure."""

import json
import socket
import threading
import time
from contextlib import closing
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from support.completions import Reply

from kvant.errors import KvantError
from kvant.tools.bench.event_stream import MAX_EVENT_BYTES, events
from kvant.tools.bench.streaming import StreamingServer, Usage

USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
KEY = "sk-secret-0123456789"


def _chunk(text: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}


def _fails(url: str, message: str, timeout_s: float = 5.0, max_tokens: int = 3) -> str:
    server = StreamingServer(url, timeout_s=timeout_s)
    with pytest.raises(KvantError, match=message) as caught:
        list(server.pieces("Hi", max_tokens))
    assert str(caught.value).startswith(f"{url}: ")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300
    with pytest.raises(ValueError, match="no completion"):
        _ = server.usage
    return str(caught.value)


@pytest.mark.parametrize("chunked", [True, False])
def test_pieces_and_counts(served: tuple[str, Reply], chunked: bool) -> None:
    url, reply = served
    reply.chunked = chunked
    reply.say(_chunk(""), _chunk("One"), _chunk(" day"), _chunk(" é\n", "length"), USAGE)
    server = StreamingServer(url, model="fox")
    assert list(server.pieces("Tell", 3)) == ["One", " day", " é\n"]
    assert server.usage == Usage(7, 3)
    assert reply.path == "/v1/completions"
    assert reply.bodies == [
        {
            "prompt": "Tell", "max_tokens": 3, "temperature": 0, "stream": True, "model": "fox",
            "stream_options": {"include_usage": True}, "ignore_eos": True, "cache_prompt": False,
        }
    ]  # fmt: skip
    assert "Authorization" not in reply.headers


def test_pieces_come_when_they_are_sent(served: tuple[str, Reply]) -> None:
    """The server goes on only when a piece has arrived; the end is the event, not the connection's."""
    url, reply = served
    arrived = [threading.Event() for _ in "abc"]
    over = threading.Event()
    for text, event in zip("abc", arrived, strict=True):
        reply.parts += [f"data: {json.dumps(_chunk(text))}\n\n".encode(), event]
    reply.parts += [b"data: [DONE]\n\n", over]
    reply.chunked = True
    started = time.monotonic()
    for text, piece, event in zip("abc", StreamingServer(url).pieces("Hi", 3), arrived, strict=True):
        assert text == piece
        event.set()
    over.set()
    assert time.monotonic() - started < 30  # the server waits 60 s for each


def test_breaking_off(served: tuple[str, Reply]) -> None:
    url, reply = served
    reply.parts = [f"data: {json.dumps(_chunk('a'))}\n\n".encode(), 30.0]
    server = StreamingServer(url)
    with closing(server.pieces("Hi", 3)) as pieces:
        assert next(pieces) == "a"
    with pytest.raises(ValueError, match="no completion has come to its end"):
        _ = server.usage


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([_chunk("a"), _chunk("b")], Usage(None, None)),
        ([_chunk("a b c"), USAGE], Usage(7, 3)),
        ([_chunk("a"), _chunk("b"), _chunk("", "stop"), USAGE], Usage(7, 3)),
        ([_chunk("a"), {"choices": [], "usage": {"completion_tokens": True, "prompt_tokens": -1}}], Usage(None, None)),
        ([_chunk("a"), {"choices": [], "usage": None}], Usage(None, None)),
    ],
)
def test_what_the_server_counts(served: tuple[str, Reply], said: list[Any], expected: Usage) -> None:
    url, reply = served
    reply.say(*said)
    server = StreamingServer(f"{url}/v1/")
    list(server.pieces("Hi", 3))
    assert reply.path == "/v1/completions"
    assert server.usage == expected


def test_the_key_is_sent_and_never_shown(served: tuple[str, Reply], monkeypatch: pytest.MonkeyPatch) -> None:
    url, reply = served
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    reply.status, reply.content_type = 401, "application/json"
    reply.parts = [json.dumps({"error": {"message": f"Incorrect API key provided: {KEY}"}}).encode()]
    text = _fails(url, r"answered 401 Unauthorized: Incorrect API key provided: \*\*\*$")
    assert KEY not in text
    assert reply.headers["Authorization"] == f"Bearer {KEY}"
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\r\nX: y")
    with pytest.raises(KvantError, match="OPENAI_API_KEY has characters") as caught:
        list(StreamingServer(url).pieces("Hi", 3))
    assert KEY not in str(caught.value)


def test_the_key_goes_to_no_other_host(served: tuple[str, Reply], monkeypatch: pytest.MonkeyPatch) -> None:
    url, reply = served
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.setblocking(False)
        for status in (301, 302, 303, 307, 308):
            reply.status, reply.location = status, f"http://127.0.0.1:{other.getsockname()[1]}/v1/completions"
            assert KEY not in _fails(url, f"answered {status} ")
        with pytest.raises(BlockingIOError):
            other.accept()


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
    assert list(server.pieces("Hi", 3)) == ["a"]
    assert [len(body) for body in reply.bodies] == [7, 6, 5]
    assert list(server.pieces("Hi", 3)) == ["a"]
    assert len(reply.bodies) == 4  # it is remembered


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (404, b'{"error": {"message": "model \\"x\\" not found"}}', 'answered 404 Not Found: model "x" not found$'),
        (500, b"<h1>out of\n memory\x1b[31m</h1>" + b"x" * 10**6, r"answered 500 .*: <h1>out of memory \[31m</h1>xxx"),
        (422, b'{"detail": "no prompt"}', "answered 422 .*: no prompt$"),
        (400, b'{"error": true}', r"answered 400 Bad Request: {\"error\": true}$"),
        (503, b"", "answered 503 Service Unavailable$"),
        (301, b"", "answered 301 Moved Permanently$"),
    ],
)
def test_refusals(served: tuple[str, Reply], status: int, body: bytes, message: str) -> None:
    url, reply = served
    reply.status, reply.content_type, reply.parts = status, "application/json", [body]
    _fails(url, message)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([b'data: {"choices": [{"text": "a"}]}\n\n'], r"cut off after 1 events, before \[DONE\]"),
        ([b'data: {"choices": [{"te'], r"cut off after 0 events"),
        ([b""], r"cut off after 0 events"),
        ([b"data: {oops\n\n"], "not a JSON object: {oops"),
        ([b"data: [1]\n\n"], r"not a JSON object: \[1\]"),
        ([b"data: " + b"[" * 100_000 + b"\n\n"], r"not a JSON object: \[\[\["),
        ([b'data: {"error": {"message": "slot\\nunavailable"}}\n\n'], "reported an error: slot unavailable$"),
        ([b'error: {"message": "no slot"}\n\n'], "reported an error: no slot$"),
        ([b"event: error\ndata: gone\n\n"], "reported an error: gone$"),
        ([b"data: [DONE]\n\n"], "ended the stream without any text"),
        ([b'data: {"choices": [{"text": 5}, 3]}\n\ndata: {"choices": "x"}\n\ndata: [DONE]\n\n'], "without any text"),
        ([b'data: {"choices": [{"text": "a"}]}\n\n'] * 40, "sent 23 events for 3 tokens, and did not end"),
    ],
)
@pytest.mark.parametrize("chunked", [True, False])
def test_streams_that_are_not_whole(
    served: tuple[str, Reply], chunked: bool, parts: list[bytes | float | threading.Event], message: str
) -> None:
    url, reply = served
    reply.parts, reply.chunked, reply.cut = [part for part in parts if part], chunked, True
    _fails(url, message)


def test_a_line_that_never_ends(served: tuple[str, Reply]) -> None:
    url, reply = served
    reply.parts = [b"data: "] + [b"x" * 65536] * 100
    with pytest.raises(KvantError, match="a line of more than 1048576 bytes"):
        list(StreamingServer(url, timeout_s=5).pieces("Hi", 3))


def test_an_answer_that_is_no_stream(served: tuple[str, Reply]) -> None:
    url, reply = served
    reply.content_type, reply.parts = "application/json", [b'{"error": "streaming is off"}']
    _fails(url, "answered with application/json, not a stream of events: streaming is off")


@pytest.mark.parametrize("parts", [[60.0], [b": alive\n\n", 0.1] * 600], ids=["silence", "only comments"])
def test_waiting_ends(served: tuple[str, Reply], parts: list[bytes | float | threading.Event]) -> None:
    url, reply = served
    reply.parts = parts
    started = time.monotonic()
    _fails(url, r"nothing came for 0.3 s", timeout_s=0.3)
    assert time.monotonic() - started < 30  # the server goes on for 60 s


def test_a_long_answer_is_waited_for_while_text_comes(served: tuple[str, Reply]) -> None:
    """2 s in all, 0.25 s for each piece."""
    url, reply = served
    reply.parts = [part for text in "abcdefgh" for part in (0.25, f"data: {json.dumps(_chunk(text))}\n\n".encode())]
    reply.parts.append(b"data: [DONE]\n\n")
    assert "".join(StreamingServer(url, timeout_s=1.5).pieces("Hi", 8)) == "abcdefgh"


def test_servers_that_are_not_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    _fails(f"http://127.0.0.1:{port}", "the connection failed: .*Connection refused")
    _fails(f"http://a{'b' * 70}.invalid", "no such host|the connection failed")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"

        def greet() -> None:
            client, _ = listening.accept()
            with client:
                while not client.recv(65536).endswith(b"}"):  # all of it: a close before would reset the connection
                    pass
                client.sendall(b"220 mail.example ESMTP\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        _fails(url, "not a whole HTTP answer: ")
        thread.join()


@pytest.mark.parametrize(
    "url",
    [
        "", "127.0.0.1:8080", "ftp://host", "http://", "http://host:port", "http://host:99999", "http://host/?key=1",
        "http://host/#x", "http://ho st", "http://host\n", "http://[::1", "http://hést", "file:///etc/passwd",
    ],
)  # fmt: skip
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match="expected http:// or https:// and a host") as caught:
        StreamingServer(url)
    assert "\n" not in str(caught.value)


def test_a_password_in_a_url_is_not_shown() -> None:
    with pytest.raises(ValueError, match="not supported") as caught:
        StreamingServer("http://me:hunter2@host:x y")
    assert "hunter2" not in str(caught.value)


STREAM = (
    b"\xef\xbb\xbf: a comment\r\nid: 7\r\nretry: 10\r\ndata: one\r\ndata:two\r\ndata\r\n\r\n"
    b"event: note\ndata: \xc3\xa9\xff\n\n\n\nevent: empty\n\ndata:  three\r\rdata: [DONE]"
)
EVENTS = [("message", "one\ntwo\n"), ("note", "é\ufffd"), ("message", " three"), ("message", "[DONE]")]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_however_they_are_cut(size: int) -> None:
    assert list(events(STREAM[i : i + size] for i in range(0, len(STREAM), size))) == EVENTS


def test_an_event_of_many_lines_is_bounded() -> None:
    with pytest.raises(KvantError, match="an event of more than"):
        list(events(repeat(b"data: " + b"x" * (MAX_EVENT_BYTES // 8) + b"\n")))

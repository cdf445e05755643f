"""A server of completions on loopback: it answers what it is told to."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


class Reply:
    """What the server sends, and what it was asked."""

    def __init__(self) -> None:
        self.status = 200
        self.content_type = "text/event-stream; charset=utf-8"
        # bytes to send, seconds or an event to wait for
        self.parts: list[bytes | float | threading.Event] = []
        self.location = ""  # where a redirect leads
        self.chunked = False
        self.cut = False  # the last chunk, which ends a chunked body, is left out
        self.before: Callable[[Reply, dict[str, Any]], None] = lambda reply, body: None
        self.bodies: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.path = ""

    def say(self, *objects: object, end: str = "data: [DONE]\n\n") -> None:
        self.parts = [*(f"data: {json.dumps(o)}\n\n".encode() for o in objects), end.encode()]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    reply: Reply

    def do_POST(self) -> None:
        reply = self.reply
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reply.bodies.append(body)
        reply.headers, reply.path = dict(self.headers), self.path
        reply.before(reply, body)
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.content_type)
        if reply.location:
            self.send_header("Location", reply.location)
        self.send_header(*(("Transfer-Encoding", "chunked") if reply.chunked else ("Connection", "close")))
        self.end_headers()
        try:
            for part in reply.parts:
                if isinstance(part, float):
                    time.sleep(part)
                elif isinstance(part, threading.Event):
                    part.wait(60)
                elif reply.chunked:
                    self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                else:
                    self.wfile.write(part)
            if reply.chunked and not reply.cut:
                self.wfile.write(b"0\r\n\r\n")
        except OSError:
            pass  # the client has gone
        self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Reply]]:
    """A server's URL, and the reply it will give."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    reply = Reply()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"reply": reply}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", reply
    server.shutdown()
    thread.join()
    server.server_close()

"""A server in this process: uvicorn in a thread, as ``kvant serve`` runs it, on a free port of loopback."""

import asyncio
import json
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from starlette.routing import BaseRoute

import kvant
from kvant.server.app import make_app
from kvant.server.errors import ApiError
from kvant.server.generation import Begun, Event, Text
from kvant.server.metrics import Metrics
from kvant.server.registry import Registry
from kvant.server.run import Server, bind, url_of
from kvant.server.served_model import ServedModel, served_model
from kvant.server.service import Service, make_pool
from kvant.server.settings import Settings
from support.command import COMMAND

SOON = 60  # seconds until which a test waits for what should be immediate


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers, and a client of it."""

    url: str
    client: httpx2.Client
    registry: Registry
    server: Server
    thread: threading.Thread

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The server's event loop."""
        return self.server.loop

    @property
    def service(self) -> Service:
        """The first model's."""
        service = self.registry.models[0].service
        assert service is not None
        return service

    def connect(self) -> socket.socket:
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        return socket.create_connection((host, int(port)), timeout=SOON)

    def exchange(self, sent: bytes) -> bytes:
        """What comes back for these bytes, until the server closes the connection."""
        with self.connect() as connection:
            connection.sendall(sent)
            return read_all(connection)


def wait(condition: Callable[[], object]) -> None:
    """Wait until something is so, which takes milliseconds."""
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def read_all(connection: socket.socket) -> bytes:
    """What comes until the other end closes."""
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def offered(settings: Settings, model: Any = None, tokenizer: Any = None, **options: Any) -> ServedModel:
    """Return a model that is loaded on a pool of its own when it is needed; default: the settings' model."""

    def load(metrics: Metrics) -> Service:
        loaded = kvant.load(settings.model) if model is None else (model, tokenizer)
        pool = options.get("pool") or make_pool(settings, loaded[0])
        return Service(settings, *loaded, pool, metrics, options.get("planned"), options.get("drafts"))

    return served_model(settings, load, options.get("planned"))


def start(settings: Settings, model: Any = None, tokenizer: Any = None, **options: Any) -> Registry:
    """Return the registry of one model, which is loaded."""
    registry = Registry(settings, [offered(settings, model, tokenizer, **options)])
    registry.load_now(registry.models[0])
    return registry


@contextmanager
def running(registry: Registry, routes: Sequence[BaseRoute] = ()) -> Iterator[Running]:
    """Serve, with further routes, and end both the server and its models."""
    said = threading.Event()
    app = make_app(registry)
    app.router.routes.extend(routes)
    with bind(registry.settings) as bound:
        bound.listen(1024)
        server = Server(app, registry, lambda line: said.set())
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, name="server")
        thread.start()
        try:
            assert said.wait(SOON)
            url = url_of(bound)
            with httpx2.Client(base_url=url, trust_env=False, timeout=60) as client:
                yield Running(url, client, registry, server, thread)
        finally:
            server.should_exit = server.force_exit = True
            thread.join(SOON)
            assert not thread.is_alive()
            registry.close()


def served(
    *loaded: Any, routes: Sequence[BaseRoute] = (), **settings: Any
) -> AbstractContextManager[Running]:
    """Serve a model, with further routes; unless settings say otherwise, one sequence of 128 tokens."""
    return running(
        start(Settings(**{"port": 0, "sequences": 1, "max_kv_size": 128} | settings), *loaded), routes
    )


# a process, a client of it, its lines on standard error as they come
Started = tuple[Any, httpx2.Client, list[str]]


@contextmanager
def started(folder: Path, *arguments: str, command: Sequence[str] = ()) -> Iterator[Started]:
    """``kvant serve`` as a process in a folder."""
    places = {
        name: str(folder) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
    }
    command = command or [
        *COMMAND,
        "serve",
        "--port",
        "0",
        "--sequences",
        "2",
        "--max-kv-size",
        "512",
        *arguments,
    ]
    pipes: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    environ = os.environ | {"HF_HUB_OFFLINE": "1"} | places
    with subprocess.Popen(command, cwd=folder, env=environ, text=True, **pipes) as process:
        lines: list[str] = []
        try:
            for line in process.stderr or ():
                lines.append(line)
                if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                    break
            else:
                raise AssertionError("".join(lines))
            reading = threading.Thread(target=lambda: lines.extend(process.stderr or ()))
            reading.start()
            with httpx2.Client(base_url=found[0], trust_env=False, timeout=SOON) as client:
                yield process, client, lines
            process.kill()
            reading.join(SOON)
        finally:
            process.kill()


def sse_events(server: Running, path: str, body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each of which is named as its data's type says."""
    with server.client.stream("POST", path, json={**body, "stream": True}) as answered:
        assert answered.headers["content-type"].startswith("text/event-stream"), answered.read()
        parts = "".join(answered.iter_text()).removesuffix("\n\n").split("\n\n")
    if path.endswith("completions") and not parts[-1].startswith('data: {"error"'):
        assert parts.pop() == "data: [DONE]"
    events = []
    for part in parts:
        *name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == ([f"event: {events[-1]['type']}"] if "type" in events[-1] else [])
    return events


async def failing(*_: object) -> AsyncGenerator[Event, None]:
    """In place of :func:`kvant.server.answering.answer`: the engine fails after a word."""
    yield Begun(3)
    yield Text(0, "Once")
    raise ApiError("the engine failed", status=503)

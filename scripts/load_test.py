"""kvant serve under ten times the requests that it takes at once: what it answers, how fast it says that it
is well.

Run: python scripts/load_test.py [--seconds 60] [--clients 200] [--health-ms 100]

Starts ``kvant serve`` on the embedded model with 4 sequences and 16 places to wait. Each client asks again
and again: for whole answers and streams, some of which it leaves, reads slowly or asks for wrongly. Checked
are:

- every answer is a 200, 400, 429 with Retry-After, or 503; every stream that is read comes to its end;
- /health, asked by a process of its own, answers within the time given, always;
- the process's memory after a quarter of the time and at the end;
- at the end nothing runs, nothing waits and every page is free;
- SIGTERM: streams under way come to their ends, further requests get 503 or no connection, and the exit code
  is 0;
- SIGKILL: a server started again at the same port answers.

Prints a line for each finding and the figures as JSON last; exit code 1 if one is wrong.
"""

import argparse
import asyncio
import http.client
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from urllib.parse import urlsplit

SEQUENCES, WAITING = 4, 16
SERVE = [
    "-m",
    "kvant",
    "serve",
    "--sequences",
    str(SEQUENCES),
    "--max-queue",
    str(WAITING),
    "--max-kv-size",
    "512",
]
KINDS = ("whole", "stream", "leave", "vanish", "slow", "wrong")
WEIGHTS = (4, 6, 3, 2, 1, 1)
LONG_STREAM = {"model": "pocket", "prompt": "Once", "ignore_eos": True, "stream": True}
ALLOWED = {200, 400, 429, 503}
WATCH_S = 0.05  # between two questions for the health
MOST_GROWTH = 64 << 20  # bytes of the process after the first quarter


@dataclass
class Found:
    """What clients saw."""

    statuses: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def main() -> None:
    """Everything, in order."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=10 * (SEQUENCES + WAITING))
    parser.add_argument("--health-ms", type=float, default=100.0)
    # the process that asks for the health
    parser.add_argument("--watch", metavar="URL", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.watch:
        watch(given.watch)
        return
    with serving() as (process, url):
        os.nice(10)  # clients elsewhere take no processor from the server
        figures = load(url, process.pid, given.seconds, given.clients)
        figures |= asyncio.run(end(process, url))
    figures["after_a_kill"] = killed()
    figures |= {
        "load": [round(each, 1) for each in os.getloadavg()],
        "cores": os.cpu_count(),
        "clients": given.clients,
    }
    problems = judge(figures, given.health_ms)
    for problem in problems:
        print(f"FAILED {problem}", file=sys.stderr)
    print(json.dumps(figures, indent=1))
    sys.exit(1 if problems else 0)


def load(url: str, pid: int, seconds: float, clients: int) -> dict[str, Any]:
    """Ask a running server for so long; the figures."""
    command = [sys.executable, __file__, "--watch", url]
    if os.geteuid() == 0:  # its own wait for a processor is not the server's
        command = ["nice", "-n", "-15", *command]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
        found, memory = asyncio.run(_clients(url, pid, seconds, clients))
        said, _ = watcher.communicate()
    times = sorted(json.loads(said))
    deadline = time.monotonic() + 60
    while (state := _state(url)) != (0, 0, True) and time.monotonic() < deadline:
        time.sleep(0.02)
    return {
        "statuses": {str(status): number for status, number in sorted(found.statuses.items())},
        "kinds": dict(found.kinds),
        "wrong": found.wrong[:10],
        "health_asked": len(times),
        "health_ms": {"p50": times[len(times) // 2], "p99": times[len(times) * 99 // 100], "p100": times[-1]},
        "memory_bytes": memory,
        "idle_afterwards": state == (0, 0, True),
    }


def judge(figures: dict[str, Any], health_ms: float) -> list[str]:
    """What is not as it should be."""
    problems = [f"a client: {text}" for text in figures["wrong"]]
    statuses = set(map(int, figures["statuses"]))
    if statuses - ALLOWED:
        problems.append(f"statuses {sorted(statuses - ALLOWED)}; expected none but {sorted(ALLOWED)}")
    if missing := {200, 400, 429} - statuses:
        problems.append(f"no {sorted(missing)}: there was no such load")
    if (slowest := figures["health_ms"]["p100"]) > health_ms:
        problems.append(f"/health once took {slowest} ms; expected at most {health_ms:g}")
    early, late = figures["memory_bytes"]
    if late - early > MOST_GROWTH:
        problems.append(f"the process grew from {early} to {late} bytes")
    problems += [f"{name} is false" for name, value in figures.items() if value is False]
    return problems


async def _clients(url: str, pid: int, seconds: float, clients: int) -> tuple[Found, list[int]]:
    found, number, until = Found(), count(), time.monotonic() + seconds

    async def one(source: random.Random) -> None:
        while time.monotonic() < until:
            [kind] = source.choices(KINDS, WEIGHTS)
            try:
                wait = await asyncio.wait_for(ask(url, kind, next(number), source, found), 120)
            except (TimeoutError, OSError, asyncio.IncompleteReadError, ValueError) as error:
                found.wrong.append(f"{kind}: {type(error).__name__} {error}")
                wait = 0.0
            await asyncio.sleep(min(wait, 1.0) * source.random())

    async def sizes() -> list[int]:
        taken = []
        for part in (seconds / 4, seconds * 3 / 4):
            await asyncio.sleep(part)
            taken.append(_resident(pid))
        return taken

    memory, *_ = await asyncio.gather(sizes(), *(one(random.Random(i)) for i in range(clients)))
    return found, memory


async def ask(url: str, kind: str, number: int, source: random.Random, found: Found) -> float:
    """One request of a kind. Returns the seconds that the server asks to wait."""
    words = source.choices(
        ("fox", "bear", "river", "moon", "happy", "little", "wood"), k=source.randrange(3, 200)
    )
    body = {
        "model": "pocket",
        "prompt": f"{number} {' '.join(words)}",
        "max_tokens": source.randrange(1, 100),
    }
    body |= {"stream": kind != "whole", "temperature": source.choice((0, 1)), "n": source.choice((1, 1, 2))}
    body |= {"temperature": 9} if kind == "wrong" else {}
    reader, writer = await _send(url, body)
    try:
        if kind == "vanish":
            await asyncio.sleep(0.2 * source.random())
            found.kinds[kind] += 1
            return 0.0
        status, headers = await _head(reader)
        found.statuses[status] += 1
        found.kinds[kind] += 1
        if status != 200:
            if status == 429 and not re.search(r"^retry-after: [1-9]", headers, re.IGNORECASE | re.MULTILINE):
                found.wrong.append(f"429 without Retry-After: {headers}")
            return 1.0
        if kind == "leave":
            await reader.read(source.randrange(1, 2000))
            return 0.0
        if kind == "slow":
            for _ in range(10):
                if not await reader.read(64):
                    break
                await asyncio.sleep(0.1)
        text = await reader.read(-1)
        if kind == "stream" and b"data: [DONE]" not in text:
            found.wrong.append(f"a stream without its end: {text[-200:]!r}")
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    return 0.0


async def _send(url: str, body: dict[str, object]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts, text = urlsplit(url), json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\nContent-Length: {len(text)}"
    writer.write(f"{head}\r\n\r\n".encode() + text)
    return reader, writer


async def _head(reader: asyncio.StreamReader) -> tuple[int, str]:
    text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    return int(text.split(" ", 2)[1]), text


async def end(process: "subprocess.Popen[str]", url: str) -> dict[str, Any]:
    """SIGTERM while streams are under way."""
    body = LONG_STREAM | {"max_tokens": 200}
    streams = [await _send(url, body) for _ in range(SEQUENCES)]
    heads = [await _head(reader) for reader, _ in streams]
    process.terminate()
    await asyncio.sleep(0.1)
    try:
        reader, writer = await _send(url, body)
        status, _ = await _head(reader)
        writer.close()
    except (OSError, asyncio.IncompleteReadError):
        status = 0  # no connection
    texts = await asyncio.wait_for(asyncio.gather(*(reader.read(-1) for reader, _ in streams)), 60)
    for _, writer in streams:
        writer.close()
    code = await asyncio.to_thread(process.wait, 60)
    return {
        "streams_ended_after_sigterm": all(
            h[0] == 200 and b"data: [DONE]" in t for h, t in zip(heads, texts, strict=True)
        ),
        "refused_after_sigterm": status in (0, 503),
        "exit_code_0": code == 0,
    }


def killed() -> bool:
    """Whether a server that is killed under work can be started again at its port, and answers."""
    with serving() as (process, url):
        connection = http.client.HTTPConnection(urlsplit(url).netloc)
        connection.request("POST", "/v1/completions", json.dumps(LONG_STREAM | {"max_tokens": 400}))
        connection.getresponse().read(10)
        process.send_signal(signal.SIGKILL)
        process.wait()
        connection.close()
    with serving("--port", str(urlsplit(url).port)) as (_, again):
        return again == url and _state(again) == (0, 0, True)


@contextmanager
def serving(*arguments: str) -> "Iterator[tuple[subprocess.Popen[str], str]]":
    """A server and its URL; it is killed at the end, if it has not ended."""
    port = () if "--port" in arguments else ("--port", "0")
    command = [sys.executable, *SERVE, *port, *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if found := re.search(r"http://\S+", line):
                    # A pipe that nobody reads would fill with a line for each request, and stop the server.
                    threading.Thread(target=process.stderr.read, daemon=True).start()
                    yield process, found[0]
                    return
            sys.exit("kvant serve did not start")
        finally:
            process.kill()


def watch(url: str) -> None:
    """Ask for the health until the standard input ends, and print the milliseconds of each."""
    times, ended = [], False
    while not ended:
        started = time.perf_counter()
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        connection.request("GET", "/health")
        status = connection.getresponse().status
        times.append(round((time.perf_counter() - started) * 1e3, 1) if status == 200 else 1e6)
        connection.close()
        ended = bool(select.select([sys.stdin], [], [], WATCH_S)[0])
    print(json.dumps(times))


def _state(url: str) -> tuple[int, int, bool]:
    """Requests that run and that wait, and whether every page is free."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request("GET", "/health")
    health = json.loads(connection.getresponse().read())
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    figures = dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")
    return health["running"], health["waiting"], figures["kvant_pages"] == figures["kvant_pages_free"]


def _resident(pid: int) -> int:
    """Bytes of a process's memory."""
    kilobytes = subprocess.run(
        ["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True
    ).stdout
    return int(kilobytes) * 1024


if __name__ == "__main__":
    main()

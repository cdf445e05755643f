"""Bodies that are too long, too deep, too slow, or once froze the server."""

import asyncio
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from copy import copy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from support.interfaces import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from support.server import SOON, Running, read_all, served, started, wait

from kvant.server import endpoint
from kvant.server.body import MAX_DEPTH, Fields, decode
from kvant.server.errors import ApiError
from kvant.server.run import READ_BYTES, Connection
from kvant.server.security import MAX_VALUES, Bodies, count_values
from kvant.server.settings import Limits
from kvant.text.process import TextProcess
from kvant.text.tool_forms import tool_format

LONG = 100_000  # bytes of a body, in these tests
HEAD = "POST /length HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"


async def length(request: Request) -> Response:
    return JSONResponse({"bytes": len(await request.body())})


@pytest.fixture(scope="module")
def short(pocket: Any) -> Iterator[Running]:
    limits = Limits(body_bytes=LONG, all_bodies_bytes=2 * LONG + LONG // 2, body_s=0.4)
    with served(*pocket, routes=[Route("/length", length, methods=["POST"])], limits=limits) as found:
        yield found


def _status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def _chunked(parts: list[bytes]) -> bytes:
    body = b"".join(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in parts)
    return f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode() + body + b"0\r\n\r\n"


def test_a_body_up_to_the_limit(short: Running) -> None:
    assert Limits().body_bytes == 8 << 20
    for more, status in ((0, 200), (1, 413), (LONG, 413)):
        body = b"x" * (LONG + more)
        answers = [
            short.client.post("/length", content=body),
            short.client.post("/length", content=iter([body, b"y"])),
        ]
        assert [answer.status_code for answer in answers] == [status, 413]  # the second has no Content-Length
    assert answers[0].json()["error"]["code"] == "request_too_large"
    assert short.client.post("/v1/messages", content=body).json()["error"]["type"] == "request_too_large"


def test_lengths_that_lie(short: Running) -> None:
    answer = short.exchange(f"{HEAD}Content-Length: 3\r\n\r\n".encode() + b"x" * 5000)
    assert _status(answer) == 200
    assert answer.count(b"HTTP/1.1 200") == 1
    assert _status(short.exchange(f"{HEAD}Content-Length: 50\r\n\r\nshort".encode())) == 408
    both = "Content-Length: 44\r\nTransfer-Encoding: chunked"  # each would end it elsewhere
    lies = (
        "Content-Length: -1",
        "Content-Length: 1e9",
        "Content-Length: 3\r\nContent-Length: 4",
        f"{9:0>9999}",
        both,
    )
    for lie in lies:
        answer = short.exchange(
            f"{HEAD}{lie}\r\n\r\n0\r\n\r\nGET /props HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        )
        assert _status(answer) == 400
        assert answer.count(b"HTTP/1.1 ") == 1
    huge = f"{HEAD}Expect: 100-continue\r\nContent-Length: {10**15}\r\n\r\n"
    began = time.monotonic()
    assert _status(short.exchange(huge.encode())) == 413  # nothing of it is waited for
    assert time.monotonic() - began < 10
    assert _status(short.exchange(_chunked([b"x" * 900] * 200))) == 413
    assert _status(short.exchange(_chunked([b"x"] * 5000))) == 200


def test_a_slow_body(short: Running) -> None:
    with short.connect() as connection:
        connection.sendall(f"{HEAD}Content-Length: 1000\r\n\r\n".encode())
        connection.settimeout(0.05)
        for _ in range(200):
            connection.sendall(b"x")
            with suppress(TimeoutError):
                assert _status(connection.recv(4096)) == 408
                break
        else:
            raise AssertionError("it is still waited for")


def test_many_bodies_together(short: Running) -> None:
    head = f"{HEAD}Content-Length: {LONG}\r\n\r\n".encode()
    with ExitStack() as held:
        slow = [held.enter_context(short.connect()) for _ in range(2)]
        for connection in slow:
            connection.sendall(head + b"x" * (LONG - 1))
        time.sleep(0.05)
        assert short.client.post("/length", content=b"x" * (LONG // 4)).status_code == 200
        refused = short.client.post("/length", content=b"x" * LONG)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        for connection in slow:
            connection.sendall(b"x")
            assert _status(read_all(connection)) == 200
    for _ in range(3):
        assert short.client.post("/length", content=b"x" * LONG).status_code == 200


def test_bodies_that_do_not_move_give_way() -> None:
    """Four of them once shut out every other request for a minute."""
    limits = Limits(body_bytes=LONG, all_bodies_bytes=4 * LONG - 10, slow_s=0.2)
    service: Any = SimpleNamespace(settings=SimpleNamespace(limits=limits), draining=False, active=0)
    bodies = Bodies(JSONResponse({}), service)

    async def status(coming: "asyncio.Queue[Any]") -> int:
        said: list[Any] = []

        async def send(message: Any) -> None:
            said.append(message)

        scope: Any = {"type": "http", "method": "POST", "path": "/", "headers": [], "state": {}}
        await bodies(scope, coming.get, send)
        return int(said[0]["status"])

    def part(length: int, *, more: bool) -> dict[str, Any]:
        return {"type": "http.request", "body": b"x" * length, "more_body": more}

    async def ask(length: int) -> int:
        coming = asyncio.Queue[Any]()
        coming.put_nowait(part(length, more=False))
        return await status(coming)

    async def run() -> list[int]:
        slow = [asyncio.Queue[Any]() for _ in range(4)]
        tasks = [asyncio.ensure_future(status(coming)) for coming in slow]
        for coming in slow:
            coming.put_nowait(part(LONG - 9, more=True))
        async with asyncio.timeout(SOON):
            while not all(coming.empty() for coming in slow):
                await asyncio.sleep(0)
            while await ask(LONG) != 200:
                await asyncio.sleep(0.01)
        assert [await ask(LONG) for _ in range(3)] == [200] * 3  # there is room now
        for coming in slow:  # whoever gave way is told so when all has come; the others were held
            coming.put_nowait(part(9, more=False))
        return sorted(await asyncio.gather(*tasks))

    assert asyncio.run(run()) == [200, 200, 200, 503]


def test_a_prompt_that_is_too_long_whatever_its_tokens_are(server: Running) -> None:
    """It is told before it is encoded, which could take seconds and hundreds of megabytes."""
    for prompt, said in (("hello " * 1_000_000, "6000000 characters"), ([1] * 100_000, "100000 tokens")):
        answer = COMPLETIONS.post(server, prompt)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert f"the prompt has {said}; there is room for 512 tokens" in answer.json()["error"]["message"]


class Anything(Fields, frozen=True):
    """A body with fields of any depth and of a known one."""

    any: object = None
    own: "Anything | None" = None


def _nested(depth: int, opening: str, ending: str = "}") -> str:
    return opening * depth + "0" + ending * depth


@pytest.mark.parametrize(("opening", "ending"), [('{"a":', "}"), ("[", "]"), ('{"b":[', "]}")])
def test_depth(opening: str, ending: str) -> None:
    levels = (MAX_DEPTH - 1) // len(opening.replace('"a":', "").replace('"b":', ""))
    decode(f'{{"any": {_nested(levels, opening, ending)}}}'.encode(), Anything)
    for depth in (levels + 1, 900, 100_000):
        with pytest.raises(ApiError, match=r"nested deeper than 64 levels|recursion|Recursion"):
            decode(f'{{"any": {_nested(depth, opening, ending)}}}'.encode(), Anything)
    with pytest.raises(ApiError, match="nested deeper"):
        decode(_nested(MAX_DEPTH + 1, '{"own":').replace("0", "{}").encode(), Anything)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"\xff", b'{"any": "\\ud800"}', b'{"any": 1e999}', b'{"any": NaN}', b"\xef\xbb\xbf{}"],
)
def test_what_is_no_json(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        decode(body, Anything)
    assert refused.value.status == 400


def test_counting_values() -> None:
    def marks(node: Any) -> int:
        """The commas and opening brackets of a decoded value."""
        if not isinstance(node, list | dict):
            return 0
        inner = node.values() if isinstance(node, dict) else node
        return 1 + max(0, len(node) - 1) + sum(map(marks, inner))

    texts = ["", "\\", '"', '\\"', '",[{', "\\\\", "a\\", 'a\\"', "\n\t\u2028é"]
    texts += ["{" * 70_000, '"' * 70_000, "\\" * 70_001]
    for first in texts:
        for second in texts[:: 1 if len(first) < 10 else 4]:
            found = {"a": [first, second, {first: second}], second: {"b": [[], {}], "c": first}}
            for body in (json.dumps(found).encode(), msgspec.json.encode(found)):
                assert count_values(body) == marks(json.loads(body))


def test_a_body_of_too_many_values(server: Running) -> None:
    many = b'{"prompt": [' + b"[],[],[]," * (MAX_VALUES // 3) + b"0]}"
    answer = server.client.post("/tokenize", content=many)
    assert answer.status_code == 400
    assert f"expected {MAX_VALUES} at most" in answer.json()["error"]["message"]
    text = json.dumps({"prompt": "[,{" * (MAX_VALUES // 2), "model": "other"}).encode()
    assert server.client.post("/tokenize", content=text).status_code == 404


@pytest.mark.parametrize(("part", "refused"), [("[],", True), ('"[,{",', False)])
def test_arguments_of_too_many_values(server: Running, part: str, refused: bool) -> None:
    """They are JSON in a text of the body. Commas of their own texts do not count."""
    call = {"name": "f", "arguments": '{"a": [' + part * (MAX_VALUES // 4) + "0]}"}
    calls = [{"id": f"{n}", "type": "function", "function": call} for n in range(3)]
    messages = [{"role": "assistant", "tool_calls": calls}, {"role": "user", "content": "x"}]
    items = [{"type": "function_call", "call_id": f"{n}", **call} for n in range(3)]
    for answer in (CHAT.post(server, messages), RESPONSES.post(server, items)):
        assert answer.status_code == 400
        assert (f"expected {MAX_VALUES} at most" in answer.json()["error"]["message"]) is refused


def test_chunks_of_one_byte(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred thousand of them hold nobody up: they are read little by little. Of 256 KiB each took 0.6
    s.
    """
    read: list[int] = []
    real = Connection.data_received
    monkeypatch.setattr(
        Connection, "data_received", lambda self, data: read.append(len(data)) or real(self, data)
    )
    with server.connect() as connection:
        head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        sending = threading.Thread(
            target=connection.sendall, args=(head + b"1\r\n \r\n" * 100_000 + b"0\r\n\r\n",)
        )
        sending.start()
        while sending.is_alive():
            assert server.client.get("/health").status_code == 200
        assert connection.recv(1000)[9:12] == b"400"
    assert sum(read) > 600_000
    assert max(read) <= READ_BYTES


MANY = [f"property_{number}" for number in range(99_000)]
WIDE = {"type": "object", "properties": dict.fromkeys(MANY, True), "required": MANY}
REFERENCES = {
    "allOf": [{"$ref": "#/$defs/b"}] * 200,
    "$defs": {"b": {"allOf": [{"$ref": "#/$defs/c"}] * 200}, "c": {"$ref": "#" + "/%61" * 20_000}},
}


def _tool(parameters: Any, **fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "t", "parameters": parameters} | fields}]}


FREEZING: dict[str, dict[str, Any]] = {
    "newlines": {"structured_outputs": {"grammar": "\n" * 1_000_000}},
    "newlines of the largest grammar": {"structured_outputs": {"grammar": "\n" * 60_000}},
    "brackets": {"structured_outputs": {"grammar": "a[\n" * 20_000}},
    "a temperature behind a text": {
        "structured_outputs": {"grammar": 'start[stop="]", temperature=1.5]: "a"'}
    },
    "quotes of a regex": {"structured_outputs": {"regex": '"\\' * 1_000_000}},
    "choices": {"structured_outputs": {"choice": ["("] * 190_000}},
    "a long choice": {"structured_outputs": {"choice": ["(" * 4_000_000]}},
    "required": {"structured_outputs": {"json": WIDE}},
    "required of a format": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": WIDE}}
    },
    "required of a strict tool": _tool(WIDE, strict=True),
    "a tool of any call": _tool(WIDE),
    "references": _tool(REFERENCES),
    "a field's name": {"x" * 3_000_000: 1},
    "a variable's name": {"chat_template_kwargs": {"x" * 3_000_000: 1}},
    "a value": {"reasoning_effort": "x" * 3_000_000},
    "a role": {"messages": [{"role": "x" * 3_000_000, "content": ""}]},
}


UNKNOWN = [FREEZING[name] for name in ("a field's name", "a variable's name", "a value")]  # they are left out


@pytest.mark.parametrize("fields", FREEZING.values(), ids=FREEZING)
def test_no_body_holds_the_server(server: Running, fields: dict[str, Any]) -> None:
    """It is refused, or left out, in a short answer, while a thread of this process goes on."""
    body = json.dumps(CHAT.body(tokens=1) | fields).encode()
    ticks, ended = [time.monotonic()], threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            ticks.append(time.monotonic())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        answered = server.client.post(CHAT.path, content=body)
    finally:
        ended.set()
        watching.join()
        ticks.append(time.monotonic())
    assert answered.status_code == (200 if fields in UNKNOWN else 400), answered.text[:300]
    assert len(answered.headers.get("x-kvant-ignored", "")) < 100
    assert len(answered.content) < 4_000
    assert max(after - before for before, after in pairwise(ticks)) < 1  # it was minutes
    assert server.client.get("/health").status_code == 200


def test_a_call_against_a_schema_of_references(server: Running) -> None:
    form = tool_format(server.service.tokenizer)
    assert form is not None
    (call,) = form.calls('<tool_call>\n{"name": "t", "arguments": {"x": 1}}\n</tool_call>', {"t": REFERENCES})
    assert call == ("t", {"x": 1})


def test_damaged_weights_are_an_error(pocket: Any) -> None:
    model = copy(pocket[0])
    *layers, last = model.layers
    model.layers = (
        *layers,
        replace(last, norms={role: weight * math.nan for role, weight in last.norms.items()}),
    )
    with served(model, pocket[1]) as found:
        for to, fields in (
            (CHAT, {"response_format": {"type": "json_object"}, "logprobs": True}),
            (MESSAGES, {}),
        ):
            answered = to.post(found, tokens=9, **fields)
            assert answered.status_code == 500
            assert "NaN" in answered.json()["error"]["message"]
        assert "NaN" in CHAT.post(found, stream=True).text
        assert found.client.get("/health").status_code == 200


async def clock(request: Request) -> Response:
    """The processor time of the thread that runs the server's loop, in seconds."""
    return JSONResponse(time.thread_time())


@pytest.fixture(scope="module")
def timed(pocket: Any) -> Iterator[Running]:
    with served(*pocket, max_kv_size=512, routes=[Route("/clock", clock)]) as found:
        yield found


SAID = {"role": "user", "content": ""}
PARTS = [{"type": "text", "text": ""}] * 60_000
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLS = [{"role": "assistant", "tool_calls": [{"id": f"{n}", **CALL}]} for n in range(20_000)]
SPACES = [
    {"type": "namespace", "name": f"n{n}", "tools": [{"type": "function", "name": "f"}] * 50}
    for n in range(999)
]
MANY_ENTRIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "messages": (CHAT.path, {"messages": [SAID] * 64_000}, "messages has 64000 entries"),
    "parts": (CHAT.path, {"messages": [{"role": "user", "content": PARTS}]}, "messages has 60000 parts"),
    "calls": (CHAT.path, {"messages": CALLS}, "messages has 20000 entries"),
    "tools": (
        CHAT.path,
        _tool({}) | {"messages": [SAID], "tools": _tool({})["tools"] * 21_000},
        "tools has 21000",
    ),
    "items": (RESPONSES.path, {"input": [SAID] * 64_000}, "input has 64000 entries"),
    "namespaces": (RESPONSES.path, {"input": "x", "tools": SPACES}, "tools has 49950"),
    "turns": (MESSAGES.path, {"messages": [SAID] * 64_000, "max_tokens": 1}, "messages has 64000 entries"),
    "blocks": (
        MESSAGES.path,
        {"messages": [{"role": "user", "content": PARTS}], "max_tokens": 1},
        "has 60000 parts",
    ),
    "system": (
        MESSAGES.path,
        {"messages": [SAID], "system": PARTS, "max_tokens": 1},
        "system has 60000 entries",
    ),
    "prompts": (COMPLETIONS.path, {"prompt": [[1]] * 90_000}, "prompt has 90000 prompts"),
    "counted": ("/v1/messages/count_tokens", {"messages": [SAID] * 64_000}, "messages has 64000 entries"),
    "tokenized": ("/tokenize", {"messages": [SAID] * 64_000}, "messages has 64000 entries"),
}


@pytest.mark.parametrize(("path", "fields", "said"), MANY_ENTRIES.values(), ids=MANY_ENTRIES)
def test_many_entries_do_not_hold_the_loop(
    timed: Running, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], said: str
) -> None:
    """They are counted first; with a context that has room for them, a thread reads them. It took 1.4 s of
    the loop.
    """
    body = json.dumps({"model": "pocket", **fields}).encode()
    refused = timed.client.post(path, content=body)
    assert (refused.status_code, said in refused.json()["error"]["message"]) == (400, True)
    monkeypatch.setattr(timed.service, "max_seq_len", 10**6)
    before = timed.client.get("/clock").json()
    assert timed.client.post(path, content=body).status_code in (200, 400)
    assert timed.client.get("/clock").json() - before < 0.2


def test_a_body_takes_no_room_while_it_is_answered(short: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once three bodies of blanks, with long answers, shut out every other request until they were
    answered.
    """
    monkeypatch.setattr(short.service, "submit", lambda *given: None)  # an answer that does not end
    body = CHAT.body("x", stream=True)
    head = f"POST {CHAT.path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {LONG}\r\n\r\n"
    with ExitStack() as held:
        for _ in range(3):
            connection = held.enter_context(short.connect())
            connection.sendall(head.encode() + json.dumps(body).encode().ljust(LONG))
            assert _status(connection.recv(100)) == 200
        assert short.client.post("/length", content=b"x" * LONG).status_code == 200


def test_large_bodies_are_read_in_turns_by_client(pocket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's many, which take long, once came all before another's one. They wait within --max-queue."""
    read: list[str] = []
    ready = threading.Semaphore(0)

    def slow(sent: bytes, *given: Any) -> Any:
        read.append(json.loads(sent)["user"])
        assert ready.acquire(timeout=SOON)
        return decode(sent, *given)

    monkeypatch.setattr(endpoint, "decode", slow)
    with ThreadPoolExecutor(6) as threads, served(*pocket, api_keys=("a", "b"), max_queue=4) as found:

        def post(name: str) -> httpx2.Response:
            content = json.dumps(CHAT.body("x", tokens=1) | {"user": name}).ljust(LONG)
            return found.client.post(CHAT.path, content=content, headers={"x-api-key": name[0]})

        asked: dict[str, Future[httpx2.Response]] = {}
        for name in ("a0", "a1", "a2", "a3", "b0"):
            asked[name] = threads.submit(post, name)
            wait(lambda: len(read) + found.registry.reading.waiting == len(asked))
        refused = post("b1")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        for name in ("a0", "a1", "b0", "a2", "a3"):
            ready.release()
            assert asked[name].result(SOON).status_code == 200
    assert read == ["a0", "a1", "b0", "a2", "a3"]


SERVE_FEW = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))
sys.argv = ["kvant", "serve", "--port", "0", "--sequences", "1", "--max-kv-size", "128"]
from kvant.cli import main
main()
"""


def _address(client: httpx2.Client) -> tuple[str, int]:
    return str(client.base_url.host), int(client.base_url.port or 0)


@pytest.mark.skipif(sys.platform != "linux", reason="it counts the files of a process by Linux's limits")
def test_more_connections_than_files(tmp_path: Path) -> None:
    with (
        started(tmp_path, command=[sys.executable, "-c", SERVE_FEW]) as (_, client, lines),
        ExitStack() as held,
    ):
        before = len(lines)
        connections = [
            held.enter_context(socket.create_connection(_address(client), SOON)) for _ in range(300)
        ]
        time.sleep(0.5)
        assert read_all(connections[-1]).startswith(b"HTTP/1.1 503 ")
        for connection in connections[:60]:
            connection.close()
        assert client.get("/health").status_code == 200
        assert len(lines) - before <= 1, lines[before:]


@pytest.mark.skipif(sys.platform != "linux", reason="it looks for children in Linux's /proc")
def test_an_end_leaves_no_stopped_process(tmp_path: Path) -> None:
    with started(tmp_path) as (process, client, _):
        body = CHAT.body(tokens=1, response_format={"type": "json_object"})
        assert client.post(CHAT.path, json=body).status_code == 200
        threads = Path(f"/proc/{process.pid}/task").iterdir()
        children = [int(pid) for task in threads for pid in (task / "children").read_text().split()]
        assert len(children) == 2
        for child in children:
            os.kill(child, signal.SIGSTOP)
        with socket.create_connection(_address(client), SOON) as half:
            half.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
            time.sleep(0.2)
            process.send_signal(signal.SIGHUP)
            assert process.wait(20) == 0
        for child in children:
            with pytest.raises(ProcessLookupError):
                os.kill(child, 0)


def test_a_process_of_the_tokenizer_that_dies(pocket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once is nothing; a second time it is the server's fault, and not the client's."""
    with served(*pocket) as found:
        send, kills = TextProcess._send, [1]

        def dying(process: TextProcess, *parts: bytes) -> None:
            if kills[0] and b'"render"' in parts[0]:
                kills[0] -= 1
                process._process.kill()
                process._process.wait()
            send(process, *parts)

        monkeypatch.setattr(TextProcess, "_send", dying)
        CHAT.ask(found, tokens=1)
        assert kills == [0]
        kills[0] = 2
        answered = CHAT.post(found)
        assert (answered.status_code, answered.json()["error"]["type"]) == (503, "server_error")
        assert kills == [0]

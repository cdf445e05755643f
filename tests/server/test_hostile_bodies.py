"""Requests that once froze the server, filled its log, or were told too much: the smallest case of each."""

import json
import math
import os
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.interfaces import CHAT, MESSAGES
from support.server import SOON, Running, read_all, running, start, started

from kvant.server.settings import Settings
from kvant.text.process import TextProcess
from kvant.text.tool_forms import tool_format

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
    "a temperature behind a text": {"structured_outputs": {"grammar": 'start[stop="]", temperature=1.5]: "a"'}},
    "quotes of a regex": {"structured_outputs": {"regex": '"\\' * 1_000_000}},
    "choices": {"structured_outputs": {"choice": ["("] * 190_000}},
    "a long choice": {"structured_outputs": {"choice": ["(" * 4_000_000]}},
    "required": {"structured_outputs": {"json": WIDE}},
    "required of a format": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": WIDE}}},
    "required of a strict tool": _tool(WIDE, strict=True),
    "a tool of any call": _tool(WIDE),
    "references": _tool(REFERENCES),
    "a field's name": {"x" * 3_000_000: 1},
    "a variable's name": {"chat_template_kwargs": {"x" * 3_000_000: 1}},
    "a value": {"reasoning_effort": "x" * 3_000_000},
    "a role": {"messages": [{"role": "x" * 3_000_000, "content": ""}]},
}


@pytest.mark.parametrize("fields", FREEZING.values(), ids=FREEZING)
def test_no_body_holds_the_server(server: Running, fields: dict[str, Any]) -> None:
    """It is refused in a short answer, while a thread of this process goes on."""
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
    assert answered.status_code == 400, answered.text[:300]
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
    model.layers = (*layers, replace(last, norms={role: weight * math.nan for role, weight in last.norms.items()}))
    with running(start(Settings(port=0, sequences=1, max_kv_size=128), model, pocket[1])) as found:
        for to, fields in ((CHAT, {"response_format": {"type": "json_object"}, "logprobs": True}), (MESSAGES, {})):
            answered = to.post(found, tokens=9, **fields)
            assert answered.status_code == 500
            assert "NaN" in answered.json()["error"]["message"]
        assert "NaN" in CHAT.post(found, stream=True).text
        assert found.client.get("/health").status_code == 200


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
    with started(tmp_path, command=[sys.executable, "-c", SERVE_FEW]) as (_, client, lines), ExitStack() as held:
        before = len(lines)
        connections = [held.enter_context(socket.create_connection(_address(client), SOON)) for _ in range(300)]
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
    with running(start(Settings(port=0, sequences=1, max_kv_size=128), *pocket)) as found:
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

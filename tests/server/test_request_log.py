"""The line of each request in the log: what was asked of the model, and nothing of any text."""

import logging
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
from support.command import COMMAND
from support.interfaces import CHAT, INTERFACES, Interface
from support.server import SOON, Running, started, wait

from kvant.server import run
from kvant.server.settings import Settings

SECRET = "a badger named Quintilian"
COUNTS = re.compile(r"POST (\S+) 200, pocket, (\d+) tokens in \((\d+) cached\), (\d+) out, \d+\.\d\d s")


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """A function that waits for lines that begin with a text, and returns them."""
    caplog.set_level(logging.INFO, logger="kvant.server.requests")

    def find(start: str) -> list[str]:
        wait(lambda: any(line.startswith(start) for line in caplog.messages))
        return [line for line in caplog.messages if line.startswith(start)]

    return find


@pytest.mark.parametrize("to", INTERFACES, ids=str)
def test_an_answer(to: Interface, server: Running, logged: Callable[[str], list[str]]) -> None:
    for streams in (False, True):
        assert to.post(server, f"{SECRET} " * 40, 9, stream=streams).status_code == 200
    wait(lambda: len(logged(f"POST {to.path} ")) == 2)
    lines = logged(f"POST {to.path} ")
    found = [COUNTS.fullmatch(line) for line in lines]
    assert all(found), lines
    counts = [(line[1], int(line[2]), int(line[4])) for line in found if line]
    assert counts[0] == counts[1]
    assert counts[0][0] == to.path
    assert counts[0][1] > 128
    assert 0 < counts[0][2] <= 9
    assert found[1] is not None
    assert int(found[1][3]) >= 128
    assert "Quintilian" not in "".join(lines)


def test_several_answers(server: Running, logged: Callable[[str], list[str]]) -> None:
    CHAT.ask(server, "Hello.", 5, n=2, ignore_eos=True)
    (line,) = logged("POST /v1/chat")
    assert ", 10 out, " in line


def test_a_client_that_leaves(server: Running, logged: Callable[[str], list[str]]) -> None:
    body = CHAT.body("A story, please.", 400, ignore_eos=True, stream=True)
    with server.client.stream("POST", CHAT.path, json=body) as stream:
        lines = stream.iter_lines()
        for _ in range(20):
            next(lines)
    (line,) = logged("POST /v1/chat")
    assert re.search(r"tokens in, [1-9]\d* out, ", line), line


def test_refusals_and_what_is_polled(server: Running, logged: Callable[[str], list[str]]) -> None:
    server.client.post("/v1/completions", json={"model": "other", "prompt": SECRET})
    server.client.get(f"/nothing%1b[1m/{'x' * 500}")
    for path in ("/health", "/metrics", "/live", "/page/page.js", "/page/none.js"):
        server.client.get(path)
    (refused,) = logged("POST")
    assert refused.startswith("POST /v1/completions 404, ")
    (file,) = logged("GET /page")
    (unknown, _) = logged("GET")
    assert unknown.startswith("GET /nothin")
    assert unknown.isprintable()
    assert len(unknown) < 150
    assert file.startswith("GET /page/{name} 404, ")


def test_the_process_prints_them(tmp_path: Path) -> None:
    with started(tmp_path) as (_, client, lines):
        client.get("/v1/models")
        wait(lambda: any(line.startswith("GET /v1/models 200, ") for line in lines))
    assert sum(line.startswith("memory: ") for line in lines) == 1


def test_a_quiet_process_prints_nothing(tmp_path: Path) -> None:
    with run.bind(Settings(port=0)) as bound:
        url = run.url_of(bound)
    size = ("--sequences", "1", "--max-kv-size", "128")
    command = [*COMMAND, "serve", "--quiet", *size, "--port", url.rpartition(":")[2]]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait(lambda: _answers(url))
        finally:
            process.terminate()
        assert process.communicate(timeout=SOON)[1] == ""
        assert process.returncode == 0


def _answers(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/v1/models", trust_env=False).status_code == 200
    except httpx2.TransportError:
        return False

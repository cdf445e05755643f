"""A server's end: signals, an engine that fails, one that stalls, and requests under way when it has to go."""

import asyncio
import json
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.interfaces import COMPLETIONS, INTERFACES
from support.server import SOON, served, started

from kvant.cli.serve import REQUEST_BYTES
from kvant.engine.request import Token
from kvant.engine.scheduler import Scheduler
from kvant.server import run
from kvant.server.settings import Limits, Settings
from kvant.sizes import format_bytes

SECRET = "the badger's name is Quintilian"
KEY = "sk-not-to-be-seen"
ASK = {"model": "pocket", "prompt": SECRET, "ignore_eos": True, "stream": True}


def _resident(pid: int) -> int:
    """The most bytes that a process and those it started had; 0 where the system does not say."""
    if sys.platform != "linux":
        return 0
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    statuses = [Path(f"/proc/{each}/status").read_text() for each in (pid, *children)]
    return sum(1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) for status in statuses)


def test_sigterm_lets_what_is_under_way_end(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"other-key\n{KEY}\n")
    with started(tmp_path, "--api-key-file", "keys") as (process, client, lines):
        client.headers["x-api-key"] = KEY
        with client.stream("POST", "/v1/completions", json=ASK | {"max_tokens": 250}) as stream:
            events = stream.iter_lines()
            next(events)
            props = client.get("/props").json()
            resident = _resident(process.pid)
            process.terminate()
            while (health := client.get("/health")).status_code == 200:
                pass
            assert health.json() == {"status": "ending", "waiting": 0, "running": 1}
            for to in INTERFACES:
                refused = client.post(to.path, json=to.body())
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            found = [line.removeprefix("data: ") for line in events if line]
        assert found[-1] == "[DONE]"
        assert json.loads(found[-2])["choices"][0]["finish_reason"] == "length"
        assert process.wait(SOON) == 0
        assert process.stdout.read() == ""
    printed = "".join(lines)
    assert "ending when 1 requests are answered" in printed
    assert not re.search(f"Quintilian|badger|{KEY}|other-key", printed)
    planned = props["memory"]["planned"]
    assert f"memory: {format_bytes(planned['total'] + REQUEST_BYTES)} planned at most: weights " in printed
    assert props["memory"]["peak"] <= planned["arrays"]
    assert props["memory"]["kept_for_reuse"] <= planned["scratch"]
    assert resident <= planned["total"] + REQUEST_BYTES
    assert props["pool"]["bytes"] == planned["cache"]
    assert _written(tmp_path) == [keys]


def test_sigkill_leaves_nothing_behind(tmp_path: Path) -> None:
    with started(tmp_path) as (process, client, _):
        with client.stream("POST", "/v1/completions", json=ASK | {"max_tokens": 400}) as stream:
            events = stream.iter_lines()
            next(events)
            process.kill()
            with pytest.raises(httpx2.TransportError):
                list(events)
        assert process.wait(SOON) == -signal.SIGKILL
        run.bind(Settings(port=int(client.base_url.port or 0))).close()
    assert not _written(tmp_path)


def _written(folder: Path) -> list[Path]:
    """The files in a folder, but for the copy of OpenBLAS that the first start of a user makes."""
    return [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("openblas-")]


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with started(tmp_path) as (process, client, lines):
        with client.stream("POST", "/v1/completions", json=ASK | {"max_tokens": 400}) as stream:
            events = stream.iter_lines()
            next(events)
            process.terminate()
            while client.get("/health").status_code == 200:
                pass
            process.terminate()
            with pytest.raises(httpx2.TransportError):
                list(events)
        assert process.wait(SOON) == 130
    assert "another signal ends at once" in "".join(lines)


def test_ctrl_c_ends_with_its_code(tmp_path: Path) -> None:
    with started(tmp_path) as (process, _, _):
        process.send_signal(signal.SIGINT)
        assert process.wait(SOON) == 130


LONG = COMPLETIONS.body("Once upon a time", 400, ignore_eos=True)


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What the engine does before each of its steps."""
    real, acts = Scheduler.step, [lambda: time.sleep(0.005)]

    def doing(self: Scheduler) -> list[Token]:
        acts[0]()
        return real(self)

    monkeypatch.setattr(Scheduler, "step", doing)
    return acts  # type: ignore[return-value]


def _data(line: str) -> Any:
    return json.loads(line.removeprefix("data: "))


def _fail() -> None:
    raise MemoryError("a secret")


@pytest.mark.parametrize("stalls", [False, True])
def test_an_engine_that_fails(pocket: Any, before: Any, stalls: bool, caplog: pytest.LogCaptureFixture) -> None:
    go = threading.Event()
    limits = Limits(stall_s=0.4 if stalls else 120.0)
    with served(*pocket, sequences=2, max_kv_size=512, limits=limits) as found:
        client = found.client
        with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
            lines = stream.iter_lines()
            assert _data(next(lines))["choices"]
            before[0] = (lambda: go.wait(SOON)) if stalls else _fail
            began = time.monotonic()
            last = [line for line in lines if line][-1]
        assert "the server's log" in _data(last)["error"]["message"]
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        for to in INTERFACES:
            refused = to.post(found)
            assert refused.status_code == 503, to
            assert "secret" not in refused.text
        assert client.get("/live").status_code == 503
        assert client.get("/v1/models").status_code == 200
        assert "kvant_engine_alive 0.0" in client.get("/metrics").text
        assert time.monotonic() - began < 10
        go.set()
    logged = [record.getMessage() for record in caplog.records if record.name == "kvant.server"]
    kind = "TimeoutError" if stalls else "MemoryError at test_run.py:"
    assert logged
    assert all(re.match(rf"req_\w+: {kind}", line) and "secret" not in line for line in logged)


def test_what_takes_too_long_is_cut(pocket: Any, before: Any) -> None:
    with served(*pocket, sequences=2, max_kv_size=512, limits=Limits(drain_s=0.3)) as found:
        with found.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            asyncio.run_coroutine_threadsafe(found.server.end(), found.server.servers[0].get_loop())
            last = [line for line in lines if line][-1]
            assert _data(last)["error"]["message"] == "the server is shutting down"
        found.thread.join(SOON)
        assert not found.thread.is_alive()

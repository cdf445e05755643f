"""A server's end: an engine that fails, one that stalls, and requests under way when it has to go."""

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.interfaces import COMPLETIONS, INTERFACES
from support.server import SOON, Running, running, start

from kvant.engine.request import Token
from kvant.engine.scheduler import Scheduler
from kvant.server.service import Service
from kvant.server.settings import Limits, Settings

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


def _start(pocket: Any, **limits: Any) -> Service:
    return start(Settings(port=0, sequences=2, max_kv_size=512, limits=Limits(**limits)), *pocket)


def _data(line: str) -> Any:
    return json.loads(line.removeprefix("data: "))


def _fail() -> None:
    raise MemoryError("a secret")


@pytest.mark.parametrize("stalls", [False, True])
def test_an_engine_that_fails(pocket: Any, before: Any, stalls: bool, caplog: pytest.LogCaptureFixture) -> None:
    go = threading.Event()
    with running(_start(pocket, stall_s=0.4 if stalls else 120.0)) as found:
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


def _end(found: Running) -> None:
    loop = found.server.servers[0].get_loop()
    asyncio.run_coroutine_threadsafe(found.server.end(), loop)


def test_what_takes_too_long_is_cut(pocket: Any, before: Any) -> None:
    with running(_start(pocket, drain_s=0.3)) as found:
        with found.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            _end(found)
            last = [line for line in lines if line][-1]
            assert _data(last)["error"]["message"] == "the server is shutting down"
        found.thread.join(SOON)
        assert not found.thread.is_alive()

"""The command as its user starts it, and the signals that end it."""

import json
import re
import signal
import sys
from pathlib import Path

import httpx2
import pytest
from support.interfaces import INTERFACES
from support.server import SOON, started

from kvant.cli.serve import REQUEST_BYTES
from kvant.server import run
from kvant.server.settings import Settings
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

"""What a server is started with: drafts, a disk cache; and its end, by signals and failures."""

import asyncio
import json
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.command import call
from support.drafts import draft_by_chance
from support.interfaces import CHAT, COMPLETIONS, INTERFACES, counts_of
from support.server import SOON, Running, running, served, start, started

from kvant.cache import CacheOptions
from kvant.cache.disk import DiskCache
from kvant.cli.running import recorded
from kvant.cli.serve import REQUEST_BYTES
from kvant.engine.head_drafts import HeadDrafts
from kvant.engine.model_drafts import ModelDrafts
from kvant.engine.request import Token
from kvant.engine.scheduler import Scheduler
from kvant.errors import ArgumentError
from kvant.models import Decoder
from kvant.operators.exact_rows import TAIL_WINDOW
from kvant.server import run
from kvant.server.service import make_pool
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
            assert health.json() == {"status": "ending", "waiting": 0, "running": 1, "loaded": ["pocket"]}
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


@pytest.mark.parametrize("killed", [True, False])
def test_an_end_at_once_leaves_nothing_behind(
    tmp_path: Path, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SIGKILL, or by a second signal. The record of the server goes when another one starts."""
    with started(tmp_path) as (process, client, lines):
        with client.stream("POST", "/v1/completions", json=ASK | {"max_tokens": 400}) as stream:
            events = stream.iter_lines()
            next(events)
            if not killed:
                process.terminate()
                while client.get("/health").status_code == 200:
                    pass
            process.send_signal(signal.SIGKILL if killed else signal.SIGTERM)
            with pytest.raises(httpx2.TransportError):
                list(events)
        assert process.wait(SOON) == (-signal.SIGKILL if killed else 130)
        run.bind(Settings(port=int(client.base_url.port or 0))).close()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with recorded("http://127.0.0.1:1", "token"):
        pass
    assert not _written(tmp_path)
    assert killed or "another signal ends at once" in "".join(lines)


def _written(folder: Path) -> list[Path]:
    """The files in a folder, but for the copy of OpenBLAS that the first start of a user makes."""
    return [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("openblas-")]


def test_ctrl_c_ends_with_its_code(tmp_path: Path) -> None:
    with started(tmp_path) as (process, _, _):
        process.send_signal(signal.SIGINT)
        assert process.wait(SOON) == 130


LONG = COMPLETIONS.body("Once upon a time", 400, ignore_eos=True)


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What the engine does before each of its steps. It is so slow that a long answer does not end by
    itself.
    """
    real, acts = Scheduler.step, [lambda: time.sleep(0.05)]

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
def test_an_engine_that_fails(
    pocket: Any, before: Any, stalls: bool, caplog: pytest.LogCaptureFixture
) -> None:
    go = threading.Event()
    limits = Limits(stall_s=1.5 if stalls else 120.0)
    with served(*pocket, sequences=2, max_kv_size=512, limits=limits) as found:
        client = found.client
        with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
            lines = stream.iter_lines()
            assert _data(next(lines))["choices"]
            before[0] = (lambda: go.wait(SOON)) if stalls else _fail
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


TEXT = " ".join(str(1 + i % 5) for i in range(23))
ASKED: Any = (TEXT, 40)


def _counts(server: Running) -> tuple[int, int]:
    engine = server.client.get("/props").json()["engine"]
    return engine["drafted_tokens"], engine["accepted_tokens"]


@pytest.mark.parametrize("draft", ["prompt", "model", "mtp"])
def test_the_default_of_a_server(
    server: Running, headed: tuple[Decoder, Any], monkeypatch: pytest.MonkeyPatch, draft: str
) -> None:
    service = server.service
    model = headed[0] if draft == "mtp" else service.model
    settings = replace(service.settings, draft=draft, max_kv_size=256, sequences=2)
    pool = make_pool(settings, model)
    drafts = ModelDrafts(model=service.model).for_pool(pool)
    given = {"model": drafts, "mtp": HeadDrafts.of(model) if draft == "mtp" else None}.get(draft)
    draft_by_chance(monkeypatch, 1)
    with running(start(settings, model, service.tokenizer, pool=pool, drafts=given)) as found:
        expected = COMPLETIONS.ask(server, *ASKED, ignore_eos=True)
        answer = COMPLETIONS.ask(found, *ASKED, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"] == 40
        assert answer["choices"] == expected["choices"]
        drafted, accepted = _counts(found)
        assert 0 < accepted <= drafted
        assert found.client.get("/props").json()["engine"]["draft"] == draft
        metrics = found.client.get("/metrics").text
        assert f"\nkvant_drafted_tokens_total {float(drafted)}\n" in metrics
        assert f"\nkvant_accepted_tokens_total {float(accepted)}\n" in metrics
        for other in ("none", "prompt"):
            assert (
                COMPLETIONS.ask(found, *ASKED, ignore_eos=True, draft=other)["choices"] == expected["choices"]
            )
            assert (_counts(found) == (drafted, accepted)) == (other == "none")
    assert not drafts.drafters


def test_without_a_draft_model(server: Running) -> None:
    service = server.service
    for draft, flag in (("model", "--draft-model"), ("mtp", "--draft mtp")):
        refused = COMPLETIONS.post(server, *ASKED, draft=draft)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "draft"
        assert f"started without {flag}" in refused.json()["error"]["message"]
    settings = replace(service.settings, draft="model", max_kv_size=256, sequences=2)
    with pytest.raises(ArgumentError, match="draft is 'model'; expected it with"):
        start(settings, service.model, service.tokenizer)


def test_a_deterministic_server_refuses_them(server: Running) -> None:
    service = server.service
    settings = replace(service.settings, deterministic=True, max_kv_size=256, sequences=1)
    with running(start(settings, service.model, service.tokenizer)) as found:
        for to in INTERFACES:
            refused = to.post(found, *ASKED, draft="prompt")
            assert refused.status_code == 400
            assert "refused with deterministic" in refused.json()["error"]["message"]
            to.ask(found, TEXT, 1)


SYSTEM = {"role": "system", "content": "You tell stories of a fox named Pip who lives by the sea. " * 6}
MESSAGES = [SYSTEM, {"role": "user", "content": "Who is Pip?"}]
PLACES = {"type": "object", "properties": {"at": {"enum": ["sea", "hill"]}}, "required": ["at"]}
LOOK = {"name": "look", "description": "Look.", "parameters": PLACES | {"additionalProperties": False}}


@pytest.mark.parametrize(("bits", "keys"), [(8, ()), (4, ("first", "second"))])
def test_a_restarted_server_reads_what_it_had(
    bits: int, keys: tuple[str, ...], pocket: Any, tmp_path: Path
) -> None:
    """Each client what it sent itself. A tool's call after it is the same as without."""
    settings = Settings(
        port=0, sequences=2, max_kv_size=1024, api_keys=keys, cache=CacheOptions(kv_bits=bits)
    )
    body = CHAT.body(MESSAGES, 200, tools=[{"type": "function", "function": LOOK}], tool_choice="required")
    given = []
    for client, disk_folder in (("first", "cache"), ("first", "cache"), ("second", "cache"), ("first", "")):
        pool = make_pool(settings, pocket[0])
        if disk_folder:
            pool.use_disk(DiskCache(tmp_path / disk_folder))
        with running(start(settings, *pocket, pool=pool)) as server:
            headers = {"authorization": f"Bearer {client if keys else 'any'}"}
            given.append(server.client.post(CHAT.path, json=body, headers=headers).json())
            if disk_folder:
                assert (
                    "kvant_disk_cache_dropped_total 0.0"
                    in server.client.get("/metrics", headers=headers).text
                )
    known = counts_of(given[0]["usage"])[0] // 128 * 128
    assert known
    if bits == 4:  # less the tokens of an exact tail, which are read again
        known -= TAIL_WINDOW
    assert [counts_of(each["usage"])[1] for each in given] == [0, known, 0 if keys else known, 0]
    called = [each["choices"][0]["message"]["tool_calls"][0]["function"] for each in given]
    assert called == called[:1] * 4
    assert json.loads(called[0]["arguments"])["at"] in ("sea", "hill")


def test_a_folder_for_files_that_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    for options, code, said in (
        (["--disk-cache", str(tmp_path / "open")], 1, "expected one that only its owner can open"),
        (["--disk-cache-size", "1GB"], 2, "expected --disk-cache with it"),
        (
            ["--disk-cache", str(tmp_path / "new"), "--disk-cache-size", "much"],
            2,
            "--disk-cache-size is 'much'",
        ),
        (["--disk-cache", str(tmp_path / "new"), "--disk-cache-size", "0.5MB"], 2, "expected a size such as"),
    ):
        done = call("serve", "--port", "0", *options)
        assert (done.returncode, done.stdout) == (code, "")
        assert said in done.stderr

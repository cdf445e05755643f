"""``kvant ps`` and ``kvant stop``: they find this user's servers and unload their models."""

import json
import os
import re
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx2
import pytest
from support.command import call
from support.server import started, wait

from kvant.cli.running import recorded, running_servers
from kvant.cli.served_models import check_names
from kvant.files import user_cache
from kvant.private import write_record
from kvant.server.served_model import ServedModel


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def _state(name: str) -> str:
    rows = json.loads(call("ps", "--json").stdout)
    return str(next(row["state"] for row in rows if row["name"] == name))


def test_without_a_server() -> None:
    assert call("ps").stdout == "no server is running; kvant serve starts one\n"
    assert call("ps", "--json").stdout == "[]\n"
    refused = call("stop", "pocket")
    assert (refused.returncode, refused.stderr) == (1, "kvant: error: no server is running\n")


@pytest.mark.parametrize("arguments", [(), ("pocket", "--all")])
def test_what_to_stop(arguments: tuple[str, ...]) -> None:
    refused = call("stop", *arguments)
    assert refused.returncode == 2
    assert "either the name of a model or --all" in refused.stderr


def test_a_running_server(tmp_path: Path, pocket_folder: Path) -> None:
    (tmp_path / "second").symlink_to(pocket_folder)
    models = ("--model", "pocket", "--model", str(tmp_path / "second"), "--alias", f"2={tmp_path / 'second'}")
    with started(tmp_path, *models) as (process, client, _):
        (record,) = (tmp_path / "kvant" / "servers").iterdir()
        assert (record.stat().st_mode & 0o777, record.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        assert client.post("/control/unload", json={}).status_code == 403
        text = call("ps").stdout
        assert str(client.base_url) in text
        assert re.search(r"pocket +loaded .* MB +512 +0 ", text)
        assert re.search(r"second +not loaded ", text)
        answer = client.post("/v1/completions", json={"model": "2", "prompt": "Once", "max_tokens": 2}).json()
        assert answer["model"] == "second"
        assert _state("second") == "loaded"
        assert "second at http" in call("stop", "2").stderr
        assert (_state("pocket"), _state("second")) == ("loaded", "not loaded")
        assert call("stop", "2").stderr == "2 is not loaded\n"
        refused = call("stop", "third")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "no running server has the model 'third'; expected one of pocket, second" in refused.stderr
        assert "pocket at http" in call("stop", "--all").stderr
        assert client.get("/health").json()["loaded"] == []
        assert client.post("/v1/completions", json={"model": "pocket", "prompt": "a"}).status_code == 200
        process.terminate()
        assert process.wait(20) == 0
        assert not record.exists()


def test_a_model_that_answers_is_unloaded_later(tmp_path: Path) -> None:
    body = {"model": "small", "prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with started(tmp_path, "--model", "pocket", "--alias", "small=pocket") as (_, client, _):
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert "it is unloaded when its requests (1) have ended" in call("stop", "small").stderr
            assert [*lines][-2] == "data: [DONE]"
        wait(lambda: _state("pocket") == "not loaded")


SLOW = """
import time
import kvant
import kvant.cli.served_models as served
plain = served.load_session
def load_session(run, *given, **named):
    if run.model != "pocket":
        print("loading slowly", flush=True)
        time.sleep(60)
    return plain(run, *given, **named)
served.load_session = load_session
from kvant.cli import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_during_a_load(tmp_path: Path, pocket_folder: Path, number: signal.Signals) -> None:
    (tmp_path / "second").symlink_to(pocket_folder)
    serve = [sys.executable, "-c", SLOW, "serve", "--port", "0", "--models", f"pocket,{tmp_path / 'second'}"]
    with started(tmp_path, command=serve) as (process, client, _), ThreadPoolExecutor(1) as threads:
        body = {"model": "second", "prompt": "Once", "max_tokens": 1}
        answer = threads.submit(client.post, "/v1/completions", json=body)
        assert process.stdout.readline() == "loading slowly\n"
        process.send_signal(number)
        assert answer.result(20).status_code == 503
        wait(lambda: not _listens(str(client.base_url)))
        process.send_signal(number)
        assert process.wait(20) == 130


def _listens(url: str) -> bool:
    try:
        httpx2.get(f"{url}/health", trust_env=False)
    except httpx2.HTTPError:
        return False
    return True


def test_a_server_that_is_not_kvants(tmp_path: Path) -> None:
    """After a server was killed, its number and its port may be another program's."""
    answers = iter([b"[]", b"{}", b"\x1b[2J", b'{"models": [{"name": "a\\u001b[2J"}]}', b'{"models": 3}'] * 2)

    class Foreign(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(next(answers))

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Foreign) as foreign, started(tmp_path, "--model", "pocket"):
        threading.Thread(target=foreign.serve_forever, daemon=True).start()
        record = user_cache() / "servers" / "0.json"  # asked before the other one
        url = f"http://127.0.0.1:{foreign.server_port}"
        write_record(record, {"url": url, "pid": os.getpid(), "token": "x"})
        for _ in range(5):
            shown = call("ps").stdout
            assert f"the server at {url} is not kvant's" in shown
            assert "pocket" in shown
            assert "\x1b" not in shown
        refused = call("stop", "--all")
        assert refused.returncode == 1
        assert "pocket at http" in refused.stderr
        assert f"the server at {url} is not kvant's" in refused.stderr
        foreign.shutdown()


def test_names_of_several_models(tmp_path: Path) -> None:
    """A list may be longer than a file's name; a name that is the last part of two models is neither's."""
    unknown = ",".join(f"no-such-model-{number:03}" for number in range(40))
    refused = call("serve", "--models", unknown, "--port", "0")
    assert "'no-such-model-000' is not a folder or a known name" in refused.stderr
    models = [
        ServedModel(names, aliases, (), load=lambda metrics: None, planned={}, context=1)  # type: ignore[arg-type, return-value]
        for names, aliases in (
            (("a/x", "x"), ()),
            (("b/x", "x"), ()),
            (("c/y", "y"), ()),
            (("d/z", "z"), ("y",)),
        )
    ]
    check_names(models)
    assert [model.names for model in models] == [("a/x",), ("b/x",), ("c/y",), ("d/z", "z")]


def test_records_that_are_no_servers(tmp_path: Path) -> None:
    """One of a process that has ended goes; one that others could have written is not believed."""
    folder = user_cache() / "servers"
    gone = {"url": "http://127.0.0.1:1", "pid": 2**22 + 1, "token": "x"}
    write_record(folder / "1.json", gone)
    write_record(folder / "2.json", {**gone, "pid": "me"})
    (folder / "3.json").write_text("no JSON")
    write_record(folder / "4.json", {**gone, "pid": os.getpid()})
    (folder / "4.json").chmod(0o666)
    assert running_servers() == []
    assert [*folder.iterdir()] == []
    with recorded("http://127.0.0.1:1", "secret"):
        (found,) = running_servers()
        assert (found.url, found.pid) == ("http://127.0.0.1:1", os.getpid())
        assert "does not answer" in call("ps").stdout
        refused = call("stop", "pocket")
        assert (refused.returncode, "does not answer" in refused.stderr) == (1, True)
    assert running_servers() == []

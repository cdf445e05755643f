"""Several models behind one server: which is loaded, which makes room, and what clients see of it."""

import asyncio
import gc
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import mlx.core as mx
import pytest
from support.bridged import write_mlx_lm, write_words
from support.interfaces import CHAT, COMPLETIONS, counts_of
from support.server import SOON, Running, offered, running, wait

from kvant.cache.disk import DiskCache
from kvant.errors import ModelError
from kvant.files import POCKET
from kvant.server.registry import Registry
from kvant.server.served_model import ServedModel
from kvant.server.settings import Limits, Settings
from kvant.text.guidance import Vocabulary

BYTES = 1000  # planned for each model in these tests: any number will do
PLANNED = {"total": BYTES, "arrays": 10**9, "scratch": 10**8}
OWN = {"sequences": 4, "max_kv_size": 256, "port": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, pocket_folder: Path) -> dict[str, Path]:
    """Three models by name: pocket under another name, and two that only mlx-lm has."""
    place = tmp_path_factory.mktemp("models")
    (place / "native").symlink_to(pocket_folder)
    for name in ("falcon_h1", "gpt_oss"):
        write_mlx_lm(place / name, name)
        write_words(place / name, json.loads((place / name / "config.json").read_text())["vocab_size"])
    return {path.name: path for path in place.iterdir()}


def _settings(folder: Path | str, **changes: Any) -> Settings:
    return Settings(**{**OWN, "model": str(folder), **changes})


def _model(folder: Path | str, **changes: Any) -> ServedModel:
    return offered(_settings(folder, **changes), planned=PLANNED)


@contextmanager
def _serving(*models: ServedModel, room: float = 1, **changes: Any) -> Iterator[Running]:
    """A server of several models, with memory for so many of them; the first one is loaded."""
    limits = Limits(stay_s=changes.pop("stay_s", 0.0))
    registry = Registry(Settings(**OWN, limits=limits, **changes), models, room * BYTES)
    registry.load_now(models[0])
    with running(registry) as server:
        yield server


def _loads(server: Running, name: str) -> float:
    text = server.client.get("/metrics").text
    found = [
        line for line in text.splitlines() if line.startswith(f'kvant_model_loads_total{{model="{name}"}}')
    ]
    return float(found[0].split()[-1]) if found else 0.0


def _states(server: Running) -> dict[str, str]:
    return {each["name"]: each["state"] for each in server.client.get("/props").json()["models"]}


def _ask(server: Running, model: str, **fields: Any) -> httpx2.Response:
    body = {
        "model": model,
        "prompt": "w5 w6 Once",
        "max_tokens": 8,
        "ignore_eos": True,
        "temperature": 0,
        **fields,
    }
    return server.client.post(COMPLETIONS.path, json=body)


def _hold(server: Running, model: str) -> ExitStack:
    """A request of a model that goes on until the stack is closed."""
    body = {"model": model, "prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
    stack = ExitStack()
    stream = stack.enter_context(server.client.stream("POST", COMPLETIONS.path, json=body))
    next(stream.iter_lines())
    return stack


@contextmanager
def _busy(server: Running, model: str) -> Iterator[None]:
    """Let a request use a model while the block runs."""
    registry = server.registry
    leases = ExitStack()
    loop = server.loop
    asyncio.run_coroutine_threadsafe(registry.acquire(registry.find(model), leases), loop).result(SOON)
    try:
        yield
    finally:
        closed = threading.Event()
        loop.call_soon_threadsafe(lambda: (leases.close(), closed.set()))
        assert closed.wait(SOON)


def test_eight_clients_swap_models(folders: dict[str, Path]) -> None:
    """Whatever is loaded when, an answer is its model's own; memory is freed at each swap."""
    names = ["native", "falcon_h1", "gpt_oss"]
    expected = {}
    for name in names:
        with _serving(_model(folders[name])) as server:
            expected[name] = _ask(server, name).json()["choices"]
    assert len({str(each) for each in expected.values()}) == 3
    gc.collect()
    before = mx.get_active_memory()
    with _serving(*(_model(folders[name]) for name in names)) as server, ThreadPoolExecutor(8) as threads:

        def client(number: int) -> int:
            swaps = 0
            for turn in range(6):
                name = names[(number + turn) % 3]
                while (answer := _ask(server, name)).status_code == 503:
                    assert answer.headers["retry-after"] == "5"
                    assert answer.json()["error"]["code"] == "model_not_loaded"
                    time.sleep(0.01)
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"] == expected[name]
                assert answer.json()["model"] == name
                swaps += 1
            return swaps

        assert sum(threads.map(client, range(8))) == 48
        assert [*_states(server).values()].count("loaded") == 1
        assert sum(_loads(server, name) for name in names) >= 4
        wait(lambda: not any(model.users for model in server.registry.models))
    gc.collect()
    assert mx.get_active_memory() - before < 2**20


def test_models_use_the_same_threads(folders: dict[str, Path]) -> None:
    """MLX keeps what it has for a thread for ever, so a new thread for each loaded model would be a leak."""
    with _serving(_model(POCKET), _model(folders["native"])) as server:
        before = {each.native_id for each in threading.enumerate()}
        used = set()
        for name in ("native", "pocket") * 3:
            assert _ask(server, name).status_code == 200
            assert _states(server)[name] == "loaded"
            used |= {each.native_id for each in threading.enumerate() if each.name == "kvant-engine"}
        assert used <= before


def test_models_that_fit_together_stay(folders: dict[str, Path]) -> None:
    with _serving(_model(POCKET), _model(folders["gpt_oss"]), room=2) as server:
        for name in ("gpt_oss", "pocket", "gpt_oss", "pocket"):
            assert _ask(server, name).status_code == 200
        assert _states(server) == {"pocket": "loaded", "gpt_oss": "loaded"}
        assert (_loads(server, "pocket"), _loads(server, "gpt_oss")) == (1, 1)
        assert server.client.get("/health").json()["loaded"] == ["pocket", "gpt_oss"]
        listed = server.client.get("/v1/models").json()["data"]
        assert [(each["id"], each["loaded"]) for each in listed] == [("pocket", True), ("gpt_oss", True)]
        props = server.client.get("/props?model=gpt_oss").json()
        assert props["model"]["names"][0] == "gpt_oss"
        assert props["model"]["type"] == "gpt_oss"
        assert server.client.get("/live?model=gpt_oss").json()["model"] == "gpt_oss"


class _Gate:
    """Holds a model's load until it is opened."""

    def __init__(self, model: ServedModel, error: Exception | None = None) -> None:
        self.count = 0
        self.open = threading.Event()
        self._load = model.load
        self._error = error
        model.load = self

    def __call__(self, metrics: Any) -> Any:
        self.count += 1
        assert self.open.wait(SOON)
        if self._error is not None:
            raise self._error
        return self._load(metrics)


def test_a_load_is_shared_and_holds_nobody_up(folders: dict[str, Path]) -> None:
    slow = _model(folders["native"])
    gate = _Gate(slow)
    with _serving(_model(POCKET), slow, room=2) as server, ThreadPoolExecutor(5) as threads:
        waiting = [threads.submit(_ask, server, "native") for _ in range(4)]
        wait(lambda: slow.users == 4)
        for _ in range(3):
            assert _ask(server, "pocket").status_code == 200
        assert _states(server)["native"] == "loading"
        assert server.client.get("/live?model=native").json() == {"model": "native", "loaded": False}
        gate.open.set()
        assert {answer.result(SOON).status_code for answer in waiting} == {200}
        assert gate.count == 1


def test_a_load_does_not_prepare_grammars(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """That lets no other thread go on: 95 ms for 49,000 tokens."""
    plain = Vocabulary.for_library
    prepared = []

    def for_library(vocabulary: Vocabulary) -> Any:
        prepared.append(len(vocabulary.tokens))
        return plain(vocabulary)

    monkeypatch.setattr(Vocabulary, "for_library", for_library)
    with _serving(_model(POCKET), _model(folders["native"]), room=2) as server:
        assert len(prepared) == 1
        assert _ask(server, "native").status_code == 200
        assert len(prepared) == 1
        body = CHAT.body("Hi", 4) | {"model": "native", "response_format": {"type": "json_object"}}
        assert server.client.post(CHAT.path, json=body).status_code == 200
        assert len(prepared) == 2


def test_a_client_that_leaves_while_its_model_loads(folders: dict[str, Path]) -> None:
    slow = _model(folders["native"])
    gate = _Gate(slow)
    with _serving(_model(POCKET), slow, room=2) as server:
        body = json.dumps({"model": "native", "prompt": "Once", "max_tokens": 1}).encode()
        head = f"POST {COMPLETIONS.path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        with server.connect() as connection:
            connection.sendall(head.encode() + body)
            wait(lambda: slow.users == 1)
        wait(lambda: slow.users == 0)
        gate.open.set()
        assert _ask(server, "native").status_code == 200
        assert gate.count == 1


def test_nothing_is_unloaded_for_a_client_that_left(folders: dict[str, Path]) -> None:
    with _serving(_model(POCKET), _model(folders["native"]), stay_s=1.0) as server:
        wanted = server.registry.models[1]
        body = json.dumps({"model": "native", "prompt": "Once", "max_tokens": 1}).encode()
        head = f"POST {COMPLETIONS.path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        with server.connect() as connection:
            connection.sendall(head.encode() + body)
            wait(lambda: wanted.loading is not None)
        wait(lambda: wanted.loading is None)
        assert _states(server) == {"pocket": "loaded", "native": "not loaded"}
        assert _loads(server, "native") == 0


def test_a_busy_model_is_not_unloaded() -> None:
    with _serving(_model(POCKET), _model(POCKET, aliases=("other",))) as server:
        server.registry.models[1].names = ("second",)
        with _busy(server, "pocket"):
            refused = _ask(server, "second")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            message = refused.json()["error"]["message"]
            assert (
                "'second' needs 1.00 kB and 0 bytes are free; 'pocket' has requests (1) and cannot" in message
            )
            assert _states(server) == {"pocket": "loaded", "second": "not loaded"}
            assert _ask(server, "pocket").status_code == 200
        assert _ask(server, "second").status_code == 200
        assert _states(server) == {"pocket": "not loaded", "second": "loaded"}
        assert _ask(server, "other").json()["model"] == "second"


def test_a_model_stays_for_a_while(folders: dict[str, Path]) -> None:
    """A client that asks for models in turns waits for each; the server does not only load."""
    with _serving(_model(POCKET), _model(folders["native"]), stay_s=0.5) as server:
        began = time.monotonic()
        for name in ("native", "pocket", "native"):
            assert _ask(server, name).status_code == 200
        assert time.monotonic() - began > 1.4
        assert _ask(server, "native").status_code == 200
        assert _loads(server, "native") == 2


def test_only_so_many_wait_for_loads(folders: dict[str, Path]) -> None:
    slow = _model(folders["native"])
    gate = _Gate(slow)
    with _serving(_model(POCKET), slow, room=2, max_queue=2) as server, ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(_ask, server, "native") for _ in range(2)]
        wait(lambda: slow.users == 2)
        refused = _ask(server, "native")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
        assert _ask(server, "pocket").status_code == 200
        gate.open.set()
        assert {answer.result(SOON).status_code for answer in waiting} == {200}


def test_a_model_that_cannot_be_loaded(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    broken = _model(folders["native"])
    gate = _Gate(broken, ModelError("a secret path"))
    gate.open.set()
    with _serving(_model(POCKET), broken, room=2, stay_s=30) as server:
        for _ in range(3):  # the next ones do not try again so soon
            refused = _ask(server, "native")
            assert refused.status_code == 503
            assert "'native' could not be loaded" in refused.json()["error"]["message"]
            assert "secret" not in refused.text
        assert gate.count == 1
        assert "a secret path" in caplog.text
        assert broken.users == 0
        assert _ask(server, "pocket").status_code == 200


@pytest.mark.parametrize("keep_alive_s", [0.0, 0.2])
def test_an_idle_model_is_unloaded(folders: dict[str, Path], keep_alive_s: float) -> None:
    with _serving(_model(POCKET), _model(folders["native"]), room=2, keep_alive_s=keep_alive_s) as server:
        for loads in (1, 2):
            assert _ask(server, "native").status_code == 200
            wait(lambda: _states(server) == {"pocket": "not loaded", "native": "not loaded"})
            assert _loads(server, "native") == loads
        health = server.client.get("/health")
        assert (health.status_code, health.json()["loaded"]) == (200, [])
        assert "pool" not in server.client.get("/props").json()
        assert 'kvant_model_loaded{model="native"} 0.0' in server.client.get("/metrics").text


def test_unloading_keeps_the_disk_cache(folders: dict[str, Path], tmp_path: Path) -> None:
    disk = DiskCache(tmp_path)

    def load(model: ServedModel, plain: Callable[[Any], Any], metrics: Any) -> Any:
        service = plain(metrics)
        service.pool.use_disk(disk)
        return service

    model = _model(POCKET, max_kv_size=512)
    plain = model.load
    model.load = lambda metrics: load(model, plain, metrics)
    with _serving(model, _model(folders["native"])) as server:
        wait(lambda: server.client.get("/health").is_success)
        body = CHAT.body("A story of a fox named Pip who lives by the sea. " * 12, 1)
        cached = []
        for _ in range(2):
            cached.append(counts_of(server.client.post(CHAT.path, json=body).json()["usage"])[1])
            assert _ask(server, "native").status_code == 200  # it takes the room of the first
        wait(lambda: not _unload(server, "native") and not server.registry.loaded)
        metrics = server.client.get("/metrics").text
    assert cached[0] == 0
    assert cached[1] >= 128
    assert "kvant_disk_cache_hits_total 0.0" not in metrics  # counters stay when no model is loaded
    assert "kvant_disk_cache_hits_total" in metrics
    disk.close()


def test_unloading_needs_no_collector(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector stops all threads; a model's objects do not refer to each other in a circle."""
    calls: list[int] = []
    monkeypatch.setattr("kvant.machine.gc", SimpleNamespace(collect=lambda: calls.append(1)))
    before = mx.get_active_memory()
    names = ["native", "falcon_h1", "gpt_oss"]
    with _serving(*(_model(folders[name]) for name in names)) as server:
        for name in (*names, *names):
            assert _ask(server, name).status_code == 200
        headers = {"authorization": f"Bearer {server.registry.settings.control_token}"}
        assert server.client.post(CONTROL, json={}, headers=headers).status_code == 200
        wait(lambda: not server.registry.loaded)
        wait(lambda: mx.get_active_memory() - before < 2**20)
    assert calls == []


CONTROL = "/control/unload"


def test_models_are_unloaded_by_hand(folders: dict[str, Path]) -> None:
    with _serving(_model(POCKET), _model(folders["native"]), room=2) as server:
        settings = server.registry.settings
        headers = {"authorization": f"Bearer {settings.control_token}"}

        def post(body: Any) -> httpx2.Response:
            return server.client.post(CONTROL, json=body, headers=headers)

        assert _ask(server, "native").status_code == 200
        with _busy(server, "native"):
            assert post({"model": "native"}).json()["models"] == [
                {"name": "native", "unloaded": False, "requests": 1}
            ]
            assert _states(server)["native"] == "loaded"
        wait(lambda: _states(server)["native"] == "not loaded")
        assert post({"model": "native"}).json()["models"] == []
        assert post({}).json()["models"] == [{"name": "pocket", "unloaded": True, "requests": 0}]
        assert post({"model": "../../etc"}).status_code == 404
        assert post({"modle": "pocket"}).status_code == 400
        assert _ask(server, "pocket").status_code == 200


def _unload(server: Running, model: str) -> list[dict[str, Any]]:
    headers = {"authorization": f"Bearer {server.registry.settings.control_token}"}
    return list(server.client.post(CONTROL, json={"model": model}, headers=headers).json()["models"])


def test_unloading_waits_briefly_for_a_load(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models are unloaded between loads; `kvant stop` gets its answer while another model loads."""
    monkeypatch.setattr("kvant.server.registry.STOP_S", 0.1)
    slow = _model(folders["native"])
    gate = _Gate(slow)
    with _serving(_model(POCKET), slow, room=2) as server, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(_ask, server, "native")
        wait(lambda: gate.count)
        assert _unload(server, "pocket") == [{"name": "pocket", "unloaded": False, "requests": 0}]
        assert _unload(server, "native") == [{"name": "native", "unloaded": False, "requests": 1}]
        gate.open.set()
        assert answer.result(SOON).status_code == 200
        wait(lambda: _states(server) == {"pocket": "not loaded", "native": "not loaded"})
        assert _ask(server, "native").status_code == 200
        assert _states(server)["native"] == "loaded"


@pytest.mark.parametrize("token", ["-", "wrong", "sk-client"])
def test_only_the_servers_user_unloads(token: str) -> None:
    with _serving(_model(POCKET), api_keys=("sk-client",)) as server:
        headers = {"authorization": f"Bearer {token}"}
        for method, path in (("GET", "/control/models"), ("POST", CONTROL)):
            assert server.client.request(method, path, json={}, headers=headers).status_code == 403
        control = {"authorization": f"Bearer {server.registry.settings.control_token}"}
        assert server.client.get("/v1/models", headers=control).status_code == 401
        assert server.client.get("/control/models", headers=control).status_code == 200


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../native", "./native", "nat*", "*", "", "a" * 5000, "native\n"]
)
def test_a_name_is_no_path(folders: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folders["native"].parent)
    with _serving(_model(POCKET), _model(folders["native"])) as server:
        refused = _ask(server, name)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert server.client.get("/live", params={"model": name}).status_code == 404
        assert _states(server) == {"pocket": "loaded", "native": "not loaded"}


def test_the_end_while_a_model_loads(folders: dict[str, Path]) -> None:
    """Nobody waits for the load: not the client, and not the server before it ends."""
    slow = _model(folders["native"])
    gate = _Gate(slow)
    with _serving(_model(POCKET), slow, room=2) as server, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(_ask, server, "native")
        wait(lambda: gate.count)
        ending = asyncio.run_coroutine_threadsafe(server.server.end(), server.loop)
        refused = answer.result(SOON)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert "the server is shutting down" in refused.json()["error"]["message"]
        ending.result(SOON)
        assert not gate.open.is_set()
        gate.open.set()


def test_bytes_of_all_models(folders: dict[str, Path]) -> None:
    """MLX is held to what the loaded models planned together."""
    first = replace_planned(_model(POCKET), arrays=3 * 10**9)
    second = replace_planned(_model(folders["native"]), arrays=5 * 10**9)
    before = mx.set_memory_limit(10**10)
    try:
        with _serving(first, second, room=2) as server:
            assert _limit() == 3 * 10**9
            assert _ask(server, "native").status_code == 200
            assert _limit() == 8 * 10**9
    finally:
        mx.set_memory_limit(before)


def replace_planned(model: ServedModel, **changes: int) -> ServedModel:
    plain = model.load
    model.planned = {**model.planned, **changes}

    def load(metrics: Any) -> Any:
        service = plain(metrics)
        service.planned = dict(model.planned)
        return service

    model.load = load
    return model


def _limit() -> int:
    limit = mx.set_memory_limit(10**10)
    mx.set_memory_limit(limit)
    return limit

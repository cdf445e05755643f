"""What a server says of itself, against what it did: its metrics, and the page, with nothing of any text
in it.
"""

import asyncio
import json
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request as HttpRequest
from support.interfaces import CHAT
from support.pools import tiny_model
from support.server import SOON, Running, start, wait

from kvant.cache import CacheOptions
from kvant.cache.pool import Pool
from kvant.engine.request import Request
from kvant.engine.scheduler import Scheduler
from kvant.server import page
from kvant.server import status as routes
from kvant.server.errors import ApiError
from kvant.server.live import Live
from kvant.server.settings import Settings

ASK = {"model": "pocket", "prompt": "The bear " * 80, "max_tokens": 20, "ignore_eos": True, "temperature": 0}


def _samples(server: Running) -> dict[str, float]:
    """All samples of /metrics by name and labels."""
    answer = server.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        assert family.documentation.endswith(".")
        for sample in family.samples:
            assert sample.name.startswith("kvant_")
            labels = ",".join(f"{name}={value}" for name, value in sample.labels.items())
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_metrics_count_what_happened(server: Running) -> None:
    wait(lambda: not server.client.get("/health").json()["running"])  # an answer whose client has gone
    before = _samples(server)
    usages = [server.client.post("/v1/completions", json=ASK).json()["usage"] for _ in range(2)]
    after = _samples(server)

    def more(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    assert usages[1]["prompt_tokens_details"]["cached_tokens"] >= 128
    assert more("kvant_prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert more("kvant_cached_tokens_total") == cached
    assert more("kvant_generated_tokens_total") == 40
    assert more("kvant_time_to_first_token_seconds_count") == 2
    assert more("kvant_time_between_tokens_seconds_count") == 38
    assert 0 < more("kvant_time_between_tokens_seconds_sum") < 10
    assert more("kvant_answers_total{reason=length}") == 2
    assert more("kvant_http_requests_total{route=/v1/completions,status=200}") == 2
    assert after["kvant_pool_bytes"] == server.service.pool.nbytes
    assert after["kvant_pages"] == 16
    assert after["kvant_engine_alive"] == 1
    assert after["kvant_requests_waiting"] == after["kvant_answers_running"] == 0


def test_paths_that_are_none_have_one_counter(server: Running) -> None:
    """A stranger's paths would fill the memory."""
    before = len(_samples(server))
    for number in range(50):
        assert server.client.get(f"/nothing/{number}").status_code == 404
        assert server.client.get(f"/v1/models/{number}").status_code == 404
    assert len(_samples(server)) <= before + 2


def test_health_and_models(server: Running) -> None:
    found = server.client.get("/v1/models").json()
    assert (found["object"], found["has_more"], found["first_id"]) == ("list", False, "pocket")
    (only,) = found["data"]
    assert (only["id"], only["object"], only["type"], only["max_model_len"]) == (
        "pocket",
        "model",
        "model",
        512,
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", only["created_at"])
    assert server.client.get("/v1/models/pocket").json() == only
    idle = {"status": "ok", "waiting": 0, "running": 0, "loaded": ["pocket"]}
    assert server.client.get("/health").json() == idle
    missing = server.client.get("/v1/models/owner/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_props_say_what_is_in_force(server: Running) -> None:
    service, found = server.service, server.client.get("/props").json()
    sizes = {
        "sequences": 4,
        "tokens_of_a_sequence": 512,
        "pages": 16,
        "page_tokens": 128,
        "bytes": service.pool.nbytes,
    }
    sizes["checkpoints"] = 0
    cache = {"format": "8 bits in groups of 32, keys rotated"}
    cache |= {"kv_bits": 8, "kv_group_sizes": [32], "kv_bias_split": True, "kernels": "unfused"}
    assert found["pool"] == sizes | cache
    engine = {"prefill_step_size": 512, "deterministic": False, "max_queue": 16, "draft": "none"}
    drafts = service.engine.drafts
    assert found["engine"] == engine | {"drafted_tokens": drafts.drafted, "accepted_tokens": drafts.accepted}
    assert found["environment"]["versions"]["mlx"] == mx.__version__
    assert found["memory"]["active"] > service.pool.nbytes + service.model.nbytes
    assert found["key_required"] is False


def test_tokenize(server: Running, pocket: Any) -> None:
    tokenizer = pocket[1]
    text = "The fox named Pip."
    found = server.client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert found["tokens"] == tokenizer.encode(text)
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 512)
    assert found["token_strs"] == tokenizer.convert_ids_to_tokens(found["tokens"])
    messages = [{"role": "user", "content": text}]
    found = server.client.post("/tokenize", json={"model": "pocket", "messages": messages}).json()
    assert found["tokens"] == tokenizer.apply_chat_template(messages, add_generation_prompt=True)


def test_what_cannot_be_tokenized(server: Running) -> None:
    for body, status, said in (
        ({}, 400, "either prompt or messages"),
        ({"prompt": "a", "messages": []}, 400, "either prompt or messages"),
        ({"prompt": ""}, 400, "the prompt is empty"),
        ({"prompt": "a", "model": "other"}, 404, "'other' is not served"),
    ):
        answer = server.client.post("/tokenize", json=body)
        assert answer.status_code == status
        assert said in answer.json()["error"]["message"]


def test_wrong_methods_and_paths(server: Running) -> None:
    for method, path, status in (
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("GET", "/nothing", 404),
    ):
        answer = server.client.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert answer.headers["x-request-id"] == answer.headers["request-id"]
    assert server.client.get("/v1/messages").json()["type"] == "error"
    for path, said in (
        ("/chat/completions", "there is no /chat/completions; expected /v1/chat/completions"),
        ("/api/tags", "Ollama's interface is not supported; expected one of /v1/chat/completions, "),
        ("/v1/rerank", "there is no /v1/rerank; expected one of /v1/chat/completions, "),
    ):
        assert said in server.client.post(path, json={}).json()["error"]["message"]


def test_names_of_a_model(
    pocket: Any, pocket_folder: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my-model"
    folder.symlink_to(pocket_folder)
    monkeypatch.chdir(tmp_path)
    for given in (str(folder), "./my-model", "my-model"):
        aliases = ("gpt-4o", "claude-*")
        settings = Settings(model=given, sequences=1, max_kv_size=128, aliases=aliases)
        registry = start(settings, *pocket)
        try:
            assert registry.models[0].names == tuple(dict.fromkeys(["my-model", given]))
            for name in (given, "gpt-4o", "claude-sonnet-4-5"):
                assert registry.find(name).name == "my-model"
            for name in ("gpt-4", "my-claude-3"):
                with pytest.raises(ApiError, match=r"expected 'my-model' or .*'claude-.*--alias"):
                    registry.find(name)
            state = SimpleNamespace(registry=registry)
            request = HttpRequest({"type": "http", "app": SimpleNamespace(state=state)})
            listed = json.loads(bytes(asyncio.run(routes.models(request)).body))
            assert [each["id"] for each in listed["data"]] == ["my-model", "gpt-4o"]
            assert (listed["first_id"], listed["last_id"]) == ("my-model", "gpt-4o")
            assert listed["alias_patterns"] == ["claude-*"]
        finally:
            registry.close()


FILES = sorted(page.FOLDER.iterdir())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_file(path: Path, server: Running) -> None:
    response = server.client.get(f"/page/{path.name}")
    assert response.content == path.read_bytes()
    assert response.headers["content-type"].split(";")[0] == page.TYPES[path.suffix]
    assert response.headers["content-security-policy"] == page.POLICY
    assert response.headers["x-content-type-options"] == "nosniff"
    again = server.client.get(f"/page/{path.name}", headers={"if-none-match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == page.POLICY


def test_the_first_one_and_no_other_file(server: Running) -> None:
    response = server.client.get("/")
    assert response.content == (page.FOLDER / "index.html").read_bytes()
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert server.client.head("/").status_code == 200
    assert server.client.post("/").status_code == 405
    for name in ("nothing.js", "..%2fpage.py", "%2e%2e/live.py", "page.py"):
        assert server.client.get(f"/page/{name}").status_code == 404


def test_the_policy_lets_in_nothing_but_the_servers_own() -> None:
    rules = dict(rule.strip().split(" ", 1) for rule in page.POLICY.split(";"))
    assert set(rules.values()) <= {"'none'", "'self'", "'script'"}
    assert rules["default-src"] == "'none'"


def test_nothing_is_absolute() -> None:
    for path in FILES:
        text = path.read_text()
        found = set(re.findall(r"\b(?:https?|wss?):/*[\w.]+", text))
        assert found <= {"http://www.w3.org"}, path.name  # the namespace of SVG
        assert not re.search(r"""(?:src|href|fetch|import|from)\s*[=(]?\s*["'`]/""", text), path.name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text
        )
    index = (page.FOLDER / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?! type=\"module\" src=)", index)


PAGE = 128


def spread(stretches: list[list[int]]) -> list[int]:
    """The pages of stretches."""
    return [page for first, count in stretches for page in range(first, first + count)]


def check(state: dict[str, Any], pool: Pool, scheduler: Scheduler) -> None:
    """The pages of a state are those of the pool."""
    counts = scheduler.counts
    assert [state[name] for name in ("waiting", "prefilling", "running")] == list(counts[:3])
    held = scheduler.reserved_answers
    assert [(each["tokens"], each["reserved"]) for each in state["sequences"]] == [
        (sequence.length, sequence.max_tokens) for _, _, sequence in held
    ]
    for place, (part, told) in enumerate(zip(pool.groups, state["parts"], strict=True)):
        pages = [spread(each["pages"]) for each in told["sequences"]]
        assert pages == [sequence.tables[place].pages for _, _, sequence in held]
        assert [each["start"] for each in told["sequences"]] == [
            each.tables[place].start for _, _, each in held
        ]
        kept = spread(told["kept"])
        assert not set(kept) & {page for each in pages for page in each}
        used = {page for each in (*pages, kept) for page in each}
        assert len(used) == part.pages.num - part.pages.num_free


def step(scheduler: Scheduler, live: Live, pool: Pool, known: int) -> tuple[dict[str, Any], int]:
    """The state after a step, held against the pool, and how many tokens came."""
    new = scheduler.step()
    live._looked, live._asked = 0.0, time.perf_counter()  # it is time
    live.observe(scheduler, new)
    state = live.read(known)
    check(state, pool, scheduler)
    return state, sum(token.token is not None for token in new)


def test_the_state_is_the_pools_and_no_text_is_in_it(pocket: Any) -> None:
    model = pocket[0]
    pool = model.make_pool(PAGE * 24, sequences=5)
    scheduler, live = Scheduler(model, pool, max_batch=5), Live(pool)
    page = sum(layer.nbytes for layer in pool.layers) / 24
    assert live.facts["parts"] == [{"window": None, "layers": 4, "pages": 24, "page_bytes": page}]
    live.read()
    text = [7] * 300
    gone = Request([9] * 20, max_tokens=50)
    for request in (Request(text, max_tokens=9, answers=2), Request([*text, 8], max_tokens=4), gone):
        scheduler.submit(request)
    known, numbers = 0, set()
    while not scheduler.idle:
        if known >= 10:
            scheduler.cancel(gone)
        state, more = step(scheduler, live, pool, known)
        known += more
        assert (state["generated"], len(state["tokens"])) == (known, more)
        own = [each["number"] for each in state["sequences"]]
        assert len(set(own)) == len(own)
        numbers |= set(own)
    assert numbers <= {1, 2, 3, 4, 5}
    assert state["sequences"] == []
    assert spread(state["parts"][0]["kept"])
    assert live.read()["tokens"] == live.read(99)["tokens"] == []  # only of who says how many it knows
    state = live.read(0)
    assert sum(ms is None for _, _, ms in state["tokens"]) == 4  # of four answers
    assert all(ms > 0 for _, _, ms in state["tokens"] if ms is not None)
    assert state["tokens"] == sorted(state["tokens"], key=lambda token: token[1])
    names = "pool time waiting prefilling running sequences parts generated tokens"
    assert set(state) == set(names.split())


def test_pages_that_move_with_a_window(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, (None, 100))
    pool = model.make_pool(PAGE * 12, sequences=2, prefill_step_size=64, options=CacheOptions(kv_bits=0))
    scheduler, live = Scheduler(model, pool, max_batch=2), Live(pool)
    assert [part["window"] for part in live.facts["parts"]] == [None, 100]
    live.read()
    for prompt in ([5] * 400, [6] * 30):
        scheduler.submit(Request(prompt, max_tokens=20))
    starts = set()
    while not scheduler.idle:
        state, _ = step(scheduler, live, pool, 0)
        starts |= {each["start"] for each in state["parts"][1]["sequences"]}
    assert starts >= {0, PAGE}


def test_an_error_ends_the_watching_and_not_the_engine(pocket: Any, caplog: pytest.LogCaptureFixture) -> None:
    live = Live(pocket[0].make_pool(PAGE, sequences=1))
    live.observe(None, [])  # type: ignore[arg-type]
    assert "no longer watched" in caplog.text
    assert live.read(0)["tokens"] == []


def test_who_asks_sees_an_answer(server: Running) -> None:
    known = server.client.get("/live", params={"known": "x"}).json()["generated"]
    body = CHAT.body("A duck named Quirin.", 60, ignore_eos=True)
    asking = threading.Thread(target=server.client.post, args=(CHAT.path,), kwargs={"json": body})
    asking.start()
    seen: list[Any] = []
    state: dict[str, Any] = {}
    end = time.monotonic() + SOON
    while len(seen) < 60 or state["running"]:
        assert time.monotonic() < end
        answered = server.client.get("/live", params={"known": known})
        state = answered.json()
        assert state["pool"] == server.service.live.facts
        assert "Quirin" not in answered.text
        seen += state["tokens"]
        known = state["generated"]
    asking.join()
    assert len(seen) == 60

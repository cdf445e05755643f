"""The page: its files refer to nothing elsewhere, and it is told what the pool does, with nothing of any text in it."""

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.interfaces import CHAT
from support.pools import tiny_model
from support.server import SOON, Running

from kvant.cache.pool import Pool
from kvant.engine.request import Request
from kvant.engine.scheduler import Scheduler
from kvant.server import page
from kvant.server.live import Live

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
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)
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
    held = scheduler.held
    assert [(each["tokens"], each["reserved"]) for each in state["sequences"]] == [
        (sequence.length, sequence.max_tokens) for _, _, sequence in held
    ]
    for place, (part, told) in enumerate(zip(pool.parts, state["parts"], strict=True)):
        pages = [spread(each["pages"]) for each in told["sequences"]]
        assert pages == [sequence.tables[place].pages for _, _, sequence in held]
        assert [each["start"] for each in told["sequences"]] == [each.tables[place].start for _, _, each in held]
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
    pool = model.make_pool(PAGE * 12, sequences=2, prefill_step_size=64, kv_bits=0)
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

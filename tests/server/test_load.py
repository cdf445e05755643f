"""Far more requests than the server takes at once, from clients of every kind: scripts/load_test.py, shortened."""

import os
from typing import Any

import load_test
from support.counts import count
from support.server import Running

SOUND: dict[str, Any] = {
    "statuses": {"200": 3, "400": 1, "429": 9},
    "wrong": [],
    "health_ms": {"p100": 9.0},
    "memory_bytes": [1 << 30, 1 << 30],
    "idle_afterwards": True,
}


def test_only_answers_that_are_allowed_and_every_page_is_free_afterwards(server: Running) -> None:
    figures = load_test.load(server.url, os.getpid(), count(1.5, 20.0), count(60, 200))
    assert load_test.judge(figures, health_ms=5000) == []
    assert figures["health_asked"] > 3
    assert set(figures["kinds"]) == set(load_test.KINDS)


def test_what_is_wrong_is_found() -> None:
    assert load_test.judge(SOUND, 100) == []
    for change in ({"statuses": {"200": 1, "400": 1, "429": 1, "500": 1}}, {"idle_afterwards": False}):
        (found,) = load_test.judge(SOUND | change, 100)
        assert found.startswith(*change)

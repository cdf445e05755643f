"""Far more requests than the server takes at once, from clients of every kind: scripts/load_test.py, shortened."""

import os

import load_test
from support.counts import count
from support.server import Running


def test_only_answers_that_are_allowed_and_every_page_is_free_afterwards(server: Running) -> None:
    figures = load_test.load(server.url, os.getpid(), count(1.5, 20.0), count(60, 200))
    assert load_test.judge(figures, health_ms=5000) == []
    for change in ({"statuses": {"200": 1, "400": 1, "429": 1, "500": 1}}, {"idle_afterwards": False}):
        (found,) = load_test.judge(figures | change, health_ms=5000)
        assert found.startswith(*change)
    assert figures["health_asked"] > 3
    assert set(figures["kinds"]) == set(load_test.KINDS)

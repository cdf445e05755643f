"""The frame of scripts/claims.py, and that the engines whose times it compares compute the same."""

from pathlib import Path

import mlx.core as mx
import pytest
from claims import TINY, compared, expert_engines, expert_round, in_turns
from support.numbers import relative_error

from kvant.tools.bench.shapes import write_random


def test_ways_take_turns_and_ratios_are_of_the_same_round() -> None:
    asked: list[str] = []

    def way(name: str) -> float:
        asked.append(name)
        return len(asked)

    found = in_turns({"a": lambda: way("a"), "b": lambda: way("b")}, 2)
    assert asked == ["b", "a", "a", "b", "b", "a"]
    assert found == {"a": [3, 6], "b": [4, 5]}
    assert compared(found) == ["4.50", "4.50, 1.08 (0.83-1.33)"]


@pytest.mark.parametrize("bits", [0, 4])
def test_the_engines_agree(tmp_path: Path, bits: int) -> None:
    write_random(TINY, tmp_path, bits=bits)
    engines = expert_engines(tmp_path)
    steps = [start() for start in engines.values()]
    for ids in (mx.arange(100)[None], mx.array([[7]])):
        expected, *others = [step(ids)[0] for step in steps]
        assert len(others) == 2
        assert all(relative_error(logits, expected) < 1e-4 for logits in others)
    assert all(time > 0 for time in expert_round(engines["kvant"]))

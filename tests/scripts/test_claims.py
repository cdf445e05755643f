"""The frame of scripts/claims.py; engines whose times are compared compute the same; a cache changes
nothing.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from claims import (
    TINY,
    compared,
    earlier_rows_differences,
    expert_engines,
    expert_round,
    greedy_tokens,
    last_row_difference,
)
from support.numbers import relative_error

from kvant.models import Decoder
from kvant.tools.bench.shapes import write_random
from kvant.tools.statistics import in_turns


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


@pytest.mark.parametrize("tokens", [2, 17, 48])
def test_a_token_changes_nothing_before_it_and_the_last_row_alone_is_that_of_all(tokens: int) -> None:
    assert last_row_difference(tokens) < 1e-6
    outputs, cached = earlier_rows_differences(tokens)
    assert outputs < 1e-6
    assert cached == 0


def test_the_loop_without_a_cache_gives_the_same_tokens(
    pocket: tuple[Decoder, Any], heldout_ids: list[int]
) -> None:
    model, _ = pocket
    prompt = heldout_ids[:24]
    assert greedy_tokens(model, prompt, 48, cached=True) == greedy_tokens(model, prompt, 48, cached=False)

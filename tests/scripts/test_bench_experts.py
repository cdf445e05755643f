"""The engines of scripts/bench_experts.py compute the same, so that their times can be compared."""

from pathlib import Path

import mlx.core as mx
import pytest
from bench_experts import ENGINES, SHAPES, TINY, one_round
from support.numbers import relative_error

from kvant.tools.bench.shapes import write_random


@pytest.mark.parametrize("bits", [0, 4])
def test_the_engines_agree(tmp_path: Path, bits: int) -> None:
    write_random(TINY, tmp_path, bits=bits)
    engines = [make(tmp_path) for make in ENGINES.values()]
    steps = [engine.start() for engine in engines]
    for ids in (mx.arange(100)[None], mx.array([[7]])):
        expected, *others = [step(ids)[0] for step in steps]
        assert others
        assert all(relative_error(logits, expected) < 1e-4 for logits in others)
    assert all(time > 0 for time in one_round(engines[-1]))


def test_a_token_reads_few_experts_of_the_large_shape() -> None:
    large = SHAPES[-1]
    assert (large.num_experts, large.num_experts_per_tok) == (64, 8)

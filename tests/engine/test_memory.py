"""Memory of a run: it does not grow; a long prefill into a quantized cache takes no more than mlx-lm's plain one."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from support.counts import count

from kvant.engine.run import Run
from kvant.models import Decoder

TOKENS = count(120, 1020)
PROMPT = [(7 * i) % 1000 for i in range(1900)]


@pytest.mark.parametrize("bits", [8, 0])
def test_active_memory_does_not_grow(pocket: tuple[Decoder, Any], bits: int) -> None:
    model, _ = pocket
    active = []
    for _ in Run(model, PROMPT[:100], model.make_cache(TOKENS + 100, kv_bits=bits), max_tokens=TOKENS):
        mx.synchronize()
        active.append(mx.get_active_memory())
    assert len(active) == TOKENS
    assert max(active[20:]) - active[20] < 2**16  # a step's own arrays; a cached token takes 4 kB at 0 bits


def test_a_long_prefill_peaks_no_higher_than_mlx_lms_with_its_default_cache(
    pocket: tuple[Decoder, Any], pocket_mlx_lm: nn.Module
) -> None:
    model, _ = pocket

    def peak(run: Callable[[], object]) -> int:
        mx.synchronize()
        mx.clear_cache()
        resting = mx.get_active_memory()
        mx.reset_peak_memory()
        run()
        mx.synchronize()
        return mx.get_peak_memory() - resting

    def mlx_lm() -> None:
        options = {"prompt_cache": make_prompt_cache(pocket_mlx_lm), "prefill_step_size": 512}
        next(generate_step(mx.array(PROMPT), pocket_mlx_lm, max_tokens=1, **options))

    ours = peak(lambda: next(Run(model, PROMPT, model.make_cache(len(PROMPT) + 1, kv_bits=8), max_tokens=1)))
    assert ours <= peak(mlx_lm)

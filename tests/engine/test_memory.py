"""Memory of a run: it does not grow; a long prefill into a quantized cache takes no more than mlx-lm's plain one."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from support.counts import count

from kvant.engine.run import Run, prefill
from kvant.models import Decoder

TOKENS = count(220, 1020)
STEP_SIZE = 512


def _prompt(count: int) -> list[int]:
    return [(7 * i) % 1000 for i in range(count)]


@pytest.mark.parametrize("bits", [8, 0])
def test_active_memory_does_not_grow(pocket: tuple[Decoder, Any], bits: int) -> None:
    model, _ = pocket
    prompt = _prompt(100)
    cache = model.make_cache(TOKENS + 100, kv_bits=bits)
    steps = Run(model, prompt, cache, max_tokens=TOKENS, prefill_step_size=STEP_SIZE)
    active = []
    for _ in range(TOKENS):
        next(steps)
        mx.synchronize()
        active.append(mx.get_active_memory())
    assert max(active[20:]) - active[20] < 2**16  # a step's own arrays; a cached token takes 4 kB at 0 bits


def test_a_long_prefill_peaks_no_higher_than_mlx_lms_with_its_default_cache(
    pocket: tuple[Decoder, Any], pocket_mlx_lm: nn.Module
) -> None:
    model, _ = pocket
    prompt = _prompt(1900)

    def peak(run: Any) -> int:
        mx.synchronize()
        mx.clear_cache()
        resting = mx.get_active_memory()
        mx.reset_peak_memory()
        run()
        mx.synchronize()
        return mx.get_peak_memory() - resting

    def kvant_run() -> None:
        mx.eval(prefill(model, prompt, model.make_cache(len(prompt) + 1, kv_bits=8), step_size=STEP_SIZE))

    def mlx_lm_run() -> None:
        cache = make_prompt_cache(pocket_mlx_lm)
        steps = generate_step(
            mx.array(prompt), pocket_mlx_lm, max_tokens=1, prompt_cache=cache, prefill_step_size=STEP_SIZE
        )
        next(steps)

    ours, theirs = peak(kvant_run), peak(mlx_lm_run)
    print(f"kvant {ours / 1e6:.1f} MB, mlx-lm {theirs / 1e6:.1f} MB, caches included")
    assert ours <= theirs

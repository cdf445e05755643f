"""Compiled steps of mlx-lm's models through kvant's cache, for tests/bridge/test_traced.py: prints JSON.

Run in a process of its own: see support/compiled_runs.py, which also says why the compiler on PATH does nothing.
"""

import ctypes
import json
from pathlib import Path
from typing import Any

import kvant  # noqa: F401  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx

from kvant.bridge import BridgedCache, make_model_cache
from kvant.bridge.config import BridgedConfig
from kvant.bridge.model import BridgedModel
from kvant.bridge.traced import can_trace
from kvant.engine.run import Run
from support.compiled_runs import NO_FUSE
from support.counts import count
from support.fused_path import pretend_gpu
from support.numbers import relative_error
from support.tiny_models import build

PROMPT = [(7 + 31 * i) % 97 for i in range(12)]
STEPS = count(16, 30)
# windows, sinks, a state, latent attention, a state beside keys
MODELS = ["llama", "gpt_oss", "qwen3_next", "deepseek_v3", "falcon_h1"]
# both widths of one model, and one of the others
BITS = {name: count((0, 8, 4) if name == "llama" else (0, 8), (0, 8, 4)) for name in MODELS}

# chunks; the position from the number of rows; a boolean mask that is added
REFUSED = ["llama4", "afm7", "phi3small"]


def traceable(name: str) -> bool:
    """Whether a model's step is."""
    model, _ = build(name)
    cache = make_model_cache(model, 64)
    fed(model, cache, PROMPT)
    return can_trace(model, cache)


def fed(model: Any, cache: BridgedCache, tokens: list[int]) -> mx.array:
    """The logits after a step that is not compiled, and committed."""
    inputs = mx.array([tokens])
    cache.begin(inputs)
    logits = model(inputs, cache=cache)[:, -1]
    mx.eval(logits, cache.state)
    cache.commit()
    return logits


def run(name: str, bits: int, **changes: Any) -> list[Any]:
    """The worst error against unfused steps that are not compiled, how often it was traced, and bytes it grew by."""
    model, _ = build(name, **changes)
    plain, cache = (make_model_cache(model, 64, quant_bit=bits, kernels=kernels) for kernels in ("unfused", None))
    for each in (plain, cache):
        fed(model, each, PROMPT)
    before = cache.used
    assert can_trace(model, cache)
    assert (cache.offset, cache.used) == (len(PROMPT), before)
    traces = []

    def step(token: mx.array, offset: mx.array) -> mx.array:
        traces.append(1)
        return model(token[None], cache=cache.compiled_views(offset, 64))[:, -1]

    compiled = mx.compile(step, inputs=cache.compiled_state, outputs=cache.compiled_state)
    worst, active, used = 0.0, 0, cache.used
    for i in range(STEPS):
        token = mx.array([7 * i % 97])
        cache.begin(token[None])
        logits = compiled(token, mx.array(cache.offset))
        mx.eval(logits, cache.state)
        cache.commit()
        worst = max(worst, relative_error(logits, fed(model, plain, token.tolist())))
        if i == STEPS // 2:
            active = mx.get_active_memory()
    assert cache.used == used
    return [worst, len(traces), mx.get_active_memory() - active]


def generated(name: str, compiled: bool | None) -> Any:
    """Tokens of kvant's loop, and whether its step was compiled; a text: why it was refused."""
    module, _ = build(name)
    model = BridgedModel(module, BridgedConfig(name, 100_000, None), mx.float32)
    run = Run(model, PROMPT, model.make_cache(64, quant_bit=0), max_tokens=STEPS, compiled=compiled)
    try:
        return [[token for token, _ in run], run._step_function is not None]
    except ValueError as error:
        return str(error)


def main() -> None:
    """Every model and width."""
    library = ctypes.CDLL(str(Path(mx.__file__).parent / "lib" / "libmlx.so"))
    library._ZN3mlx4core16set_compile_modeENS0_11CompileModeE(NO_FUSE)
    found = {
        "runs": {f"{name}, {bits} bits": run(name, bits) for name in MODELS for bits in BITS[name]},
        "generated": {name: [generated(name, c) for c in (True, False)] for name in ("gpt_oss", "qwen3_next")},
        "refused to generate": [generated("llama4", c) for c in (True, None)],
        "refused": {name: traceable(name) for name in REFUSED},
    }
    pretend_gpu()
    found["fused"] = {f"gpt_oss, {bits} bits": run("gpt_oss", bits, head_dim=64) for bits in (0, 8)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()

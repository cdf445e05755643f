"""Compiled steps of mlx-lm's models through kvant's cache, for tests/bridge/test_traced.py: prints JSON.

Run in a process of its own: see support/without_compiler.py.
"""

import json
from typing import Any

import kvant  # noqa: F401  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx

from kvant.bridge import BridgedCache, make_model_cache
from kvant.bridge.config import BridgedConfig
from kvant.bridge.model import BridgedModel
from kvant.bridge.traced import can_trace
from kvant.cache import CacheOptions
from kvant.engine.run import Run
from support.counts import count
from support.fused_path import pretend_gpu
from support.numbers import relative_error
from support.tiny_models import build
from support.without_compiler import never_fuse

PROMPT = [(7 + 31 * i) % 97 for i in range(12)]
STEPS = count(16, 30)
SIZES = [1, 2, 1, 8, 4]  # tokens of the first steps, each is another trace; then one a step
# windows, sinks, a state, latent attention, a state beside keys
MODELS = ["llama", "gpt_oss", "qwen3_next", "deepseek_v3", "falcon_h1"]
STATES = ["qwen3_next", "falcon_h1"]
# both widths of one model, and one of the others
BITS = {name: count((0, 8, 4) if name == "llama" else (0, 8), (0, 8, 4)) for name in MODELS}

# chunks; the position from the number of rows; a boolean mask that is added
REFUSED = ["llama4", "afm7", "phi3small"]


def traceable(name: str) -> bool:
    """Whether a model's step is."""
    model, _ = build(name)
    cache = make_model_cache(model, 64)
    fed(model, cache, PROMPT)
    return any(can_trace(model, cache, size) for size in (1, 2))


def fed(model: Any, cache: BridgedCache, tokens: list[int], kept: int | None = None) -> mx.array:
    """The logits of a step that is not compiled; the first so many tokens of it are committed, or all."""
    inputs = mx.array([tokens])
    cache.begin(inputs)
    logits = model(inputs, cache=cache)[0]
    mx.eval(logits, cache.state)
    cache.commit(kept)
    return logits


def run(name: str, bits: int, **changes: Any) -> list[Any]:
    """The worst error against unfused steps that are not compiled, how often it was traced, and bytes it grew by."""
    model, _ = build(name, **changes)
    plain, cache = (
        make_model_cache(model, 64, CacheOptions(kv_bits=bits, kernels=kernels)) for kernels in ("unfused", None)
    )
    for each in (plain, cache):
        fed(model, each, PROMPT)
    before = cache.used
    assert all(can_trace(model, cache, size) for size in {*SIZES})
    assert (cache.offset, cache.used) == (len(PROMPT), before)
    traces = []

    def step(tokens: mx.array, offset: mx.array) -> mx.array:
        traces.append(len(tokens))
        return model(tokens[None], cache=cache.compiled_views(offset, 64)).squeeze(0)

    compiled = mx.compile(step, inputs=cache.compiled_state, outputs=cache.compiled_state)
    worst, active, used = 0.0, 0, cache.used
    for i, size in enumerate([*SIZES, *[1] * (STEPS - len(SIZES))]):
        tokens = [7 * (i + j) % 97 for j in range(size)]
        # of a draft's tokens the first half; a state takes all
        kept = size if name in STATES else -(-size // 2)
        cache.begin(mx.array([tokens]), size)
        logits = compiled(mx.array(tokens), mx.array(cache.offset))
        mx.eval(logits, cache.state)
        cache.commit(kept)
        worst = max(worst, relative_error(logits, fed(model, plain, tokens, kept)))
        if i == STEPS // 2:
            active = mx.get_active_memory()
    assert cache.used == used
    return [worst, traces, mx.get_active_memory() - active]


def generated(name: str, compiled: bool | None) -> Any:
    """Tokens of kvant's loop, and whether its step was compiled; a text: why it was refused."""
    module, _ = build(name)
    model = BridgedModel(module, BridgedConfig(name, 100_000, None), mx.float32)
    run = Run(model, PROMPT, model.make_cache(64, kv_bits=0), max_tokens=STEPS, compiled=compiled)
    try:
        return [[token for token, _ in run], run._step_function is not None]
    except ValueError as error:
        return str(error)


def main() -> None:
    """Every model and width."""
    never_fuse()
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

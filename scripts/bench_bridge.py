"""A decode step of an mlx-lm model with kvant's cache, against mlx-lm's own caches. Prints a table, then JSON.

Run: python scripts/bench_bridge.py [blocks]. One process, one BLAS; the caches take turns, a block of steps each. The
model is llama-like, with random float32 weights. Every cache holds 128 or 1,500 tokens when it begins.

- mlx-lm: mlx-lm's loop, which queues the next step before it waits for a token, with its own cache.
- list: the same loop with ``kvant.make_prompt_cache``.
- loop: kvant's loop, as for a bridged folder: ``make_model_cache``, and positions turned by matrices on a CPU.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvant  # isort: skip  (before MLX: it loads a faster BLAS)
import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models import llama

from kvant.blas import loaded
from kvant.bridge import BridgedCache, make_model_cache
from kvant.bridge.rope import rotate_by_matrices

RESULT = Path(__file__).parent / "results" / "bridge-cpu.json"
SHAPE = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
CONTEXTS = (128, 1500)
STEPS = 8  # a block; the first is not counted
GROUP = 32
Step = Callable[[Any, mx.array], float]


def main() -> None:
    """Measure, print, record."""
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    models = [_model(), _model()]
    rotate_by_matrices(models[1])
    found: dict[str, dict[str, list[float]]] = {}
    for context in CONTEXTS:
        runs = _runs(models, context, blocks)
        prompt = mx.array([[7 * i % SHAPE["vocab_size"] for i in range(context)]])
        for model, cache, _ in runs.values():
            if isinstance(cache, BridgedCache):
                cache.begin(prompt)
            mx.eval(model(prompt, cache=cache)[:, -1])
            if isinstance(cache, BridgedCache):
                cache.commit()
        times: dict[str, list[float]] = {name: [] for name in runs}
        for block in range(blocks):
            for name, (model, cache, loop) in sorted(runs.items(), key=lambda item: item[0], reverse=block % 2 == 1):
                times[name] += loop(model, cache)[1:]
        found[str(context)] = times
    record = {
        "shape": SHAPE,
        "mlx": mx.__version__,
        "blas": loaded(),
        "blocks": blocks,
        "ms": {context: {name: _ms(times) for name, times in runs.items()} for context, runs in found.items()},
        "ratio": {
            context: {
                name: round(statistics.median(times) / statistics.median(runs["mlx-lm 0"]), 3)
                for name, times in runs.items()
            }
            for context, runs in found.items()
        },
    }
    for context, ratios in record["ratio"].items():
        print(f"{context} tokens: " + ", ".join(f"{name} {ratio}" for name, ratio in ratios.items()))
    RESULT.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    print(json.dumps(record))


def _model() -> llama.Model:
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs(model_type="llama", **SHAPE))
    mx.eval(model.parameters())
    return model


def _runs(models: list[llama.Model], context: int, blocks: int) -> dict[str, tuple[llama.Model, Any, Any]]:
    """By name: a model, a cache and a loop."""
    size = context + blocks * (STEPS + 1) + 1
    runs: dict[str, tuple[llama.Model, Any, Any]] = {
        "mlx-lm 0": (models[0], mlx_lm_cache.make_prompt_cache(models[0]), _mlx_lm_loop)
    }
    for bits in (8, 4):
        quantized = [mlx_lm_cache.QuantizedKVCache(GROUP, bits) for _ in models[0].layers]
        runs[f"mlx-lm {bits}"] = models[0], quantized, _mlx_lm_loop
    for bits in (8, 4, 0):
        listed = kvant.make_prompt_cache(models[0], size, kv_bits=bits, kv_group_size=GROUP)
        runs[f"list {bits}"] = models[0], listed, _mlx_lm_loop
        own = make_model_cache(models[1], size, quant_bit=bits, quant_group=GROUP)
        runs[f"loop {bits}"] = models[1], own, _kvant_loop
    return runs


def _mlx_lm_loop(model: llama.Model, cache: Any) -> list[float]:
    """Seconds of each step, as mlx_lm.generate_step makes them."""
    token = _next(model, cache, mx.array([5]))
    mx.async_eval(token)
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        following = _next(model, cache, token)
        mx.async_eval(following)
        token.item()
        token = following
        times.append(time.perf_counter() - start)
    mx.eval(token)
    return times


def _kvant_loop(model: llama.Model, cache: BridgedCache) -> list[float]:
    """Seconds of each step, as kvant's run makes them."""
    cache.begin(mx.array([[5]]))
    token = _next(model, cache, mx.array([5]))
    mx.async_eval(token)
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        cache.commit(ids=[[0]])
        cache.begin(token[None])
        following = _next(model, cache, token)
        token.item()
        mx.async_eval(following)
        token = following
        times.append(time.perf_counter() - start)
    mx.eval(token)
    cache.commit(ids=[[0]])
    return times


def _next(model: llama.Model, cache: Any, token: mx.array) -> mx.array:
    logits = model(token[None], cache=cache)[:, -1]
    return mx.argmax(logits - mx.logsumexp(logits, axis=-1, keepdims=True), axis=-1)


def _ms(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {"median": round(1e3 * statistics.median(ordered), 3), "p10": round(1e3 * ordered[len(ordered) // 10], 3)}


if __name__ == "__main__":
    main()

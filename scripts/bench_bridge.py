"""A decode step of an mlx-lm model with kvant's cache, against mlx-lm's own caches: a table, then JSON.

Run: python scripts/bench_bridge.py [blocks]. One process, one BLAS; the caches take turns, a block of steps
    each. The
model is llama-like, with random float32 weights. Every cache holds 128 or 1,500 tokens when it begins.

- mlx-lm: mlx-lm's loop, which queues the next step before it waits for a token, with its own cache.
- list: the same loop with ``kvant.make_prompt_cache``.
- loop: kvant's loop, as for a bridged folder: a model's own cache, and positions turned by matrices on a CPU.
"""

import json
import sys
import time
from collections.abc import Callable
from itertools import chain
from statistics import median, quantiles
from typing import Any

from claims import compared, heading, row  # isort: skip  (before MLX: it loads a faster BLAS)

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models import llama

import kvant
from kvant.bridge.config import BridgedConfig
from kvant.bridge.model import BridgedModel
from kvant.bridge.pool import BridgedCache
from kvant.bridge.rope import rotate_by_matrices
from kvant.cache import CacheOptions
from kvant.tools.statistics import in_turns

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
STEPS = 8  # a block; the first is not counted
GROUP = 32


def main() -> None:
    """Measure and print; the JSON is that of results/bridge-cpu.json."""
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    models = [_model(), _model()]
    rotate_by_matrices(models[1])
    record: dict[str, Any] = {"shape": SHAPE, "blocks": blocks, "ms": {}}
    for context in (128, 1500):
        found = in_turns(_ways(models, context, blocks), blocks, warm_ups=0)
        times = {name: [*chain.from_iterable(rows)] for name, rows in found.items()}
        if not record["ms"]:
            heading("context", *times)
        row(context, *compared(times))
        tenth = {name: round(quantiles(each, n=10)[0], 3) for name, each in times.items()}
        medians = {name: round(median(each), 3) for name, each in times.items()}
        record["ms"][context] = {"median": medians, "p10": tenth}
    print(json.dumps(record, indent=1))


def _model() -> llama.Model:
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs(model_type="llama", **SHAPE))  # type: ignore[arg-type]
    mx.eval(model.parameters())
    return model


def _ways(models: list[llama.Model], context: int, blocks: int) -> dict[str, Callable[[], list[float]]]:
    """By name: a loop with a model and a cache that holds the context."""
    size = context + blocks * (STEPS + 1) + 1
    bridged = BridgedModel(models[1], BridgedConfig("llama", SHAPE["vocab_size"], None), mx.float32)
    caches: dict[str, tuple[llama.Model, Any]] = {
        "mlx-lm 0": (models[0], mlx_lm_cache.make_prompt_cache(models[0])),
        **{
            f"mlx-lm {bits}": (
                models[0],
                [mlx_lm_cache.QuantizedKVCache(GROUP, bits) for _ in models[0].layers],
            )
            for bits in (8, 4)
        },
    }
    for bits in (8, 4, 0):
        listed = kvant.make_prompt_cache(models[0], size, kv_bits=bits, kv_group_size=GROUP)
        caches[f"list {bits}"] = models[0], listed
        caches[f"loop {bits}"] = (
            models[1],
            bridged.reserve_cache(size, CacheOptions(kv_bits=bits, kv_group_size=GROUP)),
        )
    return {name: _way(model, cache, context) for name, (model, cache) in caches.items()}


def _way(model: llama.Model, cache: Any, context: int) -> Callable[[], list[float]]:
    """A function of a block of steps that returns their milliseconds."""
    prompt = mx.array([[7 * i % SHAPE["vocab_size"] for i in range(context)]])
    own = isinstance(cache, BridgedCache)

    def logits_of(ids: mx.array) -> mx.array:
        return model(ids, cache=cache.batch.entries if own else cache)[:, -1]

    if own:
        cache.batch.begin(prompt)
    mx.eval(logits_of(prompt))
    if own:
        cache.commit()

    def step(token: mx.array) -> mx.array:
        if own:
            cache.batch.begin(token[None])
        logits = logits_of(token[None])
        following = mx.argmax(logits - mx.logsumexp(logits, axis=-1, keepdims=True), axis=-1)
        if own:
            token.item()
        mx.async_eval(following)
        token.item()
        if own:
            cache.batch.commit(ids=[[0]])
        return following

    def block() -> list[float]:
        token, times = step(mx.array([5])), []
        for _ in range(STEPS):
            started = time.perf_counter()
            token = step(token)
            times.append((time.perf_counter() - started) * 1e3)
        mx.eval(token)
        return times[1:]

    return block


if __name__ == "__main__":
    main()

"""The cost of the bias split in one layer's attention of a decode step, on the unfused path: alternating, medians.

Run: python scripts/bias_split_cost.py
"""

import statistics
import time

import kvant.blas  # noqa: F401  # isort: skip  (before MLX: it loads a faster one)

import mlx.core as mx

from kvant.cache import QuantizedKVCache
from kvant.operators.bias_split import BiasSplit, rotation_table
from kvant.operators.cached_attention import append_and_attend, write_tokens
from kvant.operators.rotary import Rotary

HEADS, KV_HEADS, HEAD_DIM, THETA = 14, 2, 64, 1e6  # Qwen2.5-0.5B
PAIRS = {"off": None, "0 pairs": 0, "1 pair": 1, "4 pairs": 4, "all pairs": HEAD_DIM // 2}
CONTEXTS = (128, 1024, 4096, 16384)
ROUNDS = 30


def make_cache(tokens: int, pairs: int | None) -> QuantizedKVCache:
    """A cache full of tokens, with the slowest pairs split off."""
    split = None
    if pairs is not None:
        chosen = tuple(range(HEAD_DIM // 2 - pairs, HEAD_DIM // 2))
        split = BiasSplit(
            key_bias=mx.full((KV_HEADS, 2, pairs), 30.0),
            pairs=chosen,
            rotation=rotation_table(Rotary.plain(HEAD_DIM, THETA), chosen, tokens),
            value_bias=mx.ones((KV_HEADS, HEAD_DIM)),
        )
    cache = QuantizedKVCache(tokens, KV_HEADS, HEAD_DIM, bias_split=split)
    past = mx.random.normal((1, KV_HEADS, tokens, HEAD_DIM), key=mx.random.key(0))
    write_tokens(past, past, 0, cache.cache, cache.scale, quant_bit=8, quant_group=32)
    mx.eval(cache.cache, cache.scale)
    return cache


def attend(cache: QuantizedKVCache, query: mx.array, new: mx.array, start: int) -> mx.array:
    return append_and_attend(
        query, new, new, start, cache.cache, cache.scale, quant_bit=8, quant_group=32, bias_split=cache.bias_split
    )


def main() -> None:
    """Print a line for each context: milliseconds, and the ratio to the split switched off."""
    query, new = (mx.random.normal((1, heads, 1, HEAD_DIM), key=mx.random.key(1)) for heads in (HEADS, KV_HEADS))
    print(f"{mx.device_info()['device_name']}, MLX {mx.__version__}, {HEADS} / {KV_HEADS} heads of {HEAD_DIM}, 8 bits")
    print("| tokens | " + " | ".join(PAIRS) + " |\n" + "| --- " * (len(PAIRS) + 1) + "|")
    for tokens in CONTEXTS:
        caches = {name: make_cache(tokens, pairs) for name, pairs in PAIRS.items()}
        times: dict[str, list[float]] = {name: [] for name in PAIRS}
        for _ in range(ROUNDS):
            for name, cache in caches.items():
                started = time.perf_counter()
                mx.eval(attend(cache, query, new, tokens - 1), cache.cache, cache.scale)
                times[name].append(time.perf_counter() - started)
        medians = {name: statistics.median(values) * 1e3 for name, values in times.items()}
        cells = [f"{ms:.2f} ms ({ms / medians['off']:.2f}x)" for ms in medians.values()]
        print(f"| {tokens} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()

"""The unfused path's attention of one new token over a quantized cache, a layer.

Run: python scripts/bench_unfused.py [query heads] [kv heads]    (head_dim 64; default: Qwen2.5-0.5B's 14 and 2)

Against MLX's attention over a float32 cache and mlx-lm's over its own quantized cache of the same bits (groups of
32), in one run, variants alternating, medians. The append is left out everywhere.
"""

import statistics
import sys
import time
from collections.abc import Callable

import kvant.blas  # isort: skip  (before MLX: it loads a faster one)
import mlx.core as mx
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from kvant.cache import QuantizedKVCache
from kvant.operators.attention import attend_tokens
from kvant.operators.cached_attention import read_tokens, write_tokens

HEAD_DIM, SPARE = 64, 100
CONTEXTS = (128, 1024, 4096, 16384)
ROUNDS = 25
WAYS = ("kvant", "mlx-lm quantized", "float32")
CASES = [(8, 8), (8, 32), (8, 64), (4, 8), (4, 32), (4, 64)]  # bits, group


def variants(H: int, K: int, context: int, bits: int, group: int) -> dict[str, Callable[[], mx.array]]:
    """Each way as a function without arguments."""
    key, value = (mx.random.normal((1, K, context + SPARE, HEAD_DIM), key=mx.random.key(i)) for i in (0, 1))
    query = mx.random.normal((1, H, 1, HEAD_DIM), key=mx.random.key(2))
    cache = QuantizedKVCache(context + SPARE, K, HEAD_DIM, quant_bit=bits, quant_group=group)
    write_tokens(key, value, 0, cache.cache, cache.scale, quant_bit=bits, quant_group=group)
    key, value = (mx.contiguous(x[:, :, :context]) for x in (key, value))
    theirs = [mx.quantize(x, 32, bits) for x in (key, value)]
    mx.eval(query, key, value, cache.cache, cache.scale, theirs)
    scale = HEAD_DIM**-0.5

    def multiplied_out() -> mx.array:
        read = read_tokens(context, cache.cache, cache.scale, quant_bit=bits, dtype=mx.float32)
        return attend_tokens(query, *read)

    return {
        "kvant": multiplied_out,
        "mlx-lm quantized": lambda: quantized_scaled_dot_product_attention(query, *theirs, scale, None, 32, bits),
        "float32": lambda: mx.fast.scaled_dot_product_attention(query, key, value, scale=scale),
    }


def main() -> None:
    """Print a line a context and format: milliseconds, and kvant's ratios to the others."""
    H, K = (int(x) for x in sys.argv[1:3]) if len(sys.argv) > 2 else (14, 2)
    print(
        f"{mx.device_info()['device_name']}, MLX {mx.__version__}, BLAS {kvant.blas.loaded()}; "
        f"{H} / {K} heads of {HEAD_DIM}, ms a layer\n"
    )
    columns = ["context", "bits", "group", *WAYS, "to mlx-lm", "to float32"]
    print(f"| {' | '.join(columns)} |")
    print("| --- " * len(columns) + "|")
    for context in CONTEXTS:
        for bits, group in CASES:
            ways = variants(H, K, context, bits, group)
            times: dict[str, list[float]] = {name: [] for name in ways}
            for round_ in range(ROUNDS + 3):
                for name, way in ways.items():
                    started = time.perf_counter()
                    mx.eval(way())
                    if round_ >= 3:
                        times[name].append((time.perf_counter() - started) * 1e3)
            median = {name: statistics.median(values) for name, values in times.items()}
            taken = median["kvant"]
            cells = [f"{median[name]:.2f}" for name in WAYS]
            ratios = f"{taken / median['mlx-lm quantized']:.2f} | {taken / median['float32']:.2f}"
            print(f"| {context} | {bits} | {group} | {' | '.join(cells)} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()

"""Does a decode step cost more when more is reserved? Time and peak memory of the engine's own loop for each MaxS.

Run: python scripts/append_cost.py [steps]
The context stays short and the same. Only the reservation grows. Reservations take turns; medians over all rounds.
"""

import statistics
import sys
import time

import kvant.blas  # isort: skip  (before MLX: it loads a faster one)

import mlx.core as mx

import kvant
from kvant.engine.run import Run
from kvant.models import Decoder

RESERVATIONS = (256, 4096, 32768, 131072)
ROUNDS = 5
PROMPT = list(range(3, 35))


def one_round(model: Decoder, max_seq_len: int, steps: int) -> tuple[float, int]:
    """Median milliseconds a step, and how many bytes the peak is above the resting state."""
    cache = model.make_cache(max_seq_len)
    tokens = Run(model, PROMPT, cache, max_tokens=steps + 8)
    for _ in range(8):
        next(tokens)
    mx.synchronize()
    resting = mx.get_active_memory()
    mx.reset_peak_memory()
    times = []
    started = time.perf_counter()
    for _ in tokens:
        times.append(time.perf_counter() - started)
        started = time.perf_counter()
    return statistics.median(times) * 1e3, mx.get_peak_memory() - resting


def main() -> None:
    """Print a row for each reservation."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    model, _ = kvant.load("pocket")
    results: dict[int, list[tuple[float, int]]] = {tokens: [] for tokens in RESERVATIONS}
    for _ in range(ROUNDS):
        for tokens in RESERVATIONS:
            results[tokens].append(one_round(model, tokens, steps))
    print(f"{mx.device_info()['device_name']}, MLX {mx.__version__}, pocket model, {len(PROMPT)} + {steps} tokens")
    print("tokens reserved  ms a step  peak above rest, kB")
    for tokens, rows in results.items():
        milliseconds = statistics.median(row[0] for row in rows)
        print(f"{tokens:15}  {milliseconds:9.2f}  {max(row[1] for row in rows) / 1e3:19.0f}")


if __name__ == "__main__":
    main()

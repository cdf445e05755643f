"""The decode step, compiled and not, on the default device: milliseconds a token, in turns, medians.

Run: python scripts/compiled_step.py [rounds] [bits]    (default: 6 rounds, 8 bits; the embedded model)

On a CPU a compiled step needs a C++ compiler on PATH. The first run waits for it to make fused kernels, which MLX
keeps in the folder for temporary files. The medians leave those steps out, and their time is printed.
"""

import statistics
import sys
import time

from kvant.engine.load import load
from kvant.engine.run import Run

CONTEXTS = (128, 512, 1500)
TOKENS, FIRST = 80, 10


def main() -> None:
    """Print a row for each context."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 6
    bits = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    model, _ = load("pocket")
    print("| context | not compiled, ms | compiled, ms | ratio (median of pairs) | longest of the first steps, ms |")
    print("| --- | --- | --- | --- | --- |")
    for context in CONTEXTS:
        prompt = [(7 * i) % 1000 for i in range(context)]
        times: dict[bool, list[float]] = {False: [], True: []}
        longest = 0.0
        for number in range(rounds):
            for compiled in (False, True) if number % 2 else (True, False):
                cache = model.make_cache(context + TOKENS, quant_bit=bits)
                steps = Run(model, prompt, cache, max_tokens=TOKENS, compiled=compiled)
                latencies, previous = [], time.perf_counter()
                for _ in steps:
                    now = time.perf_counter()
                    latencies.append((now - previous) * 1e3)
                    previous = now
                times[compiled].append(statistics.median(latencies[FIRST:]))
                longest = max(longest, *latencies[:FIRST]) if compiled else longest
        eager, compiled_ms = (statistics.median(times[way]) for way in (False, True))
        ratio = statistics.median(c / e for c, e in zip(times[True], times[False], strict=True))
        print(f"| {context} | {eager:.2f} | {compiled_ms:.2f} | {ratio:.2f} | {longest:.0f} |", flush=True)


if __name__ == "__main__":
    main()

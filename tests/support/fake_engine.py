"""A benchmark's worker with known figures. Its argument is a JSON object:

log: the file that gets a line when it starts and one for every run
fail: for each label that fails, the run, counted with warm-ups, and how
"""

import json
import os
import sys
import time
from typing import Any

# Of a run's first token, of the others at position p in round r: base + slope * p + by_round * r.
DELAYS = {"kvant 8-bit": (50.0, 1.0, 0.001, 0.5), "mlx-lm": (200.0, 8.0, 0.0, 0.0)}


def answer(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def fail(how: str) -> None:
    """Do what an engine should not do."""
    if how == "exits":
        print("noise\nout of memory", file=sys.stderr)
        sys.exit(3)
    elif how == "error":
        answer(error="it cannot")
    elif how == "hangs":
        time.sleep(600)


def main() -> None:
    script = json.loads(sys.argv[1])
    label, runs = "", 0
    rounds: dict[tuple[int, ...], int] = {}  # by lengths; -1 is the warm-up

    def note(*fields: Any) -> None:
        with open(script["log"], "a", encoding="utf-8") as file:
            print(json.dumps(fields), file=file)

    for line in sys.stdin:
        command = json.loads(line)
        if command["command"] == "load":
            label = "mlx-lm" if command["engine"]["name"] == "mlx-lm" else "kvant 8-bit"
            note("starts", label, os.getpid(), os.environ.get("KVANT_BLAS"))
            answer(dtype="float32", weight_bytes=3_000_000, weight_bytes_read=2_000_000)
            continue
        lengths = tuple(map(len, command["prompts"]))
        number = rounds[lengths] = rounds.get(lengths, -2) + 1
        note("runs", label, lengths, number, command["prompts"], command["max_tokens"], command["together"])
        at, how = script["fail"].get(label, (-1, ""))
        runs += 1
        if runs - 1 == at:
            note("fails")
            fail(how)
            continue
        first, base, slope, by_round = DELAYS[label]
        arrivals = []
        for length in lengths:
            times = [first]
            for position in range(length + 1, length + command["max_tokens"]):
                times.append(times[-1] + base + slope * position + by_round * number)
            arrivals.append(times)
        figures = {"peak_memory_bytes": 5_000_000, "cache_bytes": 64_000, "cache_bytes_per_token": 1000.0}
        answer(arrivals_ms=arrivals, cpu_ms=1.0, **figures)


if __name__ == "__main__":
    main()

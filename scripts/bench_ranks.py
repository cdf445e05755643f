"""One process against two ranks on this machine, in a pipeline and in tensor mode: a token's time, sums and bytes.

Run: python scripts/bench_ranks.py [rounds] [--json FILE]    (default: 3 rounds)

Models are the embedded one and random weights of qwen2.5-0.5b's shape at 4 bits. Commands take turns, forwards and
backwards. Both ranks share this machine's cores and its memory bandwidth, so this shows what ranks cost, and no gain.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from kvant.engine.load import POCKET, find_model
from kvant.tools.bench.shapes import SHAPES, write_random

SHAPE, BITS = "qwen2.5-0.5b", 4
SMALL = ["--kv-bits", "8", "--prompt-tokens", "128", "--max-tokens", "32", "--repeats", "1", "--json", "--quiet"]
MODES: dict[str, list[str]] = {
    "one process": ["bench", "--engine", "kvant", *SMALL],
    "pipeline": ["launch", "-n", "2", "--", "bench", "--parallel", "pipeline", *SMALL],
    "tensor": ["launch", "-n", "2", "--", "bench", "--parallel", "tensor", *SMALL],
}
SHOWN = ("sums_per_token", "messages_per_token", "sent_bytes_per_token", "cache_bytes")


def main() -> None:
    """Measure both models and print a line for each of their modes."""
    arguments = sys.argv[1:]
    file = Path(arguments[arguments.index("--json") + 1]) if "--json" in arguments else None
    rounds = int(arguments[0]) if arguments and arguments[0].isdigit() else 3
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="kvant-") as name:
        folder = Path(name)
        write_random(SHAPES[SHAPE], folder, bits=BITS)
        for each in ("tokenizer.json", "tokenizer_config.json"):  # of any vocabulary: nothing is written in words
            shutil.copy(find_model(POCKET) / each, folder)
        for label, model in ((POCKET, POCKET), (f"random {SHAPE}, {BITS} bits", str(folder))):
            found += [{"model": label, "load": round(os.getloadavg()[0], 1), **line} for line in measure(model, rounds)]
            print(f"{label}, {rounds} rounds; a token in ms: median of the rounds' medians, and their range")
            for line in found[-len(MODES) :]:
                times = line["ms"]
                typical = f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})"
                exchanged = ", ".join(f"{figure} {line[figure]:,.0f}" for figure in SHOWN if line[figure] is not None)
                print(f"  {line['mode']}: {typical}; {exchanged}")
    if file is not None:
        file.write_text(json.dumps(found, indent=1) + "\n")


def measure(model: str, rounds: int) -> list[dict[str, Any]]:
    """The figures of every mode: the median time of a token in each round, and what rank 0 sends."""
    kvant = Path(sysconfig.get_path("scripts")) / "kvant"
    lines: dict[str, dict[str, Any]] = {}
    for number in range(rounds):
        for mode, words in list(MODES.items())[:: -1 if number % 2 else 1]:
            done = subprocess.run(
                [kvant, *words, "--model", model], check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
            )
            [summary] = json.loads(done.stdout)
            line = lines.setdefault(mode, {"mode": mode, "ms": []} | {figure: summary[figure] for figure in SHOWN})
            line["ms"].append(round(summary["latency_p50_ms"], 3))
    return [lines[mode] for mode in MODES]


if __name__ == "__main__":
    main()

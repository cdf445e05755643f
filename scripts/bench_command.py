"""The whole command, from start to exit: ``kvant generate`` and ``mlx_lm.generate`` on one folder, in turns.

Run: python scripts/bench_command.py [rounds] [model folder]    (default: 7 rounds, the embedded model)

Each generates 20 tokens from the same prompt. Run it where torch is not installed: transformers imports torch if it
can, and mlx_lm.generate is then slower than its users see it. Prints a line for each run and, last, the medians and
their ratio as JSON.
"""

import json
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from importlib.metadata import version
from pathlib import Path

from kvant.engine.load import POCKET, find_model

PROMPT = "Tell me a story about a fox named Pip."
TOKENS = "20"


def main() -> None:
    """Time both commands in alternating order. The first round warms the file cache and does not count."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    folder = str(find_model(sys.argv[2] if len(sys.argv) > 2 else POCKET))
    scripts = Path(sysconfig.get_path("scripts"))
    commands = {
        "kvant": [scripts / "kvant", "generate", PROMPT, "--model", folder, "--max-tokens", TOKENS, "--temp", "0"],
        "mlx_lm": [scripts / "mlx_lm.generate", "--model", folder, "--prompt", PROMPT, "--max-tokens", TOKENS],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name in list(commands)[:: -1 if number % 2 else 1]:
            started = time.perf_counter()
            subprocess.run(commands[name], check=True, capture_output=True, stdin=subprocess.DEVNULL)
            took = time.perf_counter() - started
            print(f"round {number}: {name} {took:.2f} s", flush=True)
            if number:
                seconds[name].append(took)
    ratios = [kvant / other for kvant, other in zip(seconds["kvant"], seconds["mlx_lm"], strict=True)]
    print(
        json.dumps(
            {
                "tokens": int(TOKENS),
                "rounds": rounds,
                "cores": os.cpu_count(),
                **{f"{name}_s": round(statistics.median(values), 3) for name, values in seconds.items()},
                "ratio": round(statistics.median(ratios), 3),
                "ratio_min": round(min(ratios), 3),
                "ratio_max": round(max(ratios), 3),
                "mlx": version("mlx"),
                "mlx_lm": version("mlx-lm"),
            }
        )
    )


if __name__ == "__main__":
    main()

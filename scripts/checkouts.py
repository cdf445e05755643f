"""Two checkouts of kvant in turns: what a token, a first token, eight streams and the whole command take.

Run: python scripts/checkouts.py OLD NEW [rounds]    (default: 9)

OLD and NEW are folders of the repository, each with an environment .venv in which that checkout is installed. Every
figure is of a process of its own, the checkouts alternate, and a ratio is the new one's time divided by the old one's.
Prints JSON: of each case and figure the median ratio, the smallest and the largest, and both medians.
"""

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

CASES = ["128 0", "128 8", "128 4", "1500 0", "1500 8", "1500 4", "streams 8", "command"]
STORY = ["generate", "Tell me a story about a fox named Pip.", "-m", "20", "--temp", "0", "-q"]
# Prints JSON: milliseconds of a step and of the first token, or seconds of eight answers; and processor seconds. The
# second of two runs in a process counts.
CHILD = """
import json, statistics, sys, time
import kvant
from kvant.sample_utils import make_sampler
case, bits, text = sys.argv[1], int(sys.argv[2]), open(sys.argv[3], encoding="utf-8").read()
model, tokenizer = kvant.load("pocket")
ids = tokenizer.encode(text, add_special_tokens=False)
for _ in range(2):
    busy, wall = time.process_time(), time.perf_counter()
    if case == "streams":
        prompts = [ids[50 * n : 50 * n + 128] for n in range(8)]
        kvant.batch_generate(model, tokenizer, prompts, max_tokens=64, kv_bits=bits)
        found = {"wall_s": time.perf_counter() - wall}
    else:
        sampler, prompt = make_sampler(0.7, seed=1), ids[: int(case)]
        times = [
            response.latency_ms
            for response in kvant.stream_generate(
                model, tokenizer, prompt, max_tokens=120, kv_bits=bits, sampler=sampler
            )
        ]
        found = {"step_ms": statistics.median(times[2:]), "first_ms": times[0]}
    found["processor_s"] = time.process_time() - busy
print(json.dumps(found))
"""


def measured(folder: Path, case: str, text: Path) -> dict[str, float]:
    """Run a case in a checkout's environment."""
    if case == "command":
        began = perf_counter()
        command = [str(folder / ".venv/bin/kvant"), *STORY]
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True)
        return {"wall_s": perf_counter() - began}
    command = [str(folder / ".venv/bin/python"), "-c", CHILD, *case.split(), str(text)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measure and print."""
    old, new = (Path(folder).resolve() for folder in sys.argv[1:3])
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 9
    record = {}
    for case in CASES:
        pairs = []
        for number in range(rounds):
            order = (old, new) if number % 2 == 0 else (new, old)
            found = {folder: measured(folder, case, new / "README.md") for folder in order}
            pairs.append((found[old], found[new]))
        record[case] = {
            name: {
                "ratio": [round(pick(b[name] / a[name] for a, b in pairs), 3) for pick in (median, min, max)],
                "old, new": [round(median(each[side][name] for each in pairs), 4) for side in (0, 1)],
            }
            for name in pairs[0][0]
        }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()

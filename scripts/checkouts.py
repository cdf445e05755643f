"""Two checkouts of kvant in turns: what a token, a first token, eight streams and the whole command take.

Run: python scripts/checkouts.py OLD NEW [rounds] [shapes | FOLDER]    (default: 9)

With "shapes": a step of pocket's shape after up to 32k tokens; and of Qwen2.5-0.5B's with 32,000 ids, in
float32 and with 4-bit weights, after a prompt of 256, whose time is told too. Weights are random. With a
FOLDER, or a name: that model in place of pocket, with fewer tokens and without the command, such as
smollm2-135m-q4.

OLD and NEW are folders of the repository, each with an environment .venv in which that checkout is installed.
Every figure is of a process of its own, the checkouts alternate, and a ratio is the new one's time divided by
the old one's. Prints JSON: of each case and figure the median ratio, the smallest and the largest, and both
medians.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from kvant.tools.bench.shapes import SHAPES, write_random

SHAPE_CASES = [f"pocket {tokens} {bits}" for tokens in (2048, 8192, 16384, 32700) for bits in (0, 8, 4)]
SHAPE_CASES += ["0.5B 256 8", "0.5B-4bit 256 8"]
# As below. Long contexts are counted and not computed: the cache's arrays have zeros.
SHAPE_CHILD = """
import json, statistics, sys, time
import kvant
import mlx.core as mx
from pathlib import Path
from kvant.models import load_decoder
folder, tokens, bits = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
model = load_decoder(folder)
cache, found = model.make_cache(tokens + 20, kv_bits=bits), {}
steps = cache if callable(cache.batch) else cache.batch  # an older cache is its own step
def step(ids):
    began = time.perf_counter()
    mx.eval(model.next_logits(mx.array([ids]), cache))
    steps.commit(ids=[ids])
    return 1e3 * (time.perf_counter() - began)
if tokens > 256:
    steps.begin(mx.zeros((1, tokens), mx.int32))
    steps.commit(ids=[[5] * tokens])
else:
    found["first_ms"] = [step([5] * tokens), cache.reset(), step([5] * tokens)][-1]
found["step_ms"] = statistics.median([step([7]) for _ in range(12)][2:])
print(json.dumps(found))
"""

CASES = ["128 0", "128 8", "128 4", "1500 0", "1500 8", "1500 4", "streams 8", "command"]
MODEL_CASES = ["128 0", "128 8", "128 4", "streams 8"]
STORY = ["generate", "Tell me a story about a fox named Pip.", "-m", "20", "--temp", "0", "-q"]
# Prints JSON: milliseconds of a step and of the first token, or seconds of eight answers; and processor
# seconds. The second of two runs in a process counts.
CHILD = """
import json, statistics, sys, time
import kvant
from kvant.sample_utils import make_sampler
case, bits, text = sys.argv[1], int(sys.argv[2]), open(sys.argv[3], encoding="utf-8").read()
model, tokenizer = kvant.load(sys.argv[4])
count = 120 if sys.argv[4] == "pocket" else 24
ids = tokenizer.encode(text, add_special_tokens=False)
for _ in range(2):
    busy, wall = time.process_time(), time.perf_counter()
    if case == "streams":
        prompts = [ids[50 * n : 50 * n + 128] for n in range(8)]
        kvant.batch_generate(model, tokenizer, prompts, max_tokens=count // 2, kv_bits=bits)
        found = {"wall_s": time.perf_counter() - wall}
    else:
        sampler, prompt = make_sampler(0.7, seed=1), ids[: int(case)]
        times = [
            response.latency_ms
            for response in kvant.stream_generate(
                model, tokenizer, prompt, max_tokens=count, kv_bits=bits, sampler=sampler
            )
        ]
        found = {"step_ms": statistics.median(times[2:]), "first_ms": times[0]}
    found["processor_s"] = time.process_time() - busy
print(json.dumps(found))
"""


def measured(folder: Path, case: str, text: Path, model: str) -> dict[str, float]:
    """Run a case of a model in a checkout's environment, with a text or with a folder of models of random
    weights.
    """
    if case == "command":
        began = perf_counter()
        command = [str(folder / ".venv/bin/kvant"), *STORY]
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True)
        return {"wall_s": perf_counter() - began}
    words = case.split()
    child = (
        [CHILD, *words, str(text), model]
        if text.is_file()
        else [SHAPE_CHILD, str(text / words[0]), *words[1:]]
    )
    command = [str(folder / ".venv/bin/python"), "-c", *child]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measure and print."""
    old, new = (Path(folder).resolve() for folder in sys.argv[1:3])
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 9
    model = (sys.argv[4:] or ["pocket"])[0]
    if model != "shapes":
        cases = CASES if model == "pocket" else MODEL_CASES
        print(json.dumps(compared(old, new, rounds, cases, new / "README.md", model), indent=1))
        return
    with TemporaryDirectory() as made:
        small = replace(SHAPES["qwen2.5-0.5b"], vocab_size=32000)
        for name, shape, bits in (
            ("pocket", SHAPES["pocket"], 0),
            ("0.5B", small, 0),
            ("0.5B-4bit", small, 4),
        ):
            (Path(made) / name).mkdir()
            write_random(shape, Path(made) / name, bits=bits, group_size=64)
        print(json.dumps(compared(old, new, rounds, SHAPE_CASES, Path(made)), indent=1))


def compared(
    old: Path, new: Path, rounds: int, cases: list[str], text: Path, model: str = "pocket"
) -> dict[str, Any]:
    """Of each case and figure the ratios, and both medians."""
    record = {}
    for case in cases:
        pairs = []
        for number in range(rounds):
            order = (old, new) if number % 2 == 0 else (new, old)
            found = {folder: measured(folder, case, text, model) for folder in order}
            pairs.append((found[old], found[new]))
        record[case] = {
            name: {
                "ratio": [round(pick(b[name] / a[name] for a, b in pairs), 3) for pick in (median, min, max)],
                "old, new": [round(median(each[side][name] for each in pairs), 4) for side in (0, 1)],
            }
            for name in pairs[0][0]
        }
    return record


if __name__ == "__main__":
    main()

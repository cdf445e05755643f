"""Recordings made up for tests: every time is known. And engines of a benchmark without their processes."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate, product
from pathlib import Path
from typing import Any

from kvant.machine import Environment
from kvant.tools.bench.engines import EngineSpec
from kvant.tools.bench.recording import Engine, Header, Recording, Run
from kvant.tools.bench.worker import _load

MACHINE = Environment(
    device="a processor",
    cores=2,
    system="Linux",
    blas="OpenBLAS",
    versions={"kvant": "0.1.0", "mlx": "0.32.4"},
)
ENGINE: dict[str, Any] = {"name": "kvant", "kv_bits": 8, "kv_group_size": 32, "dtype": "float32"}
ENGINE |= {"weight_bytes": 12_000_000, "weight_bytes_read": 10_000_000}
RUN: dict[str, Any] = {
    "peak_memory_bytes": 30_000_000,
    "cache_bytes": 4_000_000,
    "cache_bytes_per_token": 2000.0,
}

Latency = Callable[[str, int, int, int], float]  # of engine, run, context, position


def empty(engines: Sequence[str] = ("fast", "slow"), baseline: str = "slow") -> Recording:
    facts = {"date": "2026-01-31T12:00:00+00:00", "command": "bench", "model": "pocket", "seed": 0}
    recording = Recording(Header(**facts, baseline=baseline, copy_bandwidth_gb_s=10.0, machine=MACHINE))
    for label in engines:
        recording.add(Engine(engine=label, **ENGINE))
    return recording


def add_run(
    recording: Recording, label: str, run: int, context: int, latencies_ms: Sequence[float], **more: Any
) -> None:
    times = list(accumulate(latencies_ms))
    fields = {"prompt_tokens": (context,), "together": False, "arrivals_ms": [times]} | RUN | more
    recording.add(Run(engine=label, run=run, **fields))


def record(
    latency: Latency,
    *,
    engines: Sequence[str] = ("fast", "slow"),
    rounds: int = 3,
    contexts: Sequence[int] = (8,),
    tokens: int = 6,
) -> Recording:
    recording = empty(engines)
    for run, context, label in product(range(rounds), contexts, engines):
        places = range(context, context + tokens)
        add_run(recording, label, run, context, [latency(label, run, context, p) for p in places])
    return recording


def streams() -> Recording:
    """Two rounds of two streams of three tokens, the second twice as slow."""
    recording = empty(["kvant", "kvant, one by one", "other"], baseline="other")
    for run in range(2):
        pace = 1.0 + run
        together = [[40 * pace, 50 * pace, 60 * pace], [20 * pace, 50 * pace, 60 * pace]]
        alone = [[20 * pace, 30 * pace, 45 * pace], [70 * pace, 80 * pace, 120 * pace]]
        at_once = [[times[-1] for _ in times] for times in together]
        engines = ("kvant", together, 10.0), ("kvant, one by one", alone, 30.0), ("other", at_once, 20.0)
        for label, arrivals, cpu in engines:
            fields = {"prompt_tokens": (4, 9), "together": True, "peak_memory_bytes": 7}
            recording.add(Run(engine=label, run=run, arrivals_ms=arrivals, cpu_ms=cpu, **fields))
    return recording


class InThisProcess(nullcontext[Any]):
    """In place of a Worker: its engine is here, which spares the start of a process and the import of
    mlx-lm.
    """

    def __init__(self, label: str, environment: Mapping[str, str]) -> None:
        super().__init__(self)

    def ask(self, *, command: str, **given: Any) -> Any:
        if command == "load":
            spec = EngineSpec(**given["engine"])
            self._engine = _load(spec, Path(given["model"]), given["prefill_step_size"])
            return self._engine.ready
        return json.loads(json.dumps(self._engine.run(**given)))

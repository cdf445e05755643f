"""What ``kvant doctor --bench`` measures: attention, tokens, memory against its plan, and the start of a command."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx

from kvant import blas
from kvant.engine.load import POCKET, find_model
from kvant.engine.request import PREFILL_STEP_SIZE
from kvant.errors import KvantError, one_line
from kvant.machine import default_device, environment
from kvant.operators.dispatch import gpu_backend
from kvant.tools.bench.bandwidth import measure_bandwidth
from kvant.tools.bench.engines import OPENBLAS, engine_specs
from kvant.tools.bench.figures import summarize
from kvant.tools.bench.prompts import random_prompts
from kvant.tools.bench.recording import Header, Recording
from kvant.tools.bench.runner import Plan, Progress, measure
from kvant.tools.bench.shapes import SHAPES, random_model
from kvant.tools.doctor.attention import kvant_step, mlx_step
from kvant.tools.plan import plan, read_folder
from kvant.tools.statistics import Spread, in_turns, paired_ratio

HEADS = (32, 8, 128)  # query heads, kv heads and head_dim: Qwen3-4B's
CONTEXTS = (1024, 8192, 32768)
LAYERS_BYTES = 256 * 1024 * 1024  # of MLX's keys and values: more than a processor's caches hold
MOST_LAYERS = 16
RANDOM = "qwen2.5-0.5b"  # with weights of 4 bits
PROMPTS = {POCKET: (128, 1024), RANDOM: (128,)}
MAX_TOKENS, ROUNDS = 32, 5
LATEST_S = 540  # nothing begins later, so that all of it takes ten minutes

Record = dict[str, Any]


def measure_machine(progress: Progress) -> Record:
    """Measure this machine, at most ten minutes: every round's figures, and the parts that were left out."""
    latest = time.monotonic() + LATEST_S

    def said(text: str) -> None:
        if time.monotonic() > latest:
            raise TimeoutError(f"{LATEST_S} seconds had passed")
        progress(text)

    record: Record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_average": round(os.getloadavg()[0], 2),  # of the last minute: how busy others kept the machine
        "copy_bandwidth_gb_s": measure_bandwidth(),
        "attention": [],
        "models": [],
        "command_ms": [],
        "left_out": [],
    }
    pocket, random = nullcontext(find_model(POCKET)), random_model(SHAPES[RANDOM], bits=4)
    parts: dict[str, Callable[[], None]] = {
        "the whole command": partial(_command, record),
        "a token of pocket": partial(_model, record, POCKET, pocket, said),
        **{f"attention to {tokens:,} tokens": partial(_attention, record, tokens) for tokens in CONTEXTS},
        f"a token of {RANDOM}": partial(_model, record, RANDOM, random, said),
    }
    for name, part in parts.items():
        try:
            said(f"measuring {name}")
            part()
        except (KvantError, RuntimeError, OSError, subprocess.SubprocessError) as error:  # of MLX, a process, a disk
            record["left_out"].append(f"{name}: {one_line(error)}")
    return record


def figures(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A record's figures as (what, figure), for people."""
    found: list[tuple[str, str]] = []
    for each in record["attention"]:
        base = each["ms"]["MLX"]
        name = f"attention to {each['context']:,} tokens, divided by MLX's in {each['dtype']}"
        ratios = (f"{kind} {_shown(_ratio(ms, base))}" for kind, ms in each["ms"].items() if kind != "MLX")
        found.append((name, ", ".join(ratios)))
    for model in record["models"]:
        for each in model["summaries"]:
            if each["ratio"] is not None and each["engine"] != model["baseline"]:
                name = f"a token of {model['model']} after {each['context']:,}, divided by {model['baseline']}'s"
                spread = Spread(**each["ratio"])
                found.append((name, f"{each['latency_p50_ms']:.2f} ms, {_shown(spread)}"))
        for each in model["memory"]:
            name = f"peak of {model['model']} with {each['tokens']:,} tokens, divided by its plan"
            found.append((name, f"{each['peak'] / each['planned']:.2f}"))
    if record.get("start"):
        start = record["start"]
        kinds = (
            f"{kind} {start[f'{kind}_instances']} instances, {start[f'{kind}_ms']:.0f} ms" for kind in ("cold", "warm")
        )
        found.append((f"start of the kernel, {start['use']}", ", ".join(kinds)))
    if record["command_ms"]:
        first, *later = record["command_ms"]
        found.append(("the whole command, one token of pocket", f"{first:.0f} ms, then {median(later):.0f} ms"))
    return found


def _ratio(own: Sequence[float], base: Sequence[float]) -> Spread | None:
    return paired_ratio(dict(enumerate(own)), dict(enumerate(base)))


def _shown(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.median:.2f} ({spread.minimum:.2f} to {spread.maximum:.2f})"


def _attention(record: Record, tokens: int) -> None:
    """Milliseconds a layer of one token: it is appended, and attends to all. A chain of layers is queued at once."""
    _, K, D = HEADS
    dtype = mx.bfloat16 if default_device() == "gpu" else mx.float32
    layers = max(1, min(MOST_LAYERS, LAYERS_BYTES // (2 * K * D * tokens * dtype.size)))
    backend = gpu_backend()
    makers = {"MLX": mlx_step} | {f"{bits} bits": partial(kvant_step, bits=bits, backend=backend) for bits in (8, 4)}
    steps = {name: [make(HEADS, tokens, dtype) for _ in range(layers)] for name, make in makers.items()}

    def chain(name: str) -> float:
        query = mx.ones((1, HEADS[0], 1, D), dtype)
        mx.eval(query)
        mx.synchronize()
        started = time.perf_counter()
        for step in steps[name]:
            query = step(query)
        mx.eval(query)
        mx.synchronize()
        return (time.perf_counter() - started) * 1e3 / layers

    times = in_turns({name: partial(chain, name) for name in steps}, ROUNDS, warm_ups=2)
    named = {"context": tokens, "layers": layers, "dtype": str(dtype).removeprefix("mlx.core.")}
    record["attention"].append(named | {"path": backend or "unfused", "ms": times})
    mx.clear_cache()


def _model(record: Record, name: str, folder: AbstractContextManager[Path], progress: Progress) -> None:
    """kvant with 8 bits and mlx-lm with its own cache, in turns, and kvant's peak against its plan."""
    (own,), (theirs,) = engine_specs(["kvant"], [8], None, None), engine_specs([_mlx_lm()], [0], None, None)
    bandwidth, lengths = record["copy_bandwidth_gb_s"], PROMPTS[name]
    named: Record = {"date": record["date"], "command": "doctor --bench", "model": name, "seed": 0}
    header = Header(**named, baseline=theirs.label, copy_bandwidth_gb_s=bandwidth, machine=environment())
    recording = Recording(header)
    with folder as path:
        checkpoint = read_folder(path)
        prompts = random_prompts(0, checkpoint.config.vocab_size)
        try:
            measure(
                Plan([own, theirs], path, PREFILL_STEP_SIZE, lengths, MAX_TOKENS, ROUNDS, prompts), recording, progress
            )
        finally:  # when the time is up, the rounds until then
            found = summarize(recording)
            record["models"].append(
                {
                    "model": name,
                    "baseline": theirs.label,
                    "summaries": [asdict(each) for each in found],
                    "memory": [
                        {
                            "tokens": each.context + MAX_TOKENS,
                            "planned": plan(checkpoint, max_kv_size=each.context + MAX_TOKENS).arrays,
                            "peak": each.peak_memory_bytes,
                        }
                        for each in found
                        if each.engine == own.label
                    ],
                    "runs": [asdict(replace(run, token_ids=None)) for run in recording.runs],
                }
            )


def _mlx_lm() -> str:
    """mlx-lm as it is on a GPU; on a CPU in kvant's dtype and with its BLAS."""
    if default_device() == "gpu":
        return "mlx-lm"
    return "mlx-lm:float32" if blas.loaded().startswith(blas.OWN) else f"mlx-lm:float32:{OPENBLAS}"


def _command(record: Record) -> None:
    """Wall time of the command for one token, several times."""
    words = [sys.executable, "-P", "-m", "kvant", "generate", "Hello", "--max-tokens", "1", "--quiet"]
    for _ in range(ROUNDS):
        started = time.perf_counter()
        subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True)
        record["command_ms"].append((time.perf_counter() - started) * 1e3)

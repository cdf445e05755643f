"""Measure attention, tokens against mlx-lm, memory against its plan, quality, and the start of a command."""

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx

from kvant import blas
from kvant.digests import file_sha256
from kvant.engine.load import POCKET, default_weights, find_model, load_folder
from kvant.engine.request import PREFILL_STEP_SIZE
from kvant.errors import KvantError, one_line
from kvant.machine import default_device, environment
from kvant.models.tensors import tensor_files
from kvant.operators.dispatch import gpu_backend
from kvant.plan import Checkpoint, plan, read_folder
from kvant.tools.bench.bandwidth import measure_bandwidth
from kvant.tools.bench.engines import OPENBLAS, engine_specs
from kvant.tools.bench.figures import gaps_ms, summarize
from kvant.tools.bench.prompts import random_prompts
from kvant.tools.bench.recording import Header, Recording
from kvant.tools.bench.runner import Plan, Progress, measure
from kvant.tools.bench.shapes import SHAPES, random_model
from kvant.tools.doctor.attention import kvant_step, mlx_step
from kvant.tools.report.formats import default_formats
from kvant.tools.report.measure import figures_json
from kvant.tools.report.measure import measure as measure_formats
from kvant.tools.report.texts import built_in_text
from kvant.tools.statistics import Spread, drift, in_turns, paired_ratio

HEADS = (32, 8, 128)  # query heads, kv heads and head_dim: Qwen3-4B's
CONTEXTS = (1024, 8192, 32768)
LAYERS_BYTES = 256 * 1024 * 1024  # size of MLX's keys and values, larger than a processor's caches
MOST_LAYERS = 16
RANDOM = "qwen2.5-0.5b"  # with random 4-bit weights
PROMPTS = (128, 1024)
RANDOM_PROMPTS = (128,)
REPORT_TOKENS = 2048
MAX_TOKENS = 32
ROUNDS = 7
DRIFTS = 0.05  # report a drift with a smaller probability
LATEST_S = 540  # no measurement begins later, so that all of them take ten minutes

Record = dict[str, Any]


def measure_machine(model: str, progress: Progress) -> Record:
    """Measure this machine with a model for at most ten minutes; return all rounds and what was left out."""
    folder = find_model(model)
    if Path(model).exists():  # do not record the folder's path
        model = folder.name
    latest = time.monotonic() + LATEST_S

    def report(text: str) -> None:
        if time.monotonic() > latest:
            raise TimeoutError(f"{LATEST_S} seconds had passed")
        progress(text)

    record: Record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_average": round(os.getloadavg()[0], 2),  # of the last minute: how busy the machine was
        "copy_bandwidth_gb_s": measure_bandwidth(),
        "attention": [],
        "models": [],
        "report": None,
        "command_ms": [],
        "left_out": [],
    }
    measurements: dict[str, Callable[[], None]] = {
        "the whole command": partial(_command, record),
        f"a token of {model}": partial(_model, record, model, nullcontext(folder), report),
        f"the quality of {model}": partial(_report, record, model, folder),
        **{f"attention to {tokens:,} tokens": partial(_attention, record, tokens) for tokens in CONTEXTS},
    }
    if model == POCKET:
        random = random_model(SHAPES[RANDOM], bits=4)
        measurements[f"a token of {RANDOM}"] = partial(_model, record, RANDOM, random, report, is_random=True)
    record["parts"] = list(measurements)
    for name, measurement in measurements.items():
        try:
            report(f"measuring {name}")
            measurement()
        except (KvantError, RuntimeError, OSError, subprocess.SubprocessError) as error:
            record["left_out"].append(f"{name}: {one_line(error)}")
    return record


def figures(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a record's figures as (name, figure), for people."""
    rows: list[tuple[str, str]] = []
    for each in record["attention"]:
        times = {kind: dict(enumerate(ms)) for kind, ms in each["ms"].items()}
        base = times.pop("MLX")
        name = f"attention to {each['context']:,} tokens, divided by MLX's in {each['dtype']}"
        ratios = (f"{kind} {shown(paired_ratio(ms, base))}" for kind, ms in times.items())
        rows.append((name, ", ".join(ratios)))
    for model in record["models"]:
        for each in model["summaries"]:
            if each["ratio"] is not None and each["engine"] != (base := model["header"]["baseline"]):
                name = f"a token of {model['model']} after {each['context']:,}, divided by {base}'s"
                spread = Spread(**each["ratio"])
                rows.append((name, f"{each['latency_p50_ms']:.2f} ms, {shown(spread)}"))
        for each, moved in model["drift"].items():
            if moved is not None and moved[1] < DRIFTS:
                name = f"{model['model']}, {each}: later rounds divided by earlier"
                rows.append((name, f"{moved[0]:.2f}, by chance {moved[1]:.1%}"))
        for each in model["memory"]:
            name = f"peak of {model['model']} with {each['tokens']:,} tokens, divided by its plan"
            rows.append((name, f"{each['peak'] / each['planned']:.2f}"))
    for each in (record["report"] or {}).get("formats", ()):
        name = f"{record['report']['model']}, {each['format']}, against a cache that is not quantized"
        leg = each.get("prefill", each)  # older files have only this one
        rows.append((name, f"mean KLD {leg['mean_kld_nats']:.1e}, same top-1 {leg['top1']:.2%}"))
    if record.get("start"):
        start = record["start"]
        kinds = (
            f"{n} {start[f'{n}_instances']} instances, {start[f'{n}_ms']:.0f} ms" for n in ("cold", "warm")
        )
        rows.append((f"start of the kernel, {start['use']}", ", ".join(kinds)))
    if record["command_ms"]:
        first, *later = record["command_ms"]
        then = f", then {median(later):.0f} ms" if later else ""
        rows.append(("the whole command, one token of pocket", f"{first:.0f} ms{then}"))
    return rows


def shown(spread: Spread | None) -> str:
    """Format a ratio with its range."""
    return "-" if spread is None else f"{spread.median:.2f} ({spread.minimum:.2f} to {spread.maximum:.2f})"


def _attention(record: Record, tokens: int) -> None:
    """Time one token's attention per layer, in ms, including its append; all layers are queued at once."""
    _, K, D = HEADS
    dtype = mx.bfloat16 if default_device() == "gpu" else mx.float32
    layers = max(1, min(MOST_LAYERS, LAYERS_BYTES // (2 * K * D * tokens * dtype.size)))
    backend = gpu_backend()
    makers = {"MLX": mlx_step} | {
        f"{bits} bits": partial(kvant_step, bits=bits, backend=backend) for bits in (8, 4)
    }
    steps = {name: [make(HEADS, tokens, dtype) for _ in range(layers)] for name, make in makers.items()}

    def run_steps(name: str) -> float:
        query = mx.ones((1, HEADS[0], 1, D), dtype)
        mx.eval(query)
        mx.synchronize()
        started = time.perf_counter()
        for step in steps[name]:
            query = step(query)
        mx.eval(query)
        mx.synchronize()
        return (time.perf_counter() - started) * 1e3 / layers

    times = in_turns({name: partial(run_steps, name) for name in steps}, ROUNDS, warm_ups=2)
    named = {"context": tokens, "layers": layers, "dtype": str(dtype).removeprefix("mlx.core.")}
    record["attention"].append(named | {"path": backend or "unfused", "ms": times})
    mx.clear_cache()


def _model(
    record: Record,
    name: str,
    folder: AbstractContextManager[Path],
    progress: Progress,
    *,
    is_random: bool = False,
) -> None:
    """Measure kvant with 8 bits and mlx-lm with its own cache in turn, and kvant's peak against its plan."""
    (ours,) = engine_specs(["kvant"], [8], None, None)
    (theirs,) = engine_specs([_mlx_lm()], [0], None, None)
    bandwidth: float = record["copy_bandwidth_gb_s"]
    named: Record = {"date": record["date"], "command": "evidence", "model": name, "seed": 0}
    header = Header(**named, baseline=theirs.label, copy_bandwidth_gb_s=bandwidth, machine=environment())
    recording = Recording(header)
    with folder as path:
        checkpoint = read_folder(path)
        if isinstance(checkpoint, Checkpoint) and default_weights(path) == "float32":
            checkpoint = checkpoint.unpack()
        limit = checkpoint.config.max_position_embeddings or math.inf
        lengths = tuple(
            length for length in (RANDOM_PROMPTS if is_random else PROMPTS) if length + MAX_TOKENS <= limit
        )
        files = {} if is_random else file_digests(path)
        prompts = random_prompts(0, checkpoint.config.vocab_size)
        try:
            measure(
                Plan([ours, theirs], path, PREFILL_STEP_SIZE, lengths, MAX_TOKENS, ROUNDS, prompts),
                recording,
                progress,
            )
        finally:  # if the time is up, record the rounds so far
            summaries = summarize(recording)
            record["models"].append(
                {
                    "model": name,
                    "files": files,  # SHA-256 of the weights; empty for random ones
                    "header": asdict(header),
                    "engines": [asdict(each) for each in recording.engines.values()],
                    "summaries": [asdict(each) for each in summaries],
                    "drift": drifts(recording),
                    "memory": [
                        {
                            "tokens": each.context + MAX_TOKENS,
                            "planned": plan(checkpoint, max_kv_size=each.context + MAX_TOKENS).arrays,
                            "peak": each.peak_memory_bytes,
                        }
                        for each in summaries
                        if each.engine == ours.label
                    ],
                    "runs": [asdict(replace(run, token_ids=None)) for run in recording.runs],
                }
            )


def drifts(recording: Recording) -> dict[str, tuple[float, float] | None]:
    """Test the median times of a token for drift over the rounds: :func:`kvant.tools.statistics.drift`."""
    times: dict[str, list[float]] = {}
    for run in recording.runs:
        times.setdefault(f"{run.engine}, {run.prompt_tokens[0]}", []).append(median(gaps_ms(run)))
    return {name: drift(values) for name, values in times.items()}


def _report(record: Record, name: str, folder: Path) -> None:
    """Measure 8 and 4 bits as ``kvant report`` does."""
    decoder, tokenizer = load_folder(folder)
    limit = decoder.config.max_position_embeddings or REPORT_TOKENS
    text = built_in_text(tokenizer, min(REPORT_TOKENS, limit), REPORT_TOKENS)
    formats = {each.kv_bits: each for each in reversed(default_formats(decoder))}  # the first of each width
    record["report"] = figures_json(measure_formats(name, decoder, text, list(formats.values())))


def file_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of a model's weights, in hexadecimal, by file name."""
    return {path.name: file_sha256(path) for path in tensor_files(folder)}


def _mlx_lm() -> str:
    """Name mlx-lm's engine: as it is on a GPU; on a CPU with kvant's dtype and BLAS."""
    if default_device() == "gpu":
        return "mlx-lm"
    return "mlx-lm:float32" if blas.loaded().startswith(blas.MLX_BLAS) else f"mlx-lm:float32:{OPENBLAS}"


def _command(record: Record) -> None:
    words = [sys.executable, "-P", "-m", "kvant", "generate", "Hello", "--max-tokens", "1", "--quiet"]
    for _ in range(ROUNDS):
        started = time.perf_counter()
        subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True
        )
        record["command_ms"].append((time.perf_counter() - started) * 1e3)

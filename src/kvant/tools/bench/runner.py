"""A benchmark's runs: a process for every engine; they work one at a time, in an order that alternates."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from kvant import blas
from kvant.tools.bench.engines import EngineSpec
from kvant.tools.bench.here import Here, OverRanks
from kvant.tools.bench.process import WORKER_COMMAND, Worker
from kvant.tools.bench.prompts import Prompt, Prompts
from kvant.tools.bench.recording import Drafted, Engine, Recorder, Run, Sent, Streams, Token

WARM_UP = -1  # the round that is not recorded
STREAMS_FIGURES = ("arrivals_ms", "token_ids", "cpu_ms", "peak_memory_bytes")
RUN_FIGURES = ("tokens", "token_ids", "peak_memory_bytes", "cache_bytes", "cache_bytes_per_token")

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """A benchmark.

    Attributes:
        engines: their labels are all different.
        model: the folder.
        prefill_step_size: prompt tokens fed at a time.
        contexts: prompt tokens of the cases.
        max_tokens: generated in every run, neither more nor fewer.
        repeats: rounds.
        prompts: of a number of tokens and a round.
        streams: numbers of requests that come at once, whose prompts have the lengths of ``contexts`` in turn; none:
            one request after another, each context by itself.
    """

    engines: Sequence[EngineSpec]
    model: Path
    prefill_step_size: int
    contexts: Sequence[int]
    max_tokens: int
    repeats: int
    prompts: Prompts
    streams: Sequence[int] = ()


def measure(
    plan: Plan,
    recorder: Recorder,
    progress: Progress,
    commands: Mapping[str, Sequence[str]] | None = None,
    over_ranks: OverRanks | None = None,
) -> None:
    """Run everything and record it. The recorder has its header already.

    Args:
        plan: engines, cases and rounds.
        recorder: takes the lines as they come, after Ctrl-C also the tokens that the run at work had.
        progress: told a line a run.
        commands: by label, the program of an engine's worker; default: ``kvant.tools.bench.worker`` for all.
        over_ranks: the loaded model, of which this process has a part: it is measured here, without workers.

    Raises:
        BenchError: an engine that failed or died; the recording stays.
        KeyboardInterrupt: the recording stays.
    """
    with ExitStack() as stack:
        workers: dict[EngineSpec, Worker | Here] = {}
        for spec in plan.engines:
            worker: Worker | Here
            if over_ranks is not None:
                worker = stack.enter_context(Here(spec, over_ranks, plan.prefill_step_size))
            else:
                progress(f"{spec.label}: loading")
                command = (commands or {}).get(spec.label, WORKER_COMMAND)
                # mlx-lm as its users have it, unless kvant's BLAS is lent to it.
                environment = {blas.VARIABLE: blas.OWN} if spec.name == "mlx-lm" and not spec.openblas else {}
                worker = stack.enter_context(Worker(spec.label, command, environment))
            load = {"command": "load", "engine": asdict(spec), "model": str(plan.model)}
            ready = worker.ask(load | {"prefill_step_size": plan.prefill_step_size}, "ready")
            with worker.checked():
                known = {name: ready[name] for name in ("dtype", "weight_bytes", "weight_bytes_read")}
                bits, group = spec.kv_bits, spec.kv_group_size
                recorder.write(Engine(engine=spec.label, name=spec.name, kv_bits=bits, kv_group_size=group, **known))
            workers[spec] = worker
        if plan.streams:
            _measure_streams(plan, workers, recorder, progress)
            return
        for number in range(plan.repeats):
            for context in plan.contexts:
                if number == 0:
                    for spec, worker in workers.items():
                        progress(f"{spec.label}: warming up with {context:,} tokens of context")
                        worker.ask(_run_command(plan.prompts(context, WARM_UP), plan.max_tokens), "done")
                for spec in list(workers)[:: -1 if number % 2 else 1]:
                    latencies = _measure_run(workers[spec], plan, recorder, spec, number, context)
                    progress(_run_progress(plan, spec, number, context, latencies))


def _measure_streams(
    plan: Plan, workers: Mapping[EngineSpec, Worker | Here], recorder: Recorder, progress: Progress
) -> None:
    """Every number of streams in every round; the engines' order alternates."""
    for number in range(plan.repeats):
        for count in plan.streams:
            lengths = [plan.contexts[i % len(plan.contexts)] for i in range(count)]

            def command(round_number: int, lengths: Sequence[int] = lengths) -> dict[str, Any]:
                # Each stream has a round of its own: no two begin alike, also of other rounds and numbers of streams.
                first = ((round_number + 1) * 1000 + len(lengths)) * 1000
                prompts = [plan.prompts(n, first + i) for i, n in enumerate(lengths)]
                ids, texts = [prompt.ids for prompt in prompts], [prompt.text for prompt in prompts]
                return {"command": "streams", "prompts": ids, "texts": texts, "max_tokens": plan.max_tokens}

            if number == 0:
                for spec, worker in workers.items():
                    progress(f"{spec.label}: warming up with {count} {_streams(count)}")
                    worker.ask(command(WARM_UP), "done")
            for spec in list(workers)[:: -1 if number % 2 else 1]:
                worker = workers[spec]
                try:
                    done = worker.ask(command(number), "done")
                except KeyboardInterrupt:
                    worker.interrupt()
                    raise
                with worker.checked():
                    figures = {name: done[name] for name in STREAMS_FIGURES}
                    line = Streams(engine=spec.label, run=number, prompt_tokens=tuple(lengths), **figures)
                recorder.write(line)
                seconds = max(times[-1] for times in line.arrivals_ms) / 1e3
                tokens = sum(map(len, line.arrivals_ms))
                progress(
                    f"round {number + 1} of {plan.repeats}, {count} {_streams(count)}, {spec.label}: "
                    f"{tokens / seconds:.1f} tokens/s in all"
                )


def _streams(count: int) -> str:
    return "stream" if count == 1 else "streams"


def _measure_run(
    worker: Worker | Here, plan: Plan, recorder: Recorder, spec: EngineSpec, number: int, context: int
) -> list[float]:
    """One run, recorded; its latencies in milliseconds."""
    label = spec.label
    command = _run_command(plan.prompts(context, number), plan.max_tokens)
    try:
        done = worker.ask(command, "done")
    except KeyboardInterrupt:
        _write_tokens(recorder, label, number, context, worker.interrupt())
        raise
    with worker.checked():
        latencies: list[float] = list(done["latencies_ms"])
        enough = 1 if spec.name == "server" else plan.max_tokens
        if not enough <= len(latencies) <= done["tokens"] <= plan.max_tokens:
            raise ValueError(f"{done['tokens']} tokens, {len(latencies)} latencies; expected {plan.max_tokens}")
        _write_tokens(recorder, label, number, context, latencies)
        if (sent := done.get("sent")) is not None:
            recorder.write(Sent(engine=label, run=number, context=context, **sent))
        if (drafts := done.get("drafts")) is not None and drafts["steps"]:
            recorder.write(Drafted(engine=label, run=number, context=context, **drafts))
        figures = {name: done[name] for name in RUN_FIGURES}
        recorder.write(Run(engine=label, run=number, context=context, **figures))
    return latencies


def _run_command(prompt: Prompt, max_tokens: int) -> dict[str, Any]:
    command = {"command": "run", "prompt": prompt.ids, "text": prompt.text, "max_tokens": max_tokens}
    return command if prompt.answer is None else command | {"answer": prompt.answer}


def _write_tokens(recorder: Recorder, label: str, number: int, context: int, latencies: Sequence[float]) -> None:
    for index, latency in enumerate(latencies):
        recorder.write(Token(engine=label, run=number, context=context, position=context + index, latency_ms=latency))


def _run_progress(plan: Plan, spec: EngineSpec, number: int, context: int, latencies: Sequence[float]) -> str:
    middle = median if spec.draft == "none" else fmean  # tokens of one step come at once: the median is of nothing
    typical = f", then {middle(latencies[1:]):.2f} ms a token" if latencies[1:] else ""
    typical += f", ended after {len(latencies)} tokens" if len(latencies) < plan.max_tokens else ""
    return (
        f"round {number + 1} of {plan.repeats}, {context:,} tokens of context, {spec.label}: "
        f"first token {latencies[0]:.1f} ms{typical}"
    )

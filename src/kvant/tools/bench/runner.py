"""Run a benchmark: one process per engine; the processes run one at a time, in an alternating order."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from kvant import blas
from kvant.errors import BenchError
from kvant.tools.bench.engines import EngineSpec
from kvant.tools.bench.figures import gaps_ms
from kvant.tools.bench.prompts import Prompts
from kvant.tools.bench.recording import Engine, Recording, Run

# -P: do not import from the current folder, which may be a model's.
WORKER_COMMAND = [sys.executable, "-P", "-m", "kvant.tools.bench.worker"]
WARM_UP = -1  # the number of the round that is not recorded
CLOSE_S = 2.0

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    engines: Sequence[EngineSpec]  # with different labels
    model: Path
    prefill_step_size: int
    contexts: Sequence[int]  # prompt tokens
    max_tokens: int  # generated for every request
    repeats: int  # number of rounds
    prompts: Prompts
    streams: Sequence[int] = ()  # numbers of requests that come at once; empty: one after another

    def cases(self) -> list[tuple[int, ...]]:
        """Return, for each case, the prompt tokens of its requests; streams cycle through the contexts."""
        if not self.streams:
            return [(context,) for context in self.contexts]
        return [tuple(self.contexts[i % len(self.contexts)] for i in range(count)) for count in self.streams]


class Worker:
    """The process of one engine. It ends with the ``with`` statement, and also when this process ends."""

    def __init__(self, label: str, environment: Mapping[str, str]) -> None:
        """Start the process; ``environment`` is added to this process's."""
        self._label = label
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, closed in __exit__
        self._process = subprocess.Popen(
            WORKER_COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **environment},
            start_new_session=True,  # so that Ctrl-C reaches only this process, which decides
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._commands = self._process.stdin
        self._answers = self._process.stdout

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; raise a BenchError if it fails or the process ends."""
        try:
            self._commands.write(json.dumps(command).encode() + b"\n")
            self._commands.flush()
        except BrokenPipeError:
            raise self._died() from None
        line = self._answers.readline()
        if not line.endswith(b"\n"):
            raise self._died()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchError(f"engine {self._label}: {answer['error']}")
        return answer

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: object) -> None:
        with self._errors, self._process as process:
            try:
                self._commands.close()  # the process ends when its input does
                process.wait(CLOSE_S)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                pass
            finally:
                process.kill()

    def _died(self) -> BenchError:
        """Return an error with the exit code and the last line of output."""
        code = self._process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return BenchError(f"engine {self._label}: its process {how}{': ' + lines[-1][:500] if lines else ''}")


def measure(plan: Plan, recording: Recording, progress: Progress) -> None:
    """Run everything and record engines and runs as they come; raise a BenchError if an engine fails."""
    with ExitStack() as stack:
        workers: dict[EngineSpec, Worker] = {}
        for spec in plan.engines:
            progress(f"{spec.label}: loading")
            # mlx-lm runs as its users have it, unless it is to use kvant's BLAS.
            environment = (
                {blas.VARIABLE: blas.MLX_BLAS} if spec.name == "mlx-lm" and not spec.openblas else {}
            )
            worker = workers[spec] = stack.enter_context(Worker(spec.label, environment))
            sizes = {"model": str(plan.model), "prefill_step_size": plan.prefill_step_size}
            known = worker.ask(command="load", engine=asdict(spec), **sizes)
            bits = spec.kv_bits
            group = spec.kv_group_size
            recording.add(
                Engine(engine=spec.label, name=spec.name, kv_bits=bits, kv_group_size=group, **known)
            )
        for number in range(plan.repeats):
            for lengths in plan.cases():
                if number == 0:
                    for spec, worker in workers.items():
                        progress(f"{spec.label}: warming up with {_described(plan, lengths)}")
                        worker.ask(**_command(plan, lengths, WARM_UP))
                for spec in list(workers)[:: -1 if number % 2 else 1]:
                    done = workers[spec].ask(**_command(plan, lengths, number))
                    together = bool(plan.streams)
                    run = Run(engine=spec.label, run=number, prompt_tokens=lengths, together=together, **done)
                    recording.add(run)
                    speed = _speed(run, plan.max_tokens, spec.draft != "none")
                    place = f"round {number + 1} of {plan.repeats}, {_described(plan, lengths)}"
                    progress(f"{place}, {spec.label}: {speed}")


def _command(plan: Plan, lengths: Sequence[int], number: int) -> dict[str, Any]:
    # Each prompt has another number, so that no two begin alike, even in other rounds and numbers of streams.
    first = ((number + 1) * 1000 + len(lengths)) * 1000
    prompts, texts = zip(*(plan.prompts(length, first + i) for i, length in enumerate(lengths)), strict=True)
    together = bool(plan.streams)
    return {
        "command": "run",
        "prompts": prompts,
        "texts": texts,
        "max_tokens": plan.max_tokens,
        "together": together,
    }


def _described(plan: Plan, lengths: Sequence[int]) -> str:
    if not plan.streams:
        return f"{lengths[0]:,} tokens of context"
    return f"{len(lengths)} {'stream' if len(lengths) == 1 else 'streams'}"


def _speed(run: Run, max_tokens: int, drafts: bool) -> str:
    if run.together:
        seconds = max(times[-1] for times in run.arrivals_ms) / 1e3
        return f"{sum(map(len, run.arrivals_ms)) / seconds:.1f} tokens/s in all"
    (times,) = run.arrivals_ms
    gaps = gaps_ms(run)
    middle = fmean if drafts else median  # tokens of one step arrive together: a median means nothing
    typical = f", then {middle(gaps):.2f} ms a token" if gaps else ""
    ended = f", ended after {len(times)} tokens" if len(times) < max_tokens else ""
    return f"first token {times[0]:.1f} ms{typical}{ended}"

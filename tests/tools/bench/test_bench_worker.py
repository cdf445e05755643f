"""The process of one engine: what it times, what it says, and when it ends."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.completions import Reply

from kvant.tools.bench.engines import EngineSpec, engine_specs
from kvant.tools.bench.latency import medians_in_turns, timed
from kvant.tools.bench.worker import Taken, take

KVANT = EngineSpec("kvant", 8, 32)
WORKER = [sys.executable, "-m", "kvant.tools.bench.worker"]


class Source:
    """Numbers, each when it is asked for; a clock that each moves on."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds, self.now, self.asked, self.closed = seconds, 100.0, 0, False

    def items(self) -> Generator[int, None, None]:
        try:
            for number, wait in enumerate(self.seconds):
                self.asked += 1
                self.now += wait
                yield number
        finally:
            self.closed = True


def test_each_item_is_timed_from_the_one_before() -> None:
    source = Source([0.5, 0.25, 0.125])
    assert list(timed(source.items(), clock=lambda: source.now)) == [(0, 500.0), (1, 250.0), (2, 125.0)]


def test_runs_take_turns_and_the_first_round_counts_for_nothing() -> None:
    asked: list[str] = []

    def run(name: str) -> Iterator[int]:
        asked.append(name)
        for number in range(2):
            time.sleep(0.3 if len(asked) < 3 else 0.01 * number)
            yield number

    medians = medians_in_turns([lambda: run("a"), lambda: run("b")], 1)
    assert asked == ["a", "b", "b", "a"]
    assert all(5 <= middle < 150 for middle in medians)  # of 0 and 10 ms; with the first round over 150


def test_no_more_items_are_taken_than_asked_for() -> None:
    taken: Taken = []
    source = Source([0.5, 0.25, 0.125, 60.0])
    take(source.items(), 3, taken)
    assert [item for item, _ in taken] == [0, 1, 2]
    assert (source.asked, source.closed) == (3, True)
    taken.clear()
    take(Source([0.5, 0.25]).items(), None, taken)
    assert [item for item, _ in taken] == [0, 1]


def test_what_came_before_an_interruption_is_kept() -> None:
    def items() -> Generator[int, None, None]:
        yield 1
        raise KeyboardInterrupt

    taken: Taken = []
    with pytest.raises(KeyboardInterrupt):
        take(items(), 3, taken)
    assert [item for item, _ in taken] == [1]


def test_real_waits_are_measured() -> None:
    def items() -> Generator[int, None, None]:
        for wait in (0.06, 0.02, 0.02):
            time.sleep(wait)
            yield 0

    taken: Taken = []
    started = time.perf_counter()
    take(items(), 3, taken)
    elapsed_ms = (time.perf_counter() - started) * 1e3
    assert all(latency >= wait for (_, latency), wait in zip(taken, (60, 20, 20), strict=True))
    assert sum(latency for _, latency in taken) <= elapsed_ms


class Process:
    """A worker, talked to line by line."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )

    def send(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def load(self, spec: EngineSpec, model: Path) -> dict[str, Any]:
        self.send(
            command="load", engine={f: getattr(spec, f) for f in spec.__slots__}, model=str(model), prefill_step_size=8
        )
        return self.answer()

    def run(self, prompt: list[int], max_tokens: int, text: str | None = None) -> dict[str, Any]:
        self.send(command="run", prompt=prompt, text=text, max_tokens=max_tokens)
        return self.answer()


@pytest.fixture
def worker() -> Iterator[Process]:
    """A process of its own, ended at the end."""
    worker = Process()
    with worker.process as process:
        yield worker
        process.kill()


@pytest.mark.parametrize("name", ["kvant", "mlx-lm"])
def test_a_local_engine(worker: Process, name: str, make_checkpoint: Callable[..., tuple[Path, Any]]) -> None:
    """One layer's cache by hand: 2 kv heads of 64, keys and values, float32."""
    folder, _ = make_checkpoint(tie_word_embeddings=False, num_hidden_layers=1)
    ready = worker.load(EngineSpec(name, 0), folder)
    assert ready["kind"] == "ready"
    assert ready["dtype"] == "float32"
    assert ready["weight_bytes"] - ready["weight_bytes_read"] == 300 * 128 * 4  # the table that only embeds
    done = worker.run(list(range(20)), 4)
    assert done["kind"] == "done"
    assert done["tokens"] == len(done["token_ids"]) == len(done["latencies_ms"]) == 4
    assert done["peak_memory_bytes"] > ready["weight_bytes"]
    row = 2 * 2 * 64 * 4
    room = 256 if name == "mlx-lm" else 24  # mlx-lm's grows by 256 tokens, kvant's is for prompt and answer
    assert done["cache_bytes_per_token"] == done["cache_bytes"] / room
    table = 0 if name == "mlx-lm" else 24 * 64 * 4 + 2048  # at most: the bias split's table and biases
    assert 0 <= done["cache_bytes"] - room * row <= table
    assert worker.run(list(range(20)), 4)["token_ids"] == done["token_ids"]
    if name == "mlx-lm":  # quantized, a byte each, with a float32 scale and bias of every 64
        worker.load(EngineSpec(name, 8, 64), folder)
        assert worker.run(list(range(20)), 4)["cache_bytes_per_token"] == 2 * 2 * (64 + 2 * 4)


def test_failures_are_a_line_and_not_the_end(worker: Process, tmp_path: Path, pocket_folder: Path) -> None:
    answer = worker.load(KVANT, tmp_path / "none")
    assert answer["kind"] == "error"
    assert answer["message"].endswith("no such model folder")
    answer = worker.load(EngineSpec("mlx-lm", 0), tmp_path)
    assert answer["kind"] == "error"
    assert worker.load(KVANT, pocket_folder)["kind"] == "ready"


def test_what_libraries_print_is_no_answer() -> None:
    script = (
        "import os, sys; from kvant.tools.bench.worker import _claim_stdout; channel = _claim_stdout(); "
        "print('a warning', flush=True); os.system('echo from C'); print('answer', file=channel, flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "answer\n"
    assert done.stderr == "a warning\nfrom C\n"


def test_interrupted_in_a_run_it_says_what_it_has_and_goes_on(worker: Process, pocket_folder: Path) -> None:
    worker.load(KVANT, pocket_folder)
    worker.process.send_signal(signal.SIGINT)  # between runs that is nothing to it
    time.sleep(0.1)
    worker.send(command="run", prompt=list(range(64)), text=None, max_tokens=20_000)
    time.sleep(1.0)
    worker.process.send_signal(signal.SIGINT)
    answer = worker.answer()
    assert answer["kind"] == "interrupted"
    assert 0 < len(answer["latencies_ms"]) < 20_000
    assert worker.run([1, 2], 2)["kind"] == "done"


@pytest.mark.parametrize("busy", [False, True])
def test_it_ends_with_its_input(worker: Process, pocket_folder: Path, busy: bool) -> None:
    worker.load(KVANT, pocket_folder)
    if busy:
        worker.send(command="run", prompt=list(range(64)), text=None, max_tokens=20_000)
        time.sleep(0.3)
    assert worker.process.stdin is not None
    worker.process.stdin.close()
    assert worker.process.wait(5) == 0


def test_waiting_costs_nothing(worker: Process, pocket_folder: Path) -> None:
    if not Path("/proc/self/stat").exists():
        pytest.skip("processor time of another process is read from /proc")
    worker.load(KVANT, pocket_folder)
    worker.run([1, 2, 3], 4)
    time.sleep(0.2)  # what it does after its answer
    before = _ticks(worker.process.pid)
    time.sleep(0.8)
    assert _ticks(worker.process.pid) - before <= 2  # hundredths of a second


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])  # user and system time


def _event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def _stream(words: int, *, prompt_tokens: int, completion_tokens: int) -> list[bytes | float]:
    parts: list[bytes | float] = []
    for _ in range(words):
        parts += [0.03, _event(choices=[{"index": 0, "text": " word", "finish_reason": None}])]
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return [*parts, _event(choices=[], usage=usage), b"data: [DONE]\n\n"]


def test_a_server(worker: Process, served: tuple[str, Reply], tmp_path: Path) -> None:
    url, reply = served
    ready = worker.load(EngineSpec("server", url=url, server_model="small"), tmp_path)
    assert ready == {"kind": "ready", "dtype": None, "weight_bytes": None, "weight_bytes_read": None}
    reply.parts = _stream(3, prompt_tokens=2, completion_tokens=3)
    started = time.perf_counter()
    done = worker.run([5, 6], 3, text=" two words")
    elapsed_ms = (time.perf_counter() - started) * 1e3
    assert (done["kind"], done["tokens"], done["token_ids"]) == ("done", 3, None)
    assert len(done["latencies_ms"]) == 3
    assert 3 * 30 <= sum(done["latencies_ms"]) <= elapsed_ms  # the server waits 30 ms before each
    assert (reply.bodies[0]["prompt"], reply.bodies[0]["model"]) == (" two words", "small")
    for words, prompt, completion, message in (
        (3, 9, 3, "the server read 9 tokens; expected 2: is the model another?"),
        (3, 2, 9, "the server sent 3 events for 9 tokens, of 3 asked for"),
        (2, 2, 3, "the server sent 2 events for 3 tokens, of 3 asked for"),
        (3, 2, 2, "the server sent 3 events for 2 tokens, of 3 asked for"),
    ):
        reply.parts = _stream(words, prompt_tokens=prompt, completion_tokens=completion)
        answer = worker.run([5, 6], 3, text=" two words")
        assert answer["kind"] == "error"
        assert answer["message"].startswith(message)


def test_engines_and_their_labels() -> None:
    specs = engine_specs(["kvant", "mlx-lm", "mlx-lm:float32"], [0, 8, 4], None, 64)
    assert [(spec.label, spec.kv_bits, spec.kv_group_size, spec.dtype) for spec in specs] == [
        ("kvant full", 0, None, None),
        ("kvant 8-bit", 8, 32, None),
        ("kvant 4-bit", 4, 32, None),
        ("mlx-lm", 0, None, None),
        ("mlx-lm 8-bit", 8, 64, None),
        ("mlx-lm 4-bit", 4, 64, None),
        ("mlx-lm float32", 0, None, "float32"),
        ("mlx-lm float32 8-bit", 8, 64, "float32"),
        ("mlx-lm float32 4-bit", 4, 64, "float32"),
    ]
    assert [spec.kv_group_size for spec in engine_specs(["kvant", "mlx-lm"], [8], 128, 128)] == [128, 128]
    assert [spec.kv_group_size for spec in engine_specs(["mlx-lm"], [8], None, 96)] == [32]
    specs = engine_specs(["kvant", "kvant:unfused", "kvant:fused"], [0, 8], None, 64)
    assert [(spec.label, spec.kernels) for spec in specs] == [
        ("kvant full", None),
        ("kvant 8-bit", None),
        ("kvant full unfused", "unfused"),
        ("kvant 8-bit unfused", "unfused"),
        ("kvant full fused", "fused"),
        ("kvant 8-bit fused", "fused"),
    ]


@pytest.mark.parametrize(
    ("names", "group", "head_dim", "message"),
    [
        (["mlxlm"], None, 64, "engine is 'mlxlm'; expected one of kvant, mlx-lm; a server is named by its URL"),
        (["server"], None, 64, "a server is named by its URL"),
        (["mlx-lm:"], None, 64, "engine is 'mlx-lm:'"),
        (["mlx-lm:int8"], None, 64, "engine is 'mlx-lm:int8'; mlx-lm takes one of float32, float16, bfloat16 and one"),
        (["mlx-lm:unfused"], None, 64, "engine is 'mlx-lm:unfused'"),
        (["kvant:float32"], None, 64, "engine is 'kvant:float32'; kvant takes one of unfused, fused after a colon"),
        (["kvant", "mlx-lm", "kvant"], None, 64, "engine 'kvant' is named twice"),
        (["kvant:unfused:fused"], None, 64, "engine is 'kvant:unfused:fused'"),
        (["kvant"], 24, 64, "kv group size is 24; expected a divisor of the head dimension 64"),
        (["kvant"], None, 48, "kv group size is 32; expected a divisor of the head dimension 48"),
        (["mlx-lm"], 16, 64, "kv group size is 16; expected a divisor of the head dimension 64, .* 32, 64, 128"),
    ],
)
def test_engines_that_do_not_exist(names: list[str], group: int | None, head_dim: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine_specs(names, [8], group, head_dim)


def test_mlx_lm_is_lent_a_blas_only_where_that_is_asked_for() -> None:
    specs = engine_specs(["mlx-lm", "mlx-lm:openblas", "mlx-lm:openblas:float32"], [0, 8], None, 64)
    assert [(spec.label, spec.openblas) for spec in specs] == [
        ("mlx-lm", False),
        ("mlx-lm 8-bit", False),
        ("mlx-lm OpenBLAS", True),
        ("mlx-lm OpenBLAS 8-bit", True),
        ("mlx-lm float32 OpenBLAS", True),
        ("mlx-lm float32 OpenBLAS 8-bit", True),
    ]
    for name in ("kvant:openblas", "mlx-lm:openblas:openblas", "mlx-lm:", "mlx-lm:float32:float16", "mlx-lm:mkl"):
        with pytest.raises(ValueError, match=name.split(":")[0]):
            engine_specs([name], [0], None, 64)

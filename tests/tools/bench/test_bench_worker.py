"""The process of one engine: its times and answers, and when it ends. And the engines by name."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.completions import Reply
from support.key_transforms import drawn_format

from kvant.engine.load import find_model
from kvant.errors import BenchError
from kvant.tools.bench import runner
from kvant.tools.bench.adapters import MLXLM, Kvant
from kvant.tools.bench.engines import EngineSpec, engine_specs
from kvant.tools.bench.runner import Worker

KVANT = EngineSpec("kvant", 8, 32)
PROMPTS = [[5, 77, 1000, 3, 12], [9] * 20, [400, 2, 30]]
TOKENS = 6


def load(worker: Worker, spec: EngineSpec, model: Path) -> dict[str, Any]:
    return worker.ask(command="load", engine=asdict(spec), model=str(model), prefill_step_size=8)


def run(worker: Worker, *prompts: list[int], tokens: int, texts: list[str] | None = None) -> dict[str, Any]:
    return worker.ask(
        command="run", prompts=prompts, texts=texts, max_tokens=tokens, together=len(prompts) > 1
    )


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker("tried", {}) as made:
        yield made


@pytest.mark.parametrize("name", ["kvant", "mlx-lm"])
def test_a_local_engine(worker: Worker, name: str, make_checkpoint: Callable[..., tuple[Path, Any]]) -> None:
    """One layer's cache by hand: 2 kv heads of 64, keys and values, float32."""
    folder, _ = make_checkpoint(tie_word_embeddings=False, num_hidden_layers=1)
    ready = load(worker, EngineSpec(name, 0), folder)
    assert ready["dtype"] == "float32"
    assert ready["weight_bytes"] - ready["weight_bytes_read"] == 300 * 128 * 4  # the table that only embeds
    started = time.perf_counter()
    done = run(worker, list(range(20)), tokens=4)
    elapsed_ms = (time.perf_counter() - started) * 1e3
    (times,), (ids,) = done["arrivals_ms"], done["token_ids"]
    assert len(ids) == len(times) == 4
    assert 0 < times[0] < times[-1] < elapsed_ms
    assert times == sorted(times)
    assert done["cpu_ms"] > 0
    assert done["peak_memory_bytes"] > ready["weight_bytes"]
    row = 2 * 2 * 64 * 4
    room = 256 if name == "mlx-lm" else 24  # mlx-lm's grows by 256 tokens, kvant's is for prompt and answer
    assert done["cache_bytes_per_token"] == done["cache_bytes"] / room
    table = 0 if name == "mlx-lm" else 24 * 64 * 4 + 2048  # at most: the bias split's table and biases
    assert 0 <= done["cache_bytes"] - room * row <= table
    assert run(worker, list(range(20)), tokens=4)["token_ids"] == [ids]
    assert [len(times) for times in run(worker, [1], [2, 3], tokens=3)["arrivals_ms"]] == [3, 3]
    if name == "mlx-lm":  # quantized, a byte each, with a float32 scale and bias of every 64
        load(worker, EngineSpec(name, 8, 64), folder)
        assert run(worker, list(range(20)), tokens=4)["cache_bytes_per_token"] == 2 * 2 * (64 + 2 * 4)


def test_failures_are_a_line_and_not_the_end(worker: Worker, tmp_path: Path, pocket_folder: Path) -> None:
    with pytest.raises(BenchError, match=r"engine tried: .*no such model folder$"):
        load(worker, KVANT, tmp_path / "none")
    with pytest.raises(BenchError):
        load(worker, EngineSpec("mlx-lm", 0), tmp_path)
    assert "weight_bytes" in load(worker, KVANT, pocket_folder)


def test_a_process_that_ends_or_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = "import os, sys; sys.stdin.readline(); sys.exit('noise\\n' + os.environ['WHY'])"
    monkeypatch.setattr(runner, "WORKER_COMMAND", [sys.executable, "-c", ends])
    with pytest.raises(BenchError) as failure, Worker("tried", {"WHY": "out of memory"}) as worker:
        worker.ask()
    assert str(failure.value) == "engine tried: its process ended with exit code 1: out of memory"
    monkeypatch.setattr(runner, "WORKER_COMMAND", [sys.executable, "-c", "import time; time.sleep(30)"])
    monkeypatch.setattr(runner, "CLOSE_S", 0.1)
    with Worker("tried", {}) as worker:
        pass
    assert worker._process.returncode == -signal.SIGKILL


def test_a_librarys_print_is_no_answer() -> None:
    script = (
        "import os, sys; from kvant.tools.bench.worker import _claim_stdout; channel = _claim_stdout(); "
        "print('a warning', flush=True); os.system('echo from C'); print('answer', file=channel, flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("answer\n", "a warning\nfrom C\n")


@pytest.mark.parametrize("busy", [False, True])
def test_it_ends_with_its_input(pocket_folder: Path, monkeypatch: pytest.MonkeyPatch, busy: bool) -> None:
    with Worker("tried", {}) as worker:
        load(worker, KVANT, pocket_folder)
        if busy:
            readline = worker._answers.readline

            def close_and_read() -> bytes:  # the command is written
                threading.Timer(0.3, worker._commands.close).start()
                return readline()

            monkeypatch.setattr(worker, "_answers", SimpleNamespace(readline=close_and_read))
            with pytest.raises(BenchError, match="its process ended with exit code 0"):
                run(worker, list(range(64)), tokens=20_000)
        worker._process.stdin.close()
        assert worker._process.wait(60) == 0


def _stream(words: int, prompt_tokens: int, completion_tokens: int) -> list[Any]:
    word = b'data: {"choices": [{"index": 0, "text": " word"}]}\n\n'
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return [
        *[0.03, word] * words,
        b"data: " + json.dumps({"usage": usage}).encode() + b"\n\ndata: [DONE]\n\n",
    ]


def test_a_server(worker: Worker, served: tuple[str, Reply], tmp_path: Path) -> None:
    url, reply = served
    ready = load(worker, EngineSpec("server", url=url, server_model="small"), tmp_path)
    assert ready == {"dtype": None, "weight_bytes": None, "weight_bytes_read": None}
    reply.parts = _stream(3, 2, 3)
    done = run(worker, [5, 6], tokens=3, texts=[" two words"])
    (times,) = done["arrivals_ms"]
    assert len(times) == 3
    # the server waits 30 ms before each
    assert all(ms >= 30 * number for number, ms in enumerate(times, start=1))
    assert (reply.bodies[0]["prompt"], reply.bodies[0]["model"]) == (" two words", "small")
    for words, prompt, completion, message in (
        (3, 9, 3, "read 9 tokens; expected 2"),
        (3, 2, 9, "sent 3 events for 9 tokens"),
        (2, 2, 3, "sent 2 events for 3 tokens"),
        (3, 2, 2, "sent 3 events for 2 tokens"),
    ):
        reply.parts = _stream(words, prompt, completion)
        with pytest.raises(BenchError, match=message):
            run(worker, [5, 6], tokens=3, texts=[" two words"])


STREAMS = "kvant 8-bit|kvant full|kvant 8-bit, one by one|kvant full, one by one|mlx-lm float32"


@pytest.mark.parametrize(
    ("names", "bits", "streams", "labels"),
    [
        (
            "kvant mlx-lm",
            [0, 8, 4],
            False,
            "kvant full|kvant 8-bit|kvant 4-bit|mlx-lm|mlx-lm 8-bit|mlx-lm 4-bit",
        ),
        ("mlx-lm:openblas:float32 mlx-lm", [8], False, "mlx-lm float32 OpenBLAS 8-bit|mlx-lm 8-bit"),
        ("kvant:unfused kvant:fused", [8], False, "kvant 8-bit unfused|kvant 8-bit fused"),
        ("kvant mlx-lm:float32", [8, 0], True, STREAMS),
    ],
)
def test_engines_and_their_labels(names: str, bits: list[int], streams: bool, labels: str) -> None:
    assert [
        spec.label for spec in engine_specs(names.split(), bits, None, 64, streams=streams)
    ] == labels.split("|")


def test_settings_of_engines() -> None:
    specs = engine_specs(["kvant:fused", "mlx-lm:float32:openblas", "mlx-lm"], [8], None, 64)
    assert [(spec.kv_group_size, spec.kernels, spec.dtype, spec.openblas) for spec in specs] == [
        (32, "fused", None, False),
        (64, None, "float32", True),
        (64, None, None, False),
    ]
    assert [spec.kv_group_size for spec in engine_specs(["kvant", "mlx-lm"], [8], 128, 128)] == [128, 128]
    assert [spec.kv_group_size for spec in engine_specs(["mlx-lm"], [8], None, 96)] == [32]
    assert [spec.kv_group_size for spec in engine_specs(["kvant"], [8], None, 48)] == [16]


@pytest.mark.parametrize(
    ("names", "group", "head_dim", "message"),
    [
        ("mlxlm", None, 64, "'mlxlm'; expected one of kvant, mlx-lm"),
        ("server", None, 64, "by its URL"),
        ("mlx-lm:int8", None, 64, "'mlx-lm:int8'; mlx-lm takes one of float32, float16, bfloat16"),
        ("mlx-lm:float32:float16", None, 64, "at most once"),
        ("kvant mlx-lm kvant", None, 64, "'kvant' is named twice"),
        ("mlx-lm", None, 48, "64, 32, 128, and none divides the head dimension 48"),
        ("mlx-lm", 16, 64, "kv_group_size is 16; .* 64, 32"),
    ],
)
def test_engines_that_do_not_exist(names: str, group: int | None, head_dim: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine_specs(names.split(), [8], group, head_dim)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The tokens of each prompt, by mlx-lm's own loop."""
    alone = MLXLM(EngineSpec("mlx-lm", 0, dtype="float32"), find_model("pocket"), 512)
    return [list(alone.tokens(prompt, TOKENS)) for prompt in PROMPTS]


def test_kvant_with_a_tuned_format(expected: list[list[int]], tmp_path: Path, pocket: Any) -> None:
    """Of 0 bits with every part of a front, beside 8 bits."""
    drawn_format(pocket[0]).write(tmp_path / "tuned.json")
    tuned, plain = engine_specs(["kvant"], [8], None, 64, kv_format=str(tmp_path / "tuned.json"))
    assert [(spec.label, spec.kv_bits) for spec in (tuned, plain)] == [("kvant tuned", 0), ("kvant 8-bit", 8)]
    engine = Kvant(tuned, find_model("pocket"), 512)
    assert [list(engine.tokens(prompt, TOKENS)) for prompt in PROMPTS] == expected
    pmx, four = engine_specs(["kvant"], [4], None, 64, kv_format="pmx")
    assert (pmx.label, four.label) == ("kvant 4-bit PMX", "kvant 4-bit")
    assert len(list(Kvant(pmx, find_model("pocket"), 512).tokens(PROMPTS[0], 2))) == 2


@pytest.mark.parametrize(
    ("make", "spec"),
    [
        (Kvant, EngineSpec("kvant", 0)),
        (Kvant, EngineSpec("kvant", 0, one_by_one=True)),
        (Kvant, EngineSpec("kvant", 0, draft="prompt")),
        (Kvant, EngineSpec("kvant", 0, draft="model", draft_model=str(find_model("pocket")))),
        (MLXLM, EngineSpec("mlx-lm", 0, dtype="float32")),
    ],
    ids=lambda value: getattr(value, "label", None),
)
def test_every_way_gives_the_same_tokens(
    make: Callable[..., Kvant | MLXLM], spec: EngineSpec, expected: list[list[int]]
) -> None:
    engine = make(spec, find_model("pocket"), 512)
    assert [list(engine.tokens(prompt, TOKENS)) for prompt in PROMPTS] == expected
    tokens = list(engine.streams(PROMPTS, TOKENS))
    assert [[token for stream, token in tokens if stream == n] for n in range(len(PROMPTS))] == expected
    order = [stream for stream, _ in tokens]
    assert (order == sorted(order)) == spec.one_by_one


def test_kernels_are_the_pools(fused_calls: list[Any]) -> None:
    for kernels, is_fused in (("unfused", False), ("fused", True)):
        list(
            Kvant(EngineSpec("kvant", 0, kernels=kernels), find_model("pocket"), 512).streams(PROMPTS, TOKENS)
        )
        assert bool(fused_calls) == is_fused

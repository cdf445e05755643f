"""``kvant bench`` as its user meets it: engines, outputs, refusals, Ctrl-C, and no process left behind."""

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from support.command import are_gone, call, children
from support.completions import Reply
from support.recordings import InThisProcess

from kvant.cli.bench_options import contexts
from kvant.tools.bench import bandwidth, runner

# The device's bandwidth takes seconds: one test measures it.
UNMEASURED = """
from kvant.tools.bench import bandwidth
bandwidth.measure_bandwidth = lambda: 1.0
from kvant_command import main
main()
"""
COMMAND = [sys.executable, "-c", UNMEASURED, "bench"]
ONE = ["--engine", "kvant", "--kv-bits", "8"]
SMALL = ["--prompt-tokens", "16", "-m", "8", "--repeats", "1"]


def run(*arguments: str, in_processes: bool = False) -> subprocess.CompletedProcess[str]:
    """The command in this process, whose signals it takes, with the engines; or they have processes, as
    for a user.
    """
    taken = (signal.SIGTERM, signal.SIGHUP)
    usual = [signal.getsignal(number) for number in taken]
    try:
        with ExitStack() as stack:
            if not in_processes:
                stack.enter_context(patch.object(runner, "Worker", InThisProcess))
                stack.enter_context(patch.object(bandwidth, "measure_bandwidth", lambda: 1.0))
            return call("bench", *arguments)
    finally:
        for number, handler in zip(taken, usual, strict=True):
            signal.signal(number, handler)


def read(file: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, file.read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


LABELS = ["kvant full", "kvant full unfused", "mlx-lm float32"]


def test_all_engines_agree(tmp_path: Path) -> None:
    file = tmp_path / "all.jsonl"
    engines = ["--engine", "kvant", "--engine", "kvant:unfused", "--engine", "mlx-lm:float32"]
    given = [*SMALL, *engines, "--kv-bits", "0", "--output", str(file)]
    done = run(*given, in_processes=True)
    assert done.returncode == 0, done.stderr
    engines, runs = read(file, "engine"), read(file, "run")
    assert [engine["engine"] for engine in engines] == [line["engine"] for line in runs] == LABELS
    assert all(line["token_ids"] == runs[0]["token_ids"] for line in runs)
    assert [len(times) for line in runs for times in line["arrivals_ms"]] == [8] * 3
    (header,) = read(file, "header")
    assert (header["model"], header["seed"], header["baseline"]) == ("pocket", 0, "mlx-lm float32")
    assert header["command"].startswith("bench --prompt-tokens 16 -m 8")
    assert header["copy_bandwidth_gb_s"] > 0.1
    sizes = [engine["weight_bytes"] for engine in engines]
    assert max(sizes) < 1.01 * min(sizes)
    for label in LABELS:
        assert label in done.stdout
        assert f"round 1 of 1, 16 tokens of context, {label}: first token " in done.stderr


def test_json_of_random_weights_with_quantized_caches_and_drafts() -> None:
    model = ["--random", "pocket", "--weight-bits", "8", "--kv-bits", "8,4", "--kv-group-size", "32"]
    done = run(*SMALL, *model, "--draft", "prompt", "--baseline", "kvant 4-bit", "--json", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    summaries = json.loads(done.stdout)
    labels = ["kvant 8-bit", "kvant 8-bit, drafts", "kvant 4-bit", "kvant 4-bit, drafts"]
    assert [summary["engine"] for summary in summaries] == labels
    assert [summary["ratio"]["median"] == 1.0 for summary in summaries] == [False, False, True, False]
    for figure in ("tokens_per_step", "plain_ratio"):
        assert [summary[figure] is not None for summary in summaries] == [False, True, False, True]


def test_streams(tmp_path: Path) -> None:
    file, plot = tmp_path / "streams.jsonl", tmp_path / "streams.svg"
    arguments = ["--streams", "1,3", "--prompt-tokens", "5,12", "-m", "3", "--repeats", "1", "--json"]
    done = run("pocket", *arguments, "--kv-bits", "0", "--output", str(file), "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    assert any(summary["engine"].startswith("mlx-lm float32") for summary in json.loads(done.stdout))
    runs = read(file, "run")
    assert [line["prompt_tokens"] for line in runs] == [[5]] * 3 + [[5, 12, 5]] * 3
    assert [line["engine"] for line in runs[:2]] == ["kvant full", "kvant full, one by one"]
    assert all(line["token_ids"] == runs[-1]["token_ids"] for line in runs[3:])
    assert plot.exists()


SERVED = [*[{"choices": [{"text": " word"}]}] * 4, {"usage": {"prompt_tokens": 16, "completion_tokens": 4}}]


def test_a_server_beside_the_others(served: tuple[str, Reply], tmp_path: Path) -> None:
    served[1].say(*SERVED)
    file = tmp_path / "server.jsonl"
    done = run(*SMALL, "--server", served[0], "--server-model", "small", *ONE, "--output", str(file))
    runs = [(line["engine"], *map(len, line["arrivals_ms"])) for line in read(file, "run")]
    assert runs == [("kvant 8-bit", 8), ("server", 4)]
    assert "ended after 4 tokens" in done.stderr


def test_streams_of_two_servers(served: tuple[str, Reply], tmp_path: Path) -> None:
    url, reply = served
    reply.say(*SERVED)
    file = tmp_path / "servers.jsonl"
    names = [
        "--server",
        f"here={url}",
        "--server",
        f"there={url}/v1",
        "--server-model",
        "a",
        "--server-model",
        "b",
    ]
    done = run(*SMALL, *names, "--streams", "1,3", "--baseline", "there", "--json", "--output", str(file))
    found = [(line["engine"], [len(times) for times in line["arrivals_ms"]]) for line in read(file, "run")]
    assert found == [("here", [4]), ("there", [4]), ("here", [4] * 3), ("there", [4] * 3)]
    assert [body["model"] for body in reply.bodies] == ["a", "b"] * 2 + (["a"] * 3 + ["b"] * 3) * 2
    summaries = json.loads(done.stdout)
    assert [s["total_ratio"]["median"] == 1.0 for s in summaries] == [False, True, False, True]
    assert {s["cpu_ratio"] for s in summaries} == {None}
    assert url not in done.stdout + done.stderr


def test_a_blas_that_is_not_there_is_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine ran with MLX's own, and was called OpenBLAS in every table."""
    monkeypatch.setenv("KVANT_BLAS", "mlx")
    done = subprocess.run([*COMMAND, "--engine", "mlx-lm:float32:openblas"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "kvant does not have it here" in done.stderr


def test_the_default_prompts_are_those_the_model_has_room_for() -> None:
    assert contexts(None, 64, 2048) == [128, 1024]
    assert contexts(None, 64, 4160) == [128, 1024, 4096]
    assert contexts(None, 64, 4160, streams=True) == [128]
    assert contexts("7, 9", 1, 10) == [7, 9]


def _wait_for(process: subprocess.Popen[str], line: str) -> None:
    for found in process.stderr:
        if line in found:
            return
    raise AssertionError(f"{line!r} did not come")


ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ENDLESS = [
    "--engine",
    "kvant",
    "--kv-bits",
    "8,4",
    "--prompt-tokens",
    "32",
    "-m",
    "16",
    "--repeats",
    "100000",
]


@pytest.mark.parametrize(
    ("number", "victim"),
    [*((number, "command") for number in ENDING), (signal.SIGKILL, "command"), (signal.SIGKILL, "engine")],
)
def test_a_signal(tmp_path: Path, number: signal.Signals, victim: str) -> None:
    """A process that is killed takes the others along; else there is the report of the runs that came to
    their end.
    """
    file = tmp_path / "cut.jsonl"
    command = [*COMMAND, *ENDLESS, "--output", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _wait_for(process, "round 2 of 100000")
    workers = children(process.pid)
    os.kill(process.pid if victim == "command" else workers[0], number)
    output, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    if victim == "engine":
        assert process.returncode == 1
        assert "Time" in output
        assert errors.splitlines()[-1].startswith("kvant: error: engine ")
        assert errors.endswith("its process was ended by SIGKILL\n")
    elif number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130
        assert all(f"kvant {bits}-bit" in output for bits in (8, 4))
    assert len(read(file, "run")) >= 3
    assert are_gone(workers)


def test_under_nohup_it_outlives_its_terminal() -> None:
    process = subprocess.Popen(
        ["nohup", *COMMAND, *SMALL, *ONE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    _wait_for(process, "measuring")
    process.send_signal(signal.SIGHUP)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "kvant 8-bit" in output

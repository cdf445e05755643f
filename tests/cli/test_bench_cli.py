"""``kvant bench`` as its user meets it: engines, outputs, refusals, Ctrl-C, and no process left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from support.command import call
from support.completions import Reply

from kvant.cli import main
from kvant.cli.bench_options import SHAPE_NAMES, contexts
from kvant.tools.bench import bandwidth
from kvant.tools.bench.recording import Recording, read_recording
from kvant.tools.bench.shapes import SHAPES

# The device's bandwidth takes seconds; test_all_engines_agree alone measures it.
UNMEASURED = """
from kvant.tools.bench import bandwidth
bandwidth.measure_bandwidth = lambda: 1.0
from kvant_command import main
main()
"""
COMMAND = [sys.executable, "-c", UNMEASURED, "bench"]
ONE = ["--engine", "kvant", "--kv-bits", "8"]
SMALL = ["--prompt-tokens", "16", "-m", "8", "--repeats", "1"]


def run(*arguments: str, measure: Callable[[], float] = lambda: 1.0) -> subprocess.CompletedProcess[str]:
    """The command in this process, whose signals it takes; the engines have their own processes."""
    taken = (signal.SIGTERM, signal.SIGHUP)
    usual = [signal.getsignal(number) for number in taken]
    try:
        with patch.object(bandwidth, "measure_bandwidth", measure):
            return call("bench", *arguments)
    finally:
        for number, handler in zip(taken, usual, strict=True):
            signal.signal(number, handler)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Every engine that computes here, on the embedded model with an unquantized cache."""
    file = tmp_path_factory.mktemp("bench") / "all.jsonl"
    engines = ["--engine", "kvant", "--engine", "kvant:unfused", "--engine", "mlx-lm:float32"]
    arguments = [*SMALL, *engines, "--kv-bits", "0", "--output", str(file)]
    return run(*arguments, measure=bandwidth.measure_bandwidth), file


def test_all_engines_agree(recorded: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, file = recorded
    assert done.returncode == 0, done.stderr
    recording = read_recording(file)
    assert list(recording.engines) == ["kvant full", "kvant full unfused", "mlx-lm float32"]
    assert len({run.token_ids for run in recording.runs}) == 1
    assert [(run.tokens, run.context) for run in recording.runs] == [(8, 16)] * 3
    assert len(recording.tokens) == 24
    assert recording.interrupted() == []
    header = recording.header
    assert (header.model, header.seed, header.baseline) == ("pocket", 0, "mlx-lm float32")
    assert header.command.startswith("bench --prompt-tokens 16 -m 8")
    assert header.copy_bandwidth_gb_s is not None
    assert header.copy_bandwidth_gb_s > 0.1
    sizes = {engine.weight_bytes for engine in recording.engines.values()}
    assert max(sizes) < 1.01 * min(sizes)  # type: ignore[operator, type-var]


def test_tables_to_standard_output_and_progress_to_standard_error(
    recorded: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, _ = recorded
    for label in ("kvant full", "kvant full unfused", "mlx-lm float32"):
        assert label in done.stdout
        assert f"{label}: loading\n" in done.stderr
        assert f"{label}: warming up with 16 tokens of context\n" in done.stderr
        assert f"round 1 of 1, 16 tokens of context, {label}: first token " in done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    same = "Runs with the same tokens as mlx-lm float32: kvant full in 1 of 1, kvant full unfused in 1 of 1."
    assert same in " ".join(done.stdout.split())


def test_compare(recorded: tuple[subprocess.CompletedProcess[str], Path], tmp_path: Path) -> None:
    _, file = recorded
    done = run("compare", str(file), str(file))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"A: {file}\nB: {file}\n")
    assert "kvant full" in done.stdout
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{}\n")
    for other, message in ((broken, "line 1"), (tmp_path / "none.jsonl", "cannot be read")):
        done = run("compare", str(file), str(other))
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"kvant: error: {other}")
        assert message in done.stderr
        assert done.stderr.count("\n") == 1


def test_json_of_random_weights_with_quantized_caches() -> None:
    model = ["--random", "pocket", "--weight-bits", "8", "--kv-bits", "8,4", "--kv-group-size", "32"]
    model += ["--draft", "prompt", "--replay", "edit"]
    done = run(*SMALL, *model, "--baseline", "kvant 4-bit", "--json", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    summaries = json.loads(done.stdout)
    labels = ["kvant 8-bit", "kvant 8-bit, drafts", "kvant 4-bit", "kvant 4-bit, drafts"]
    assert [summary["engine"] for summary in summaries] == labels
    assert [summary["ratio"] and summary["ratio"]["median"] == 1.0 for summary in summaries] == [
        False,
        None,
        True,
        None,
    ]
    assert [summary["tokens_per_step"] is not None for summary in summaries] == [False, True, False, True]


def test_streams(tmp_path: Path) -> None:
    """Engines take turns in an order that alternates, and one by one gives the same tokens."""
    file, plot = tmp_path / "streams.jsonl", tmp_path / "streams.svg"
    arguments = ["--streams", "1,3", "--prompt-tokens", "5,12", "-m", "3", "--repeats", "2", "--json"]
    done = run(*arguments, "--kv-bits", "0", "--output", str(file), "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    labels = ["kvant full", "kvant full, one by one"]
    labels.append(next(s["engine"] for s in json.loads(done.stdout) if s["engine"] not in labels))
    assert labels[2].startswith("mlx-lm float32")
    recording = read_recording(file)
    order = [(s.run, s.streams, s.engine) for s in recording.streams]
    forwards = [(0, count, label) for count in (1, 3) for label in labels]
    assert order == forwards + [(1, count, label) for count in (1, 3) for label in labels[::-1]]
    assert [s.prompt_tokens for s in recording.streams] == [(5,)] * 3 + [(5, 12, 5)] * 3 + [(5,)] * 3 + [(5, 12, 5)] * 3
    for number in (0, 1):
        assert len({s.token_ids for s in recording.streams if (s.run, s.streams) == (number, 3)}) == 1
    assert "round 2 of 2, 3 streams, kvant full: " in done.stderr
    assert plot.exists()
    refused = run("compare", str(file), str(file))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "is a recording of --streams; compare takes those of single requests" in refused.stderr


def test_a_server_beside_the_others(served: tuple[str, Reply], tmp_path: Path) -> None:
    url, reply = served
    chunk = {"choices": [{"index": 0, "text": " word", "finish_reason": None}]}
    reply.say(*[chunk] * 4, {"choices": [], "usage": {"prompt_tokens": 16, "completion_tokens": 4}})
    file = tmp_path / "server.jsonl"
    arguments = ["--server", url, "--server-model", "small", "--engine", "kvant", "--kv-bits", "8"]
    done = run(*SMALL, *arguments, "--output", str(file))
    assert done.returncode == 0, done.stderr
    recording = read_recording(file)
    assert list(recording.engines) == ["kvant 8-bit", "server"]
    assert [(run.engine, run.tokens) for run in recording.runs] == [("kvant 8-bit", 8), ("server", 4)]
    assert "ended after 4 tokens" in done.stderr
    warm_up, measured = (body["prompt"] for body in reply.bodies)
    assert warm_up != measured
    assert url not in done.stdout + done.stderr


def test_streams_of_two_servers(served: tuple[str, Reply], tmp_path: Path) -> None:
    """Only they are measured; each stream has a request of its own, and the streams of a round other prompts."""
    url, reply = served
    chunk = {"choices": [{"index": 0, "text": " word", "finish_reason": None}]}
    reply.say(*[chunk] * 4, {"choices": [], "usage": {"prompt_tokens": 16, "completion_tokens": 4}})
    file = tmp_path / "servers.jsonl"
    names = ["--server", f"here={url}", "--server", f"there={url}/v1", "--server-model", "a", "--server-model", "b"]
    done = run(*SMALL, *names, "--streams", "1,3", "--baseline", "there", "--json", "--output", str(file))
    assert done.returncode == 0, done.stderr
    lines = read_recording(file).streams
    assert [(s.engine, s.streams) for s in lines] == [("here", 1), ("there", 1), ("here", 3), ("there", 3)]
    assert [[len(times) for times in s.arrivals_ms] for s in lines] == [[4], [4], [4] * 3, [4] * 3]
    assert {(s.token_ids, s.cpu_ms, s.peak_memory_bytes) for s in lines} == {(None, None, None)}
    assert [body["model"] for body in reply.bodies] == ["a", "b"] * 2 + ["a"] * 3 + ["b"] * 3 + ["a"] * 3 + ["b"] * 3
    asked = [body["prompt"] for body in reply.bodies]
    assert len(set(asked)) == 8  # two rounds, the first unrecorded, of one stream and of three
    summaries = json.loads(done.stdout)
    assert [s["ratio"]["median"] == 1.0 for s in summaries] == [False, True, False, True]
    assert {s["cpu_ratio"] for s in summaries} == {None}


def test_a_server_that_is_not_there() -> None:
    done = run(*SMALL, "--server", "http://127.0.0.1:1", *ONE, "-q")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("kvant: error: engine server: http://127.0.0.1:1: ")


def test_an_engine_that_cannot_load(make_checkpoint: Callable[..., tuple[Path, Any]]) -> None:
    folder, _ = make_checkpoint()
    (folder / "model.safetensors").write_bytes(b"nothing")
    done = run(*SMALL, "--model", str(folder), "-q", *ONE)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("kvant: error: engine kvant 8-bit: ")
    assert "not a whole safetensors file" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "llama"], "engine is 'llama'; expected one of kvant, mlx-lm; a server is named by its URL"),
        (["--engine", "mlx-lm:int8"], "mlx-lm takes one of float32, float16, bfloat16"),
        (["--engine", "kvant", "--engine", "kvant"], "engine 'kvant' is named twice"),
        (["--kv-bits", "8,x"], "--kv-bits is '8,x'; expected whole numbers between commas"),
        (["--kv-bits", "8,8"], "--kv-bits has 8 twice"),
        (["--kv-bits", "2"], "--kv-bits has 2; expected 0, 4 or 8"),
        (["--kv-bits", "0", "--kv-group-size", "32"], "--kv-group-size is 32, but --kv-bits 0 does not quantize"),
        (["--kv-group-size", "24"], "kv group size is 24; expected a divisor of the head dimension 64"),
        (["--kv-group-size", "16"], "of mlx-lm also one of 32, 64, 128"),
        (["--kv-group-size", "0"], "--kv-group-size is 0; expected at least 1"),
        (["--prompt-tokens", ""], "--prompt-tokens is ''; expected whole numbers"),
        (["--prompt-tokens", "0"], "--prompt-tokens has 0; expected at least 1"),
        (["--prompt-tokens", "128,128"], "--prompt-tokens has 128 twice"),
        (["--prompt-tokens", "128,1985"], "--prompt-tokens has 1985; with --max-tokens 64 that is more than"),
        (["--max-tokens", "1921"], "--max-tokens is 1921; the model's context is 2048; set --prompt-tokens too"),
        (["--max-tokens", "0"], "--max-tokens is 0; expected at least 1"),
        (["--repeats", "0"], "--repeats is 0; expected at least 1"),
        (["--repeats", "many"], "Invalid value"),
        (["--prefill-step-size", "0"], "--prefill-step-size is 0; expected at least 1"),
        (["--random", "gpt-5"], "--random is 'gpt-5'; expected qwen2.5-0.5b, "),
        (["--random", "pocket", "--model", "pocket"], "--model pocket and --random pocket exclude each other"),
        (["--weight-bits", "4"], "--weight-bits is 4, but only --random makes weights"),
        (["--weight-group-size", "32"], "--weight-group-size is 32, but only --random makes weights"),
        (["--random", "pocket", "--weight-bits", "3"], "bits is 3; expected 0, 4 or 8"),
        (["--random", "pocket", "--weight-group-size", "48"], "group_size is 48"),
        (
            ["--random", "pocket", "--weight-bits", "0", "--weight-group-size", "64"],
            "--weight-bits 0 does not quantize",
        ),
        (["--server-model", "x"], "--server-model is 'x', but --server is given 0 times"),
        (["--server", "http://x", "--server", "http://y"], "--server has the name 'server' twice"),
        (["--server", "=http://x"], "--server has the name '' twice, or none; expected NAME=URL"),
        (
            ["--server", "http://x", "--server-model", "a", "--server-model", "b"],
            "is 'a', 'b', but --server is given 1",
        ),
        (["--server", "ftp://x"], "--server: server URL is 'ftp://x'; expected http"),
        (["--random", "pocket", "--server", "http://x"], "--server needs --model"),
        (["--replay", "edit"], "--replay is edit, which has no effect without --draft prompt"),
        (["--draft", "prompt", "--streams", "2"], "--draft is prompt; with --streams 2 drafts are not measured"),
        (["--draft", "prompt", "--plot", "a.svg"], "--draft is prompt; --plot draws each token's time, and drafted"),
        (
            ["--draft", "prompt", "--engine", "mlx-lm"],
            "--draft is prompt; of --engine mlx-lm none is kvant, which drafts",
        ),
        (
            ["--draft", "prompt", "--replay", "new", "--engine", "kvant", "--engine", "mlx-lm"],
            "--replay is new; --engine mlx-lm generates the likeliest tokens alone",
        ),
        (
            ["--draft", "prompt", "--replay", "new", "--server", "http://localhost:1"],
            "--replay is new; --server http://localhost:1 generates the likeliest tokens alone",
        ),
        (["--draft-model", "pocket", "--draft", "prompt"], "--draft is prompt, and --draft-model drafts: expected one"),
        (["--draft-model", "pocket", "--replay", "new"], "it drafts what a model writes, and --replay new is no such"),
        (["--draft-model", "pocket", "--random", "pocket"], "and --random pocket is no such text"),
        (["--num-draft-tokens", "3"], "num-draft-tokens is 3, which has no effect without --draft-model"),
        (["--baseline", "mlxlm"], "--baseline is 'mlxlm'; expected one of 'kvant full', 'kvant 8-bit', 'kvant 4-bit'"),
        (["--output", "HERE/there.jsonl"], "there.jsonl exists; a recording goes to a new file"),
        (["--output", "HERE/no/x.jsonl"], "does not exist"),
        (["--plot", "HERE/x.pdf"], "expected a name that ends in .png or .svg"),
        (["--plot", "HERE/no/x.png"], "its folder does not exist"),
        (["--plot", "HERE/x.svg", "--output", "HERE/x.svg"], "--output and --plot are both"),
        (["--plot", "HERE/x.png", "--max-tokens", "1"], "--max-tokens is 1"),
        (["--seed", "9223372036854775808"], "--seed is 9223372036854775808; expected from -9223372036854775807 to"),
        (["--seed", "1", "compare", "a", "b"], "compare takes no options of bench; seed is given"),
        (["compare", "a"], "Missing argument 'B'"),
        (["--streams", "0"], "--streams has 0; expected from 1 to 256"),
        (["--streams", "4,4"], "--streams has 4 twice"),
        (["--streams", "4", "--server", "http://x", "--kv-bits", "8"], "--kv-bits is 8, but --streams with --server"),
        (["--streams", "4", "--engine", "kvant:fused"], "setting is 'fused'; MLX's default device is no GPU"),
        (["--streams", "4", "--baseline", "kvant full"], "expected one of 'kvant 8-bit', 'kvant 8-bit, one by one'"),
        (["pocket", "--model", "pocket"], "the model is given twice, as the argument 'pocket' and with --model"),
    ],
)
def test_usage_errors(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Found before a process is started."""
    (tmp_path / "there.jsonl").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["kvant", "bench", *(text.replace("HERE", str(tmp_path)) for text in arguments)])
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process is started"))
    with pytest.raises(SystemExit) as ended:
        main()
    output = capsys.readouterr()
    assert (ended.value.code, output.out) == (2, "")
    assert output.err.startswith("kvant: error: ")
    assert message in output.err
    assert output.err.count("\n") == 1
    assert (tmp_path / "there.jsonl").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_blas_that_is_not_there_is_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine ran with MLX's own, and was called OpenBLAS in every table."""
    monkeypatch.setenv("KVANT_BLAS", "mlx")
    command = [*COMMAND, *SMALL, "--engine", "mlx-lm:float32:openblas"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "kvant: error: an engine is to have openblas, but kvant has none to lend here (mlx: KVANT_BLAS asks for it)\n"
    )


def test_the_default_prompts_are_those_the_model_has_room_for() -> None:
    assert contexts(None, 64, 2048) == [128, 1024]
    assert contexts(None, 64, 4160) == [128, 1024, 4096]
    assert contexts("7, 9", 1, 10) == [7, 9]


def test_the_help_names_the_shapes() -> None:
    assert SHAPE_NAMES.replace(" or ", ", ").split(", ") == list(SHAPES)


def test_other_commands_do_not_wait_for_its_imports() -> None:
    script = "import sys, kvant.cli; print(*(name for name in sys.modules if name.startswith('kvant.tools.bench')))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def _start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _wait_for(process: subprocess.Popen[str], line: str) -> None:
    assert process.stderr is not None
    for found in process.stderr:
        if line in found:
            return
    raise AssertionError(f"{line!r} did not come")


TWO = ["--engine", "kvant", "--kv-bits", "8,4"]
LONG = ["--prompt-tokens", "32", "-m", "16", "--repeats", "100000"]
ENDLESS = [*TWO, *LONG]


@pytest.mark.parametrize(
    ("number", "bits"), [(signal.SIGINT, "8,4"), (signal.SIGTERM, "8"), (signal.SIGHUP, "8")], ids=str
)
def test_interrupted(tmp_path: Path, number: signal.Signals, bits: str) -> None:
    """In the third run. Several engines with one signal; the others end the same command."""
    file = tmp_path / "cut.jsonl"
    process = _start("--engine", "kvant", "--kv-bits", bits, *LONG, "--output", str(file))
    _wait_for(process, f"round {2 if ',' in bits else 3} of 100000")
    workers = _children(process.pid)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    recording = read_recording(file)
    assert len(recording.runs) >= 3
    for each in bits.split(","):
        assert f"kvant {each}-bit" in output  # the report of the runs that came to their end
    _check_ended(workers)


def test_under_nohup_it_outlives_its_terminal() -> None:
    process = subprocess.Popen(
        ["nohup", *COMMAND, *SMALL, *ONE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    _wait_for(process, "measuring")
    process.send_signal(signal.SIGHUP)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "kvant 8-bit" in output


def test_a_killed_command_leaves_no_process(tmp_path: Path) -> None:
    file = tmp_path / "cut.jsonl"
    process = _start(*ENDLESS, "--output", str(file))
    _wait_for(process, "round 1 of 100000")
    workers = _children(process.pid)
    process.kill()
    process.communicate(timeout=60)
    _check_ended(workers)
    assert len(_read(file).runs) >= 1


def test_an_engine_that_is_killed(tmp_path: Path) -> None:
    if not Path("/proc").is_dir():
        pytest.skip("processes are found in /proc")
    file = tmp_path / "cut.jsonl"
    process = _start(*ENDLESS, "--output", str(file))
    _wait_for(process, "round 2 of 100000")
    workers = _children(process.pid)
    os.kill(workers[0], signal.SIGKILL)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    last = errors.splitlines()[-1]
    assert last.startswith("kvant: error: engine ")
    assert last.endswith("its process was ended by SIGKILL")
    assert "Traceback" not in errors
    assert "Time" in output
    assert len(_read(file).runs) >= 3
    _check_ended(workers)


def _read(file: Path) -> Recording:
    return read_recording(file)


def _children(parent: int) -> list[int]:
    """Processes it started; none where they cannot be found."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == parent:
            found.append(int(path.parent.name))
    return sorted(found)


def _check_ended(processes: list[int]) -> None:
    assert processes or not Path("/proc").is_dir()
    deadline = time.monotonic() + 5
    while any(_runs(number) for number in processes):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.05)


def _runs(number: int) -> bool:
    """Whether a process is there and not only waiting for its exit code to be read."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

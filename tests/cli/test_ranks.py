"""Commands on several ranks: what each rank gets, the same answers as in one process, and how a run ends."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.checkpoints import qwen2_config, reference_model, save_checkpoint
from support.command import COMMAND, are_gone, call, children, run
from support.counts import count
from support.interfaces import COMPLETIONS
from support.ranks import run_ranks
from support.server import started

import kvant
from kvant.cli import session
from kvant.cli.options import RunOptions
from kvant.engine.load import find_model
from kvant.ranks import follow
from kvant.sample_utils import make_sampler

KVANT = [sys.executable, "-c", "from kvant_command import main; main()"]
STORY = ["Tell me a story", "--max-tokens", "60", "--ignore-eos", "--temp", "0.8", "--seed", "3"]
LONG = ["generate", "Once upon a time", "--ignore-eos", "--temp", "0", "--kv-bits", "0", "-m", "1000"]
SSH = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
echo "to $3" >>"$TMPDIR/sent"
exec /bin/bash -c "${4#stty -echo; }"
"""
# In the place of Python: it says what it was given.
FAKE = """#!/bin/sh
exec {python} -S -c '
import json, os, sys
own = {{name: value for name, value in os.environ.items() if name in ("MLX_RANK", "TEXT")}}
ring = json.load(open(os.environ["MLX_HOSTFILE"]))
sys.stdout.write(json.dumps(dict(own=own, ring=ring, words=sys.argv[4:], folder=os.getcwd())) + chr(10))
' "$@"
"""


@pytest.mark.parametrize(("ranks", "parallel", "bits"), [(count(3, 4), "pipeline", "8"), (2, "tensor", "0")])
def test_the_same_tokens_as_one_process(ranks: int, parallel: str, bits: str) -> None:
    words = ["generate", *STORY, "--json", "--kv-bits", bits]
    alone, divided = call(*words), run("launch", "-n", str(ranks), "--", *words, "--parallel", parallel)
    assert divided.returncode == 0, divided.stderr
    tokens = [[json.loads(line)["token"] for line in done.stdout.splitlines()] for done in (alone, divided)]
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 60
    exchanged = "0 sums, 2 messages, 2.05 kB" if parallel == "pipeline" else "8 sums, 0 messages, 8.19 kB"
    assert f"ranks: {ranks}, {parallel}; {exchanged} in the last step" in divided.stderr
    assert divided.stderr.count("sampling:") == 1  # rank 0 alone prints


def test_several_answers_at_once() -> None:
    words = ["generate", "Once upon a time", "--n", "3", "--sequences", "2", "--temp", "0.8", "--seed", "1"]
    words += ["-m", "8", "-q"]
    divided = run("launch", "-n", "2", "--", *words)
    assert (divided.returncode, divided.stdout) == (0, call(*words).stdout)


def test_a_conversation() -> None:
    command = ["chat", "--temp", "0", "--max-tokens", "12", "-q", "--kv-bits", "0"]
    said = "Hi there\nTell me a story\n/undo\nAnd now?"
    alone = call(*command, stdin=said)
    divided = run("launch", "-n", "2", "--", *command, "--draft", "prompt", stdin=said)
    assert divided.returncode == alone.returncode == 0
    assert divided.stdout == alone.stdout
    assert len(alone.stdout.splitlines()) >= 3


def test_a_server(tmp_path: Path) -> None:
    words = ["serve", "--port", "0", "--parallel", "tensor", "--draft", "prompt"]
    with started(tmp_path, command=[*COMMAND, "launch", "-n", "2", "--", *words]) as (server, client, _):
        for seed in (1, 2):
            body = COMPLETIONS.body("Once upon a time", 20, temperature=1, seed=seed, top_p=1, top_k=0)
            text = client.post(COMPLETIONS.path, json=body).json()["choices"][0]["text"]
            sampler = make_sampler(temp=1.0, seed=seed)
            assert text == kvant.generate(
                *kvant.load("pocket"), body["prompt"], max_tokens=20, sampler=sampler
            )
        server.terminate()
        assert server.wait(60) in (0, 143)


def test_the_doctor() -> None:
    done = run("launch", "-n", "2", "--", "doctor", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["healthy"], found["problems"]) == (True, [])


ASK = ["generate", "Hi", "--model"]


@pytest.mark.parametrize(
    ("code", "said", "commands"),
    [
        (1, "rank 1: the model's digest is ", [[*ASK, "./0"], [*ASK, "./1"]]),
        (1, "rank 1: --kv-bits is 4; rank 0 has 8", [[*ASK, "pocket"], [*ASK, "pocket", "--kv-bits", "4"]]),
        (1, "rank 1: the command is chat; rank 0 has generate", [[*ASK, "pocket"], ["chat"]]),
        (2, "'models' was started as 2 ranks", [["models"]] * 2),
        (2, "--prompt-cache-file is not supported", [["generate", "Hi", "--prompt-cache-file", "file"]] * 2),
        (2, "--disk-cache is not supported", [["serve", "--disk-cache", "folder"]] * 2),
        (2, "the ranks cannot read standard input", [["generate"]] * 2),
    ],
)
def test_what_ranks_refuse(
    code: int, said: str, commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in (0, 1):
        save_checkpoint(tmp_path / str(seed), qwen2_config(), reference_model(qwen2_config(), seed))
        (tmp_path / str(seed) / "tokenizer.json").write_text("{}")
    first, other = run_ranks([[*KVANT, *command] for command in commands])
    assert (first.returncode, other.returncode, other.stdout, other.stderr) == (code, code, "", "")
    assert first.stderr.startswith("kvant: error: ")
    assert said in first.stderr
    assert first.stderr.count("\n") == 1


@pytest.mark.parametrize(("wired", "bounded"), [(False, False), (True, False), (False, True)])
def test_options_of_memory_are_applied(wired: bool, bounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, object]] = []
    divided = SimpleNamespace(
        total=30, arrays=20, scratch=10, load=lambda *given: done.append(("load", given))
    )
    monkeypatch.setattr(session.ranks, "guard", lambda: SimpleNamespace(rank=1))
    monkeypatch.setattr(session, "prepare", lambda run, folder: (None,) * 3)
    monkeypatch.setattr(session, "divide_model", lambda *given: divided)
    monkeypatch.setattr(follow, "follow", lambda part, guard: 0)
    monkeypatch.setattr(session, "wire", lambda count: done.append(("wire", count)))
    monkeypatch.setattr(session, "bound_memory", lambda *limits: done.append(("bound", limits)))
    session.follow(RunOptions(wired=wired), bounded=bounded)
    assert done == [
        *[("wire", 30)] * wired,
        *[("bound", (20, 10))] * bounded,
        ("load", (find_model("pocket"), None, None)),
    ]


@pytest.mark.parametrize(
    ("flags", "stdin", "code", "message"),
    [
        (["-n", "2", "--backend", "tcp"], "", 2, "The backend should be one of"),
        (["-n", "2", "--python", "/bin/false"], "", 1, "Node with rank 0 exited with code 1"),
        (["-n", "2"], "piped", 2, "the ranks cannot read standard input"),
    ],
)
def test_what_mlx_refuses(flags: list[str], stdin: str, code: int, message: str) -> None:
    done = run("launch", *flags, "--", "generate", "Hi", stdin=stdin)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_ranks_of_a_host_file(tmp_path: Path) -> None:
    """ssh is a stand-in that says where it was sent, and runs there what it was told to."""
    for name, text in (("ssh", SSH), ("python", FAKE.format(python=sys.executable))):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    hosts = [{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}, {"ssh": "mac2", "ips": ["192.0.2.1"]}]
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps({"backend": "ring", "envs": ["TEXT=a b"], "hosts": hosts}))
    flags = [
        "--hostfile",
        str(path),
        "-p",
        "5001",
        "--python",
        str(tmp_path / "python"),
        "--cwd",
        str(tmp_path),
    ]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    done = run("launch", *flags, "kvant", "generate", "it's", "-n", **environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "sent").read_text() == "to mac2\n"
    said = sorted(map(json.loads, done.stdout.splitlines()), key=lambda each: str(each["own"]["MLX_RANK"]))
    for rank, each in enumerate(said):
        assert each["own"] == {"MLX_RANK": str(rank), "TEXT": "a b"}
        assert each["ring"] == [["127.0.0.1:5001"], ["192.0.2.1:5002"]]
        assert (each["words"], each["folder"]) == (["generate", "it's", "-n"], str(tmp_path))


def test_one_rank_is_the_command_alone() -> None:
    plain = ["generate", "Hello!", "-m", "5", "--temp", "0", "-q"]
    assert run("launch", "-n", "1", "--", *plain).stdout == call(*plain).stdout


def rank_of(process: int) -> int:
    """Threads of MLX's launcher start the ranks, in any order."""
    shown = subprocess.run(
        ["ps", "eww", "-o", "command=", "-p", str(process)], capture_output=True, text=True
    ).stdout
    return int(shown.partition(" MLX_RANK=")[2].split()[0])


@pytest.mark.parametrize(
    ("begun", "sign", "to", "code", "line"),
    [
        (True, signal.SIGKILL, 0, 137, "rank 0"),
        (True, signal.SIGSTOP, 1, 1, "rank 1 has been silent"),
        (True, signal.SIGINT, None, 130, ""),
        (True, signal.SIGTERM, None, 143, "rank 0"),
        (True, signal.SIGKILL, None, -9, ""),
        (False, signal.SIGKILL, None, -9, ""),
    ],
)
def test_all_end(
    begun: bool, sign: signal.Signals, to: int | None, code: int, line: str, tmp_path: Path
) -> None:
    """A signal to a rank or to the launcher, when rank 0 answers or when processes have only just started."""
    command, said = [*COMMAND, "launch", "-n", "2", "--", *LONG], tmp_path / "said"
    with (
        said.open("w") as written,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=written
        ) as launcher,
    ):
        ranks: list[int] = []
        try:
            assert not begun or launcher.stdout.read(20), said.read_text()
            while len(ranks) < 2 and launcher.poll() is None:
                ranks = children(launcher.pid)
            os.kill(launcher.pid if to is None else next(each for each in ranks if rank_of(each) == to), sign)
            launcher.stdout.read()
            assert launcher.wait(60) == code, said.read_text()
            assert are_gone(ranks), "a rank stays"  # which may have to start first
            assert line in said.read_text()  # MLX's launcher says it too, and may be first
            assert said.read_text().count("kvant: error: ") <= bool(line)
            assert not any(text in said.read_text() for text in ("Traceback", "code 130"))
        finally:
            for each in (launcher.pid, *ranks):
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)


def test_a_reader_that_goes_away() -> None:
    """``| head``: as silent as one process."""
    command = [*COMMAND, "launch", "-n", "2", "--", *LONG, "-q"]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as launcher:
        assert launcher.stdout.read(5)
        launcher.stdout.close()
        assert launcher.stderr.read() == b""
        assert launcher.wait(60) == 1

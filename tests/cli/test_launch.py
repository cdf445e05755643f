"""``kvant launch``: what is refused before anything starts, and what each rank then gets."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest
from support.command import COMMAND, call, run

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


@pytest.mark.parametrize(
    ("flags", "stdin", "code", "message"),
    [
        (["-n", "2", "--backend", "tcp"], "", 2, "The backend should be one of"),
        (["-n", "2", "--python", "/bin/false"], "", 1, "Node with rank 0 exited with code 1"),
        (["-n", "2"], "piped", 2, "standard input reaches no rank"),
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
    flags = ["--hostfile", str(path), "-p", "5001", "--python", str(tmp_path / "python"), "--cwd", str(tmp_path)]
    done = run(
        "launch",
        *flags,
        "kvant",
        "generate",
        "it's",
        "-n",
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        TMPDIR=str(tmp_path),
    )
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


def children(process: int) -> list[int]:
    """Those of a process, in the order in which they were started."""
    listed = subprocess.run(["ps", "-Ao", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    return sorted(int(line.split()[0]) for line in listed.splitlines() if int(line.split()[1]) == process)


def are_gone(processes: list[int], within_s: float) -> bool:
    """Whether all have ended in time."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        alive = []
        for each in processes:
            state = subprocess.run(["ps", "-o", "state=", "-p", str(each)], capture_output=True, text=True).stdout
            alive += [each] if state.strip()[:1] not in ("", "Z") else []
        if not alive:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    ("begun", "sign", "to", "code", "line"),
    [
        (True, signal.SIGKILL, 0, 137, "rank 0"),
        (True, signal.SIGSTOP, 1, 1, "rank 1 has said nothing"),
        (True, signal.SIGINT, None, 130, ""),
        (True, signal.SIGTERM, None, 143, "rank 0"),
        (True, signal.SIGKILL, None, -9, ""),
        (False, signal.SIGKILL, None, -9, ""),
    ],
)
def test_all_end(begun: bool, sign: signal.Signals, to: int | None, code: int, line: str, tmp_path: Path) -> None:
    """A signal to a rank or to the launcher, when rank 0 answers or when processes have only just started."""
    command = [*COMMAND, "launch", "-n", "2", "--", *LONG]
    with (
        (tmp_path / "said").open("w") as written,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=written) as launcher,
    ):
        ranks: list[int] = []
        try:
            assert launcher.stdout is not None
            assert not begun or launcher.stdout.read(20)
            while len(ranks) < 2 and launcher.poll() is None:
                ranks = children(launcher.pid)
            os.kill(launcher.pid if to is None else ranks[to], sign)
            began = time.monotonic()
            launcher.stdout.read()
            assert launcher.wait(60) == code
            assert are_gone(ranks, 5.0), "a rank stays"
            assert time.monotonic() - began < 15.0
            said = (tmp_path / "said").read_text()
            assert line in said  # MLX's launcher says it too, and may be first
            assert said.count("kvant: error: ") <= bool(line)
            assert not any(text in said for text in ("Traceback", "code 130"))
        finally:
            for each in (launcher.pid, *ranks):
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)


def test_a_reader_that_goes_away() -> None:
    """``| head``: as silent as one process."""
    with subprocess.Popen(
        [*COMMAND, "launch", "-n", "2", "--", *LONG, "-q"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stderr is not None
        assert launcher.stdout.read(5)
        launcher.stdout.close()
        assert launcher.stderr.read() == b""
        assert launcher.wait(60) == 1


def test_a_shell_completes_the_command_that_is_launched() -> None:
    def completed(line: str) -> list[str]:
        words = {"_KVANT_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
        with patch.dict(os.environ, words):
            return call().stdout.split()

    assert completed("kvant launch --hos") == ["--hostfile"]
    assert completed("kvant launch -n 2 -- g") == ["generate"]
    assert sorted(completed("kvant launch -n 2 -- generate --prefi")) == ["--prefill-response", "--prefill-step-size"]

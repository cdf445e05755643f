"""``kvant launch``: what is refused before anything starts, and what each rank then gets."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from support.command import COMMAND, call, run

FAKE = """#!/bin/sh
exec {python} -S -c '
import json, os, sys
own = {{name: value for name, value in os.environ.items() if name.startswith(("MLX_", "KVANT_GUARD", "TEXT"))}}
if "MLX_HOSTFILE" in own:
    own["ring"] = json.load(open(own.pop("MLX_HOSTFILE")))
said = dict(own=own, words=sys.argv[4:], stdin=sys.stdin.read(), folder=os.getcwd())
stream = sys.stdout if own.get("MLX_RANK", "0") == "0" else sys.stderr
stream.write(json.dumps(said) + chr(10))
' "$@"
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no command after --; expected one of generate, chat, serve, bench, plan, doctor"),
        (["-n", "2", "--"], "no command after --"),
        (["-n", "2", "--", "kvant"], "no command after --"),
        (["-n", "2", "--", "pull", "x"], "'pull' is not a command that runs on several machines; expected one of"),
        (["-n", "2", "--", "launch", "-n", "2"], "'launch' is not a command that runs on several machines"),
        (["-n", "2", "--", "generat"], "did you mean 'generate'?"),
        (["--", "generate"], "no -n and no --hostfile; expected one"),
        (["-n", "2", "--hostfile", "x", "generate"], "both -n and --hostfile; expected one of them"),
        (["-n", "0", "generate"], "--ranks is 0; expected 1 to 64"),
        (["-n", "2", "--backend", "mpi", "generate"], "'mpi', which has its own launcher: mpirun"),
        (["-n", "2", "--backend", "tcp", "generate"], "--backend is 'tcp'; expected ring, jaccl, jaccl-ring, nccl"),
        (["-n", "2", "--backend", "jaccl", "generate"], "--backend is 'jaccl', which is between machines"),
        (["-n", "2", "--env", "A", "generate"], "environment variable 'A'; expected NAME=VALUE"),
        (["-n", "2", "--env", "A-B=1", "generate"], "environment variable 'A-B=1'; expected NAME=VALUE"),
        (["-n", "2", "--env", "MLX_RANK=1", "generate"], "environment variable MLX_RANK is set by kvant launch"),
        (["-n", "2", "--cwd", "/no/folder", "generate"], "--cwd is '/no/folder', which is not a folder"),
        (["-n", "2", "-p", "65535", "generate"], "--starting-port is 65535; expected 2 to 65534"),
    ],
)
def test_what_is_refused(arguments: list[str], message: str) -> None:
    done = call("launch", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_a_host_file_that_lacks_something(tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    path.write_text('[{"ssh": "mac1", "ips": ["192.0.2.1"]}, {"ssh": "mac2"}]')
    done = call("launch", "--hostfile", str(path), "generate")
    assert (done.returncode, done.stdout) == (1, "")
    assert "rank 1, mac2, has no ips; the ring needs one of each rank" in done.stderr


@pytest.fixture
def fake(tmp_path: Path) -> str:
    """In the place of Python: it says what it was given."""
    path = tmp_path / "python"
    path.write_text(FAKE.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


def test_ranks_of_this_machine(fake: str, tmp_path: Path) -> None:
    flags = ["-n", "2", "--python", fake, "--env", "TEXT=a b", "--cwd", str(tmp_path)]
    done = run("launch", *flags, "--", "kvant", "generate", "-n", "--", "hi", stdin="piped")
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout), json.loads(done.stderr)
    assert (first["stdin"], second["stdin"]) == ("piped", "")
    for rank, said in enumerate((first, second)):
        assert said["words"] == ["generate", "-n", "--", "hi"]
        assert (said["own"]["MLX_RANK"], said["own"]["TEXT"], said["folder"]) == (str(rank), "a b", str(tmp_path))
    ports = [address for each in first["own"]["ring"] for address in each]
    assert len({*ports, first["own"]["KVANT_GUARD"]}) == 3
    assert {address.partition(":")[0] for address in ports} == {"127.0.0.1"}
    assert first["own"]["ring"] == second["own"]["ring"]
    again = json.loads(run("launch", *flags, "generate").stdout)
    assert again["own"]["KVANT_GUARD"] != first["own"]["KVANT_GUARD"]  # two at once do not meet


def test_one_rank_is_the_command_alone() -> None:
    plain = ["generate", "Hello!", "-m", "5", "--temp", "0", "-q"]
    assert run("launch", "-n", "1", "--", *plain).stdout == call(*plain).stdout


def test_ranks_of_a_host_file(fake: str, tmp_path: Path) -> None:
    """ssh is a stand-in that says where it was sent, and runs there what it was told to."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\necho "to $2" >&2\nexec /bin/sh -c "$3"\n')
    ssh.chmod(0o755)
    path = tmp_path / "hosts.json"
    path.write_text(
        json.dumps(
            {
                "backend": "ring",
                "envs": ["TEXT=from the file"],
                "hosts": [{"ssh": "localhost", "ips": ["127.0.0.1"]}, {"ssh": "mac2", "ips": ["192.0.2.1"]}],
            }
        )
    )
    done = subprocess.run(
        [*COMMAND, "launch", "--hostfile", str(path), "-p", "5001", "--python", fake, "generate", "it's"],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        input="piped",
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    sent, said = done.stderr.splitlines()
    assert sent == "to mac2"
    first, second = json.loads(done.stdout), json.loads(said)
    ring = [["127.0.0.1:5001"], ["192.0.2.1:5002"]]
    for rank, each in enumerate((first, second)):
        assert each["own"] == {
            "MLX_RANK": str(rank), "KVANT_GUARD": "127.0.0.1:5000", "TEXT": "from the file", "ring": ring
        }  # fmt: skip
        assert each["words"] == ["generate", "it's"]
        assert each["folder"] == os.getcwd()
    assert (first["stdin"], second["stdin"]) == ("piped", "")
    assert not list(tmp_path.glob("kvant-launch-*"))


def test_a_shell_completes_the_command_that_is_launched() -> None:
    def completed(line: str) -> list[str]:
        words = {"_KVANT_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
        with patch.dict(os.environ, words):
            return call().stdout.split()

    assert completed("kvant launch --hos") == ["--hostfile"]
    assert completed("kvant launch -n 2 -- g") == ["generate"]
    assert completed("kvant launch -n 2 -- pu") == []
    assert sorted(completed("kvant launch -n 2 -- generate --prefi")) == ["--prefill-response", "--prefill-step-size"]
    assert completed("kvant launch -n 2 -- kvant chat po") == ["pocket"]

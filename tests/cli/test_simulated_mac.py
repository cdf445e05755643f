"""Commands on a simulated Mac (support/simulated_mac): Python shows them nothing of Linux. They compute on
the CPU.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import COMMAND, QUESTION, are_gone, call, children, run
from support.hub import Hub
from support.pull_machine import REPOSITORY, Machine
from support.server import started
from support.terminal import Terminal, squeezed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it simulates a Mac on Linux")

SIMULATION = Path(__file__).parents[1] / "support" / "simulated_mac"
LIBRARY = Path("Library/Application Support/kvant")
OPEN_FILES = 256  # that macOS lets a process have, until it asks for more
AS_MACOS_STARTS = ["bash", "-c", f'ulimit -Sn {OPEN_FILES}; unset ${{!XDG_@}}; exec "$@"', "bash"]
TWENTY = ["--temp", "0", "-q", "-m", "20"]
# What a process sees: an expression and its value, or the name of its error.
SEEN = {
    "sys.platform": "darwin",
    "platform.system(), platform.machine(), platform.mac_ver()[0]": ["Darwin", "arm64", "15.5"],
    "os.uname().sysname, os.uname().release": ["Darwin", "24.5.0"],
    "hasattr(os, 'sched_getaffinity'), hasattr(os, 'pipe2')": [False, False],
    "os.path.exists('/proc/self'), pathlib.Path('/sys/fs/cgroup').exists()": [False, False],
    "open('/proc/self/statm').read(0)": "FileNotFoundError",
    "os.open('/proc/self/statm', 0) > 0": "FileNotFoundError",
    "'self' in os.listdir('/proc')": "FileNotFoundError",
    "resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))": "ValueError",
    "resource.setrlimit(resource.RLIMIT_DATA, (2**40, 2**40))": "ValueError",
    "resource.getrlimit(resource.RLIMIT_NOFILE)": [OPEN_FILES, -1],
    "ctypes.CDLL(None).prctl is not None": "AttributeError",
    "str(platformdirs.user_config_path('kvant').relative_to(pathlib.Path.home()))": str(LIBRARY),
    "pathlib.Path('~/a folder/NOTE').expanduser().read_text()": "kept",
    "os.path.exists(os.path.expanduser('~/A Folder/note'))": True,
}
PROBE = f"""
import ctypes, json, os, pathlib, platform, resource, sys
import platformdirs
def seen(what):
    try:
        return eval(what)
    except Exception as error:
        return type(error).__name__
print(json.dumps({{what: seen(what) for what in {list(SEEN)}}}))
"""
CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-P', '-c', {PROBE!r}])"


class Mac:
    """A user's home on it, and the processes that ran."""

    def __init__(self, folder: Path) -> None:
        self.home, self._log = folder / "Users" / "pip", folder / "processes"
        self.home.mkdir(parents=True)
        (self.home / "A folder").mkdir()
        (self.home / "A folder" / "Note").write_text("kept")
        self.environment = {
            "HOME": str(self.home),
            "PYTHONPATH": str(SIMULATION),
            "SIMULATED_MAC": str(self._log),
        }

    def ran(self, *programs: str) -> bool:
        """Whether all these were simulated since the last call: each is a part of a process's command."""
        commands = self._log.read_text().splitlines()
        self._log.unlink()
        return all(sum(each in command for command in commands) >= programs.count(each) for each in programs)


@pytest.fixture
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mac:
    made = Mac(tmp_path)
    for name in [*filter(lambda name: name.startswith(("XDG_", "HF_")), os.environ), "KVANT_CONFIG"]:
        monkeypatch.delenv(name, raising=False)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture(scope="module")
def answer() -> str:
    """The first twenty tokens of the embedded model's, on Linux."""
    return call("generate", QUESTION, *TWENTY).stdout


def test_the_simulation_holds_in_a_process_and_in_its_children(mac: Mac) -> None:
    def seen(code: str, **environment: str) -> dict[str, object]:
        command = [*AS_MACOS_STARTS, sys.executable, "-c", code]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=os.environ | environment
        )
        return dict(json.loads(done.stdout))

    assert seen(PROBE) == seen(CHILD) == SEEN
    on_linux = seen(PROBE, PYTHONPATH="")
    assert [what for what in SEEN if on_linux[what] == SEEN[what]] == []


def test_generate_and_the_config_file(mac: Mac, answer: str) -> None:
    (mac.home / LIBRARY).mkdir(parents=True)
    (mac.home / LIBRARY / "config.toml").write_text("max-tokens = 20\ntemp = 0\n")
    assert run("generate", QUESTION, "-q").stdout == answer
    assert mac.ran("-m kvant", "worker.py")


def test_a_template_that_takes_all_memory(mac: Mac, pocket_folder: Path) -> None:
    folder = shutil.copytree(pocket_folder, mac.home / "model")
    grow = "{% set n = namespace(x=[]) %}{% for i in range(900) %}{% set n.x = n.x + ['a' * 10**6 ~ i] %}{% endfor %}"
    wait = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(grow + wait)
    done = run("generate", QUESTION, "--model", str(folder))
    assert (done.returncode, done.stdout) == (1, "")
    assert "it needs too much memory" in done.stderr.splitlines()[-1]


def test_chat_on_a_terminal(mac: Mac, answer: str) -> None:
    with Terminal("chat", *TWENTY) as chat:
        for tokens, line in (("0", QUESTION), (r"[1-9]\d*", "/exit")):
            chat.wait(
                lambda tokens=tokens: re.search(rf"pocket · {tokens}/2048", "\n".join(chat.lines)) is not None
            )
            chat.press(line)
            chat.wait_for(f"> {line}")
            chat.press("\r")
        chat.wait(lambda: not chat.child.isalive())
        assert chat.child.exitstatus == 0
    assert squeezed(answer) in squeezed("\n".join(chat.lines))
    history = mac.home / LIBRARY / "chat_history"
    assert QUESTION in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600
    assert mac.ran("-m kvant", "worker.py")


def test_serve(mac: Mac, answer: str) -> None:
    command = [*AS_MACOS_STARTS, *COMMAND, "serve", "--port", "0", "--sequences", "2", "--max-kv-size", "512"]
    with started(mac.home, command=command) as (process, client, _):
        assert resource_limit(process.pid) > 1000
        body = {"model": "pocket", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 20}
        answered = client.post("/v1/chat/completions", json=body | {"temperature": 0}).json()
        assert answered["choices"][0]["message"]["content"] == answer.rstrip("\n")
        workers = children(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert are_gone(workers)
    assert mac.ran("-m kvant", "worker.py")


def resource_limit(process: int) -> int:
    """How many files a process may open."""
    (line,) = [
        line for line in Path(f"/proc/{process}/limits").read_text().splitlines() if "open files" in line
    ]
    return int(line.split()[3])


def test_pull(mac: Mac, machine: Machine, hub: Hub, answer: str) -> None:
    system = mac.environment | {
        "PYTHONPATH": f"{SIMULATION}:{machine.environment['PYTHONPATH']}",
        "XDG_CACHE_HOME": "",
    }
    folder = machine.pull(REPOSITORY, **system)
    assert [path.name for path in (mac.home / ".cache/kvant/weights").iterdir()] == [
        "somebody--small-model.json"
    ]
    for name in ("config.json", "other.safetensors"):  # as on a disk that holds no attributes, such as exFAT
        (folder / f"._{name}").write_bytes(b"\0\5\26\7")
    done = machine.run("generate", QUESTION, "--model", REPOSITORY, *TWENTY, **system)
    assert done.stdout == answer, done.stderr
    said = machine.refuses("generate", QUESTION, "--model", REPOSITORY.upper(), **system)
    assert f"the lock of '{REPOSITORY}'; expected '{REPOSITORY.upper()}'" in said


def test_convert(mac: Mac, pocket_folder: Path, answer: str) -> None:
    folder = shutil.copytree(pocket_folder, mac.home / "model")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "._tool_use.jinja").write_bytes(b"\0\5\26\7\xff")
    done = run("convert", str(folder), str(mac.home / "Smaller"), "--bits", "0", "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    assert not (mac.home / "Smaller" / "additional_chat_templates").exists()
    assert run("generate", QUESTION, "--model", "~/Smaller", *TWENTY).stdout == answer
    again = run("convert", str(folder), str(mac.home / "smaller"))
    assert (again.returncode, "exists already" in again.stderr) == (1, True)


def test_plan_and_doctor(mac: Mac) -> None:
    assert "\nfits, " in run("plan").stdout
    found = json.loads(run("doctor", "--json").stdout)
    assert found["environment"]["system"] == "Darwin 24.5.0 arm64"
    assert found["environment"]["blas"].startswith("mlx: Apple's Accelerate")
    assert (found["healthy"], found["to_do"]) == (True, [])


def test_two_ranks(mac: Mac, answer: str) -> None:
    done = run("launch", "-n", "2", "--", "generate", QUESTION, *TWENTY)
    assert done.stdout == answer, done.stderr
    assert mac.ran("-m kvant launch", "main() generate", "main() generate", "worker.py", "worker.py")

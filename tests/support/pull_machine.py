"""A user's machine that pulls from a hub on loopback (hub.py), and the repository it pulls.

Every process ends at once if it looks up or connects to anything but loopback.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import kvant
from support.hub import Hub, serve

Process = subprocess.Popen[str]
Done = subprocess.CompletedProcess[str]

REPOSITORY = "somebody/small-model"
WEIGHTS = "model.safetensors"
# What a process runs first: it ends where it would reach any other machine.
LOOPBACK_ONLY = """
import os, sys
LOOPBACK = ("127.0.0.1", "::1", "localhost")
def watch(event, arguments):
    if event == "socket.getaddrinfo" and arguments[0] not in LOOPBACK:
        os._exit(99)
    if event == "socket.connect" and arguments[1][0] not in LOOPBACK:
        os._exit(99)
sys.addaudithook(watch)
exec(os.environ.get("PRELUDE", ""))
from kvant.cli import main
"""
# Many commands in one process, which spares its start: a line of JSON in, one out.
SHELL = (
    LOOPBACK_ONLY
    + """
import contextlib, io, json, shutil
from pathlib import Path
from unittest.mock import patch
from kvant.engine.load import find_model
from kvant.errors import ModelError
from kvant.weights import known
requests, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO())
for line in requests:
    arguments, patches = json.loads(line)
    known.known_models.cache_clear()
    known.packaged_models.cache_clear()
    output, errors, code = io.StringIO(), io.StringIO(), 0
    with contextlib.ExitStack() as stack:
        for name, value in patches.items():
            stack.enter_context(patch(name, eval(value)))
        stack.enter_context(contextlib.redirect_stdout(output))
        stack.enter_context(contextlib.redirect_stderr(errors))
        try:
            if arguments[0] == "find":
                find_model(*arguments[1:])
            else:
                sys.argv = ["kvant", *arguments]
                main()
        except ModelError as error:
            print(error)
        except SystemExit as ended:
            code = ended.code or 0
    print(json.dumps([code, output.getvalue(), errors.getvalue()]), flush=True)
"""
)


class Machine:
    """A user's machine: a home, huggingface_hub's cache and kvant's, and the command."""

    def __init__(self, hub: Hub, home: Path) -> None:
        self.hub, self.home = hub, home
        self.shells: dict[str, Process] = {}
        self.empty()
        self.environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(kvant.__file__).parents[1])}
        self.environment |= {
            "HOME": str(home),
            "HF_HOME": str(home / "link"),
            "XDG_CACHE_HOME": str(home / "cache"),
        }
        self.environment |= {"HF_ENDPOINT": hub.endpoint, "KVANT_BLAS": "mlx"}

    def empty(self) -> None:
        """Remove everything from the home, but a new folder for huggingface_hub and a link to it."""
        for path in self.home.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        (self.home / "hf").mkdir()
        (self.home / "link").symlink_to(self.home / "hf")

    def start(self, *arguments: str, code: str = f"{LOOPBACK_ONLY}main()", **environment: str) -> Process:
        command, pipe = [sys.executable, "-W", "error", "-c", code, *arguments], subprocess.PIPE
        environ = self.environment | environment
        return subprocess.Popen(
            command, env=environ, cwd=self.home, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )

    def run(self, *arguments: str, patches: Mapping[str, str] | None = None, **environment: str) -> Done:
        """A command, in the process of its environment; ``patches``: expressions in place of names for
        this one.
        """
        key = json.dumps(environment)
        if key not in self.shells:
            self.shells[key] = self.start(code=SHELL, **environment)
        shell = self.shells[key]
        print(json.dumps([arguments, patches or {}]), file=shell.stdin, flush=True)
        return subprocess.CompletedProcess(arguments, *json.loads(shell.stdout.readline()))

    def close(self) -> None:
        for shell in self.shells.values():
            shell.communicate(timeout=60)

    def pull(self, *arguments: str, **options: Any) -> Path:
        done = self.run("pull", *arguments, **options)
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.removesuffix("\n"))

    def refuses(self, *arguments: str, code: int = 1, **environment: Any) -> str:
        """The line of a command that must fail: the last on standard error, with no traceback."""
        done = self.run(*arguments, **environment)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert "Traceback" not in done.stderr
        line = done.stderr.splitlines()[-1]
        assert line.startswith("kvant: error: ")
        return line

    def resolves(self, model: str = REPOSITORY) -> str | None:
        """Whether it can be loaded: None, or why not. Nothing is asked of the hub."""
        count = len(self.hub.requests)
        why = self.run("find", model).stdout
        assert len(self.hub.requests) == count
        return why or None

    @property
    def blobs(self) -> Path:
        return self.home / "hf" / "hub" / f"models--{REPOSITORY.replace('/', '--')}" / "blobs"

    @property
    def lock(self) -> Path:
        return self.home / "cache" / "kvant" / "weights" / f"{REPOSITORY.replace('/', '--')}.json"


@pytest.fixture(scope="module")
def files(pocket_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A repository: the embedded model in float32, 12 MB, its tokenizer, and what must never be pulled."""
    made = tmp_path_factory.mktemp("model") / WEIGHTS
    arrays = mx.load(str(pocket_folder / WEIGHTS))
    mx.save_safetensors(str(made), {name: array.astype(mx.float32) for name, array in arrays.items()})
    names = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    found = {name: (pocket_folder / name).read_bytes() for name in names} | {WEIGHTS: made.read_bytes()}
    never = (
        "pytorch_model.bin",
        "modeling.py",
        "consolidated.safetensors",
        "onnx/model.json",
        "README.md",
        "x.pkl",
    )
    return found | dict.fromkeys(never, b"not to be pulled")


@pytest.fixture(scope="module")
def pulling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A hub and a machine whose processes serve the tests of a module."""
    with serve(Hub()) as server, contextlib.closing(Machine(server, tmp_path_factory.mktemp("home"))) as made:
        yield made


@pytest.fixture
def hub(pulling: Machine, files: dict[str, bytes]) -> Hub:
    hub, new = pulling.hub, Hub(port=pulling.hub.port)
    hub.release.set()
    for each in fields(Hub):
        setattr(hub, each.name, getattr(new, each.name))
    hub.add(REPOSITORY, files)
    return hub


@pytest.fixture
def machine(pulling: Machine, hub: Hub) -> Machine:
    pulling.empty()
    return pulling

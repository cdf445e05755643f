"""The command: as its user starts it, and in the process of the test."""

import copy
import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from unittest.mock import patch

from kvant.cli import main
from kvant.engine.load import POCKET, find_model
from kvant.text.process import TextProcess
from kvant.text.tokenizer import Tokenizer, load_tokenizer
from support.tokenizers_made import loaded

COMMAND = [sys.executable, "-m", "kvant"]
QUESTION = "Tell me a story about a fox named Pip."


def run(*arguments: str, stdin: str | bytes = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command as on a machine without a network."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    environ = os.environ | {"HF_HUB_OFFLINE": "1"} | environment
    done = subprocess.run([*COMMAND, *arguments], input=data, capture_output=True, timeout=120, env=environ)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


@cache
def _pocket_tokenizer() -> Tokenizer:
    return load_tokenizer(find_model(POCKET))


def _begin_loading(folder: Path, process: TextProcess | None) -> Callable[[], Tokenizer]:
    """As kvant's, but that the embedded model's tokenizers have one process, and others none but this."""
    if folder != find_model(POCKET):
        return lambda: loaded(folder)
    tokenizer = copy.copy(_pocket_tokenizer())
    for name, value in vars(tokenizer).items():
        if isinstance(value, dict | list | set):
            setattr(tokenizer, name, copy.copy(value))
    return lambda: tokenizer


ONE_TEXT_PROCESS = {
    "kvant.cli.app.TALKING": (),  # no process is started before the model is known
    "kvant.engine.load.TextProcess": lambda: None,
    "kvant.engine.load.begin_loading": _begin_loading,
}


def call(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The command in this process: for a test of the answer, not of the process.

    It spares a process's start, and that of the embedded model's tokenizer.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    given = io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
    code: object = 0
    with ExitStack() as stack:
        for name, value in ONE_TEXT_PROCESS.items():
            stack.enter_context(patch(name, value))
        stack.enter_context(patch.multiple(sys, argv=["kvant", *arguments], stdin=given))
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return subprocess.CompletedProcess(["kvant", *arguments], code, *texts)


def sampling_of(*arguments: str) -> str:
    """What ``generate`` says that it samples with."""
    done = call("generate", "Hi", "-m", "1", *arguments)
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stderr.splitlines() if line.startswith("sampling: ")).removeprefix(
        "sampling: "
    )


# how lines begin that say what a command works with
CHOSEN = ("cache: ", "memory: ", "sampling: ", "pocket · ")


def refusal(code: int, *arguments: str) -> str:
    """The line of error of a command that ends with this exit code, and prints nothing else but what it
    chose.
    """
    done = call(*arguments)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    *before, error = done.stderr.splitlines()
    assert all(line.startswith(CHOSEN) for line in before), done.stderr
    assert error.startswith("kvant: error: ")
    return error


def children(process: int) -> list[int]:
    listed = subprocess.run(["ps", "-Ao", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in listed.splitlines() if int(line.split()[1]) == process]


def are_gone(processes: Iterable[int]) -> bool:
    """Whether all end within a minute. One that only waits for its exit code to be read has ended."""
    command = ["ps", "-o", "state=", "-p", ",".join(map(str, processes))]
    until = time.monotonic() + 60
    while time.monotonic() < until:
        states = subprocess.run(command, capture_output=True, text=True).stdout.split()
        if all(state.startswith("Z") for state in states):
            return True
        time.sleep(0.1)
    return False

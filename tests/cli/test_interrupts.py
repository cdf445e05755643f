"""Ctrl-C from the command's first line on: exit code 130, no traceback, at once."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.command import QUESTION, are_gone, children

START = "import os, sys; sys.argv[0] = 'kvant'; import kvant_command; os.write(1, b'started'); kvant_command.main()"
LIMIT_S = 30.0  # the aim is 0.3; what is interrupted takes minutes, and a busy machine is slow


@contextmanager
def _started(code: str, *arguments: str, **streams: Any) -> Iterator[subprocess.Popen[bytes]]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    with subprocess.Popen([sys.executable, "-c", code, *arguments], **pipes) as process:
        assert os.read(process.stdout.fileno(), 7) == b"started"
        yield process


def _interrupt(process: subprocess.Popen[bytes], after_s: float) -> tuple[int, bytes, bytes]:
    """Exit code and what is written after a signal; it ends within the limit."""
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    written = process.communicate(timeout=LIMIT_S)
    return process.returncode, *written


@pytest.mark.parametrize("after_s", [0.01, 0.05, 0.1, 0.2, 0.3, 0.6, None])
def test_while_it_starts_loads_and_answers(after_s: float | None) -> None:
    """None: it has begun to answer."""
    arguments = ["generate", QUESTION, "-m", "1900", "--temp", "2", "--ignore-eos"]
    with _started(START, *arguments, stdin=subprocess.DEVNULL) as process:
        assert after_s is not None or process.stdout.read(1)
        code, _, stderr = _interrupt(process, after_s or 0.0)
    assert code == 130
    assert not any(text in stderr for text in (b"Traceback", b"Exception"))
    assert after_s is not None or b"ended by interruption" in stderr


@pytest.mark.parametrize(
    "arguments", [["chat"], ["plan", "pocket"], ["models"], ["report", "--tokens", "16384"]]
)
def test_other_commands(arguments: list[str]) -> None:
    with _started(START, *arguments, stdin=subprocess.PIPE) as process:
        code, _, stderr = _interrupt(process, 0.1)
    assert (code, stderr) == (130, b"")


def test_an_operation_that_does_not_return() -> None:
    """Python's own handler waits for it; the deadline does not."""
    code = """
import os, time, signal, kvant_command
signal.signal(signal.SIGINT, kvant_command.end_now)
from kvant.cli import interrupts
import mlx.core as mx
interrupts.begin(kvant_command.end_now)
kept = interrupts.restoring(lambda: os.write(1, b"restored"))
kept.__enter__()
a = mx.random.normal((2000, 2000))
for _ in range(3000):
    a = a @ a
os.write(1, b"started")
mx.eval(a)
"""
    with _started(code) as process:
        assert _interrupt(process, 0.3) == (130, b"restored", b"")


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_conversion_undoes_what_it_writes_first(
    number: signal.Signals, exit_code: int, tmp_path: Path
) -> None:
    """An operation that outlasts the deadline, while a folder is half-written."""
    code = """
import os, sys, kvant_command
import kvant
import mlx.core as mx
import mlx_lm.utils
def slow(*arguments):
    a = mx.random.normal((1000, 1000))
    for _ in range(60):
        a = a @ a
    os.write(1, b"started")
    mx.eval(a)
mlx_lm.utils.save_config = slow
sys.argv = ["kvant", "convert", "pocket", sys.argv[1], "-q"]
kvant_command.main()
"""
    with _started(code, str(tmp_path / "dest")) as process:
        time.sleep(0.1)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, stderr) == (exit_code, b"")
    assert list(tmp_path.iterdir()) == []


def test_no_process_is_left() -> None:
    with _started(START, "chat", stdin=subprocess.PIPE) as process:
        assert process.stderr.readline().startswith(b"pocket ")  # everything is loaded
        workers = children(process.pid)
        assert len(workers) == 1
        process.kill()
    assert are_gone(workers)

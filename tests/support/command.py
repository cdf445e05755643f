"""The command: as its user starts it, and in the process of the test."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch

from kvant.cli import main

COMMAND = [sys.executable, "-m", "kvant"]
QUESTION = "Tell me a story about a fox named Pip."


def run(*arguments: str, stdin: str | bytes = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command as on a machine without a network."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(
        [*COMMAND, *arguments],
        input=data,
        capture_output=True,
        timeout=120,
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def call(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The command in this process, which spares a process's start: for a test of the answer, not of the process."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    given = io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
    code: object = 0
    with patch.multiple(sys, argv=["kvant", *arguments], stdin=given), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    assert isinstance(code, int)
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(["kvant", *arguments], code, *texts)

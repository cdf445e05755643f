"""Scripts that run as ranks of one group: processes on this machine, joined by MLX's ring on the loopback."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvant.ranks.launcher import free_ports

SRC = Path(__file__).parents[2] / "src"


def rank_environments(count: int, folder: Path) -> list[dict[str, str]]:
    """The environment that MLX's launcher gives each rank of a ring. Rank 0's guard listens one port
    below.
    """
    guard = free_ports(count + 1)
    hosts = folder / f"hosts-{guard}.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{guard + 1 + rank}"] for rank in range(count)]))
    return [{"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)} for rank in range(count)]


def start_ranks(commands: Sequence[Sequence[str]], folder: Path) -> list[subprocess.Popen[str]]:
    """Start ranks that have a command each; standard input is empty, output is read through pipes."""
    pipes: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    environments = [
        os.environ | {"PYTHONPATH": str(SRC)} | own for own in rank_environments(len(commands), folder)
    ]
    both = zip(commands, environments, strict=True)
    return [subprocess.Popen(list(command), env=environ, text=True, **pipes) for command, environ in both]


def run_ranks(
    commands: Sequence[Sequence[str]], *, timeout: float = 120
) -> list[subprocess.CompletedProcess[str]]:
    """Run ranks that have a command each, to their end: what each returned and wrote."""
    with tempfile.TemporaryDirectory() as folder:
        started = start_ranks(commands, Path(folder))
        try:
            said = [process.communicate(timeout=timeout) for process in started]
        finally:
            for process in started:
                process.kill()
    both = zip(started, said, strict=True)
    return [subprocess.CompletedProcess(process.args, process.returncode, *texts) for process, texts in both]


def run_script(count: int, script: str, *arguments: str, timeout: float = 120) -> list[str]:
    """Run Python source as every rank; standard output of each. A rank that fails is an AssertionError."""
    done = run_ranks([[sys.executable, "-W", "error", "-c", script, *arguments]] * count, timeout=timeout)
    failed = [f"rank {rank}: {each.stderr[-1000:]}" for rank, each in enumerate(done) if each.returncode]
    assert not failed, failed
    return [each.stdout for each in done]

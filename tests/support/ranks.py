"""Scripts that run as ranks of one group: processes on this machine, joined by MLX's ring on the loopback."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvant.cli.launch import free_ports

SRC = Path(__file__).parents[2] / "src"


def rank_environments(count: int, folder: Path) -> list[dict[str, str]]:
    """The environment that MLX's launcher gives each rank of a ring. Rank 0's guard listens one port below."""
    guard = free_ports(count + 1)
    hosts = folder / f"hosts-{guard}.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{guard + 1 + rank}"] for rank in range(count)]))
    return [{"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)} for rank in range(count)]


def start_ranks(
    count: int, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    """Start a command as every rank of a group; standard input is empty, output is read through pipes."""
    return start_each([command] * count, folder, environment)


def start_each(
    commands: Sequence[Sequence[str]], folder: Path, environment: Mapping[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    """Start ranks that have a command each, as :func:`start_ranks`."""
    return [
        subprocess.Popen(
            list(command),
            env={**os.environ, "PYTHONPATH": str(SRC), **(environment or {}), **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command, own in zip(commands, rank_environments(len(commands), folder), strict=True)
    ]


def run_ranks(count: int, command: Sequence[str], *, timeout: float = 120) -> list[subprocess.CompletedProcess[str]]:
    """Run a command as every rank of a group, to its end: in the order of ranks what each returned and wrote."""
    return run_each([command] * count, timeout=timeout)


def run_each(commands: Sequence[Sequence[str]], *, timeout: float = 120) -> list[subprocess.CompletedProcess[str]]:
    """Run ranks that have a command each, as :func:`run_ranks`."""
    with tempfile.TemporaryDirectory() as folder:
        started = start_each(commands, Path(folder))
        done = []
        try:
            for process in started:
                out, err = process.communicate(timeout=timeout)
                done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
        finally:
            for process in started:
                process.kill()
        return done


def run_script(count: int, script: str, *arguments: str, timeout: float = 120) -> list[str]:
    """Run Python source as every rank; standard output of each. A rank that fails is an AssertionError."""
    done = run_ranks(count, [sys.executable, "-W", "error", "-c", script, *arguments], timeout=timeout)
    for rank, each in enumerate(done):
        assert each.returncode == 0, f"rank {rank}: {each.returncode}\n{each.stderr[-2000:]}"
    return [each.stdout for each in done]

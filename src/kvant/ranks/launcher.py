"""MLX's own launcher, mlx.launch, run in this process; it starts remote ranks by ssh."""

import json
import os
import random
import select
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from subprocess import CalledProcessError, Popen, TimeoutExpired
from types import FrameType
from typing import Any

from kvant.errors import EXIT_INTERRUPTED, ArgumentError, KvantError, one_line
from kvant.files import read_user_file

MAX_HOSTS_BYTES = 2**20
# Below ephemeral ports: a connection of any process could take a rank's port before it listens there, and a
# rank that connects to a missing neighbour could connect to itself.
PORTS = range(10_000, 32_000)
STOPPED_S = 2.0  # for a rank to end by a signal, which a stopped one does not receive
LOOK_S = 0.1


def read_hosts(path: Path) -> list[str]:
    """Return the names of the hosts in MLX's host file, rank 0's first."""
    try:
        raw = json.loads(read_user_file(path, MAX_HOSTS_BYTES))
        names = [host["ssh"] for host in (raw["hosts"] if isinstance(raw, dict) else raw)]
    except (KvantError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ArgumentError("hostfile", f"is {path}, which is not a host file: {one_line(error)}") from error
    for rank, name in enumerate(names):
        if not isinstance(name, str) or not name or name[0] == "-" or not name.isprintable():
            problem = f"is {path}, where rank {rank}: ssh is {name!r:.80}; expected a host's name"
            raise ArgumentError("hostfile", problem)
    return names


def free_ports(count: int) -> int:
    """Return the first of ``count`` consecutive free ports, drawn at random so that runs do not collide."""
    while True:
        first = random.SystemRandom().choice(PORTS)
        with ExitStack() as sockets, suppress(OSError):
            for port in range(first, first + count):
                sockets.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def run_launcher(arguments: Sequence[str], *, talks: bool) -> Mapping[int, int]:
    """Run mlx.launch here, and return the ranks' exit codes; ``talks``: pass standard input to rank 0.

    Raises:
        ValueError: mlx.launch refuses a flag.
    """
    from mlx._distributed_utils import launch as module

    mlx_launch: Any = module
    started: dict[int, Popen[bytes]] = {}

    class Rank(mlx_launch.RemoteProcess):  # type: ignore[misc]
        def __init__(self, rank: int, *how: Any) -> None:
            super().__init__(rank, *how)
            started[rank] = self.process

        def terminate(self) -> None:  # MLX would wait for a stopped rank
            self.process.terminate()
            with suppress(TimeoutExpired):
                self.process.wait(STOPPED_S)
            self.process.kill()
            with suppress(CalledProcessError):  # it had not started
                super().terminate()

    def wait(reading: list[int], writing: list[int], _: list[int], seconds: float) -> tuple[list[int], ...]:
        # A rank's standard input is always writable, so MLX never waits and uses a whole core (measured).
        ready = select.select(reading, [], [], min(seconds, LOOK_S))[0]
        return ready, select.select([], writing, [], 0)[1], []

    def refuse(parser: object, message: str) -> None:
        raise ValueError(message)

    def forward(number: int, frame: FrameType | None) -> None:
        has_terminal = any(os.isatty(stream) for stream in range(3))  # its Ctrl-C already reaches the ranks
        if 0 in started and not (number == signal.SIGINT and has_terminal):
            started[0].send_signal(number)

    def warn(text: str) -> None:  # about a rank that failed
        if not text.endswith(f"code {EXIT_INTERRUPTED}"):
            print(f"kvant: {text}", file=sys.stderr)

    mlx_launch.RemoteProcess = Rank
    mlx_launch.select = wait
    mlx_launch.log_warning = warn
    mlx_launch.argparse.ArgumentParser.error = refuse
    sys.argv = ["kvant launch", *arguments]
    reading, writing = os.pipe()  # MLX never closes its standard input, and changes its mode
    sys.stdin = os.fdopen(reading)
    if talks:
        threading.Thread(target=_hand_on, args=(writing,), daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)
    mlx_launch.main()
    return {rank: process.returncode for rank, process in started.items()}


def _hand_on(writing: int) -> None:
    """Copy standard input; its end ends the conversation."""
    with suppress(OSError):
        while data := os.read(0, 8192):
            os.write(writing, data)
        os.write(writing, b"\n/exit\n")

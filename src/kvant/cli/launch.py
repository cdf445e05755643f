"""``kvant launch``: MLX's own launcher, mlx.launch, for a command of kvant's."""

import array
import fcntl
import json
import os
import random
import select
import signal
import socket
import sys
import termios
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from subprocess import CalledProcessError, Popen, TimeoutExpired
from types import FrameType
from typing import Annotated, Any

import typer

from kvant.cli import interrupts
from kvant.cli.defaults import BadValueError
from kvant.cli.ranks import COMMANDS, LAUNCHER
from kvant.errors import EXIT_INTERRUPTED, KvantError, did_you_mean, one_line
from kvant.files import read_user_file

MAX_RANKS, MAX_HOSTS_BYTES = 64, 2**20
# Below those that a system gives to connections: one of any process could take a rank's port before it
# listens there, and a rank's own, to a neighbour that is not there yet, could meet itself.
PORTS = range(10_000, 32_000)
STOPPED_S = 2.0  # for a rank to end by a signal that a stopped one does not get
LOOK_S = 0.1
# As the console script starts: before the package loads libraries Ctrl-C is taken over, and the folder that
# the command runs in is not searched for modules.
START = ("-P", "-c", "from kvant_command import main; main()")


def launch(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- COMMAND",
            help=f"One of {', '.join(COMMANDS)}, and its own flags.",
            autocompletion=lambda incomplete: [name for name in COMMANDS if name.startswith(incomplete)],
        ),
    ] = None,
    *,
    ranks: Annotated[
        int | None, typer.Option("--ranks", "-n", help="Run so many ranks, all on this machine.")
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Run a rank on each of MLX's hosts.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(metavar="ring|jaccl|jaccl-ring|nccl", help="As mlx.launch.")
    ] = None,
    starting_port: Annotated[
        int | None, typer.Option("--starting-port", "-p", help="Default: free ones with -n, else 32323.")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Of every rank; repeatable.")
    ] = None,
    cwd: Annotated[str | None, typer.Option(metavar="FOLDER", help="Where every rank runs.")] = None,
    python: Annotated[
        str | None, typer.Option(metavar="PATH", help="Every rank's Python, which has kvant.")
    ] = None,
) -> None:
    """Run a command as ranks: `kvant launch -n 2 -- generate "Hello"`, or `--hostfile hosts.json`.

    Rank 0 is the command that you see. mlx.launch starts it and the others, by ssh on other machines. The
    exit code is rank 0's, and never 0 if another rank failed.
    """
    words = command[1:] if command and os.path.basename(command[0]) == "kvant" else command
    if not words or words[0] not in COMMANDS:
        found = (
            f"{words[0]!r} is no command that runs on several machines" if words else "no command after --"
        )
        near = did_you_mean(words[0], COMMANDS) if words else ""
        raise BadValueError(f"{found}; expected one of {', '.join(COMMANDS)}{near}")
    if (ranks is None) == (hostfile is None):
        raise BadValueError(f"{'both' if hostfile else 'neither'} -n and --hostfile; expected one of them")
    if ranks is not None and not 1 <= ranks <= MAX_RANKS:
        raise BadValueError(f"--ranks is {ranks}; expected 1 to {MAX_RANKS}")
    if words[0] == "generate" and _has_input():
        raise BadValueError(
            "standard input reaches no rank; expected the prompt as an argument or with --prompt"
        )
    if hostfile is not None:
        read_hosts(hostfile)
    elif ranks is not None:
        env = [f"{LAUNCHER}={os.getpid()}", *(env or [])]
        # the guard's is below
        starting_port = free_ports(1 + ranks) + 1 if starting_port is None else starting_port
    given = {"repeat-hosts": ranks, "hostfile": hostfile, "backend": backend, "starting-port": starting_port}
    flags = [f"--{name}={value}" for name, value in (given | {"cwd": cwd}).items() if value is not None]
    flags += [f"--env={text}" for text in env or []]
    codes = _run(
        [*flags, f"--python={python or sys.executable}", "--", *START, *words], talks=words[0] == "chat"
    )
    first = codes.get(0, 1)
    if code := 128 - first if first < 0 else first or int(any(codes.values())):
        raise typer.Exit(code)


def read_hosts(path: Path) -> list[str]:
    try:
        raw = json.loads(read_user_file(path, MAX_HOSTS_BYTES))
        names = [host["ssh"] for host in (raw["hosts"] if isinstance(raw, dict) else raw)]
    except (KvantError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise BadValueError(f"--hostfile: {path} is no host file: {one_line(error)}") from error
    for rank, name in enumerate(names):
        if not isinstance(name, str) or not name or name[0] == "-" or not name.isprintable():
            raise BadValueError(
                f"--hostfile: {path}: rank {rank}: ssh is {name!r:.80}; expected a host's name"
            )
    return names


def free_ports(count: int) -> int:
    """Give the first of so many ports in a row that nobody uses, drawn so that two runs at once do not
    meet.
    """
    while True:
        first = random.SystemRandom().choice(PORTS)
        with ExitStack() as held, suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def _run(arguments: Sequence[str], *, talks: bool) -> Mapping[int, int]:
    """Run mlx.launch here; if it ``talks``, standard input goes to rank 0. Returns the ranks' exit codes."""
    from mlx._distributed_utils import launch as module

    mlx_launch: Any = module
    started: dict[int, Popen[bytes]] = {}

    class Rank(mlx_launch.RemoteProcess):  # type: ignore[misc]
        def __init__(self, rank: int, *how: Any) -> None:
            super().__init__(rank, *how)
            started[rank] = self.process

        def terminate(self) -> None:  # MLX waits for a rank that is stopped
            self.process.terminate()
            with suppress(TimeoutExpired):
                self.process.wait(STOPPED_S)
            self.process.kill()
            with suppress(CalledProcessError):  # it had not begun
                super().terminate()

    def wait(reading: list[int], writing: list[int], _: list[int], seconds: float) -> tuple[list[int], ...]:
        # A rank's standard input can be written to at all times, so MLX never waits: measured, a whole core.
        ready = select.select(reading, [], [], min(seconds, LOOK_S))[0]
        return ready, select.select([], writing, [], 0)[1], []

    def refuse(parser: object, message: str) -> None:
        raise BadValueError(message)

    def forward(number: int, frame: FrameType | None) -> None:
        has_terminal = any(os.isatty(stream) for stream in range(3))  # its Ctrl-C reaches the ranks by itself
        if 0 in started and not (number == signal.SIGINT and has_terminal):
            started[0].send_signal(number)

    def warn(text: str) -> None:  # of a rank that failed
        if not text.endswith(f"code {EXIT_INTERRUPTED}"):
            print(f"kvant: {text}", file=sys.stderr)

    mlx_launch.RemoteProcess, mlx_launch.select, mlx_launch.log_warning = Rank, wait, warn
    mlx_launch.argparse.ArgumentParser.error = refuse
    sys.argv = ["kvant launch", *arguments]
    reading, writing = os.pipe()  # MLX never ends its standard input, and changes how it is read
    sys.stdin = os.fdopen(reading)
    if talks:
        threading.Thread(target=_hand_on, args=(writing,), daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)
    with interrupts.patient():
        mlx_launch.main()
    return {rank: process.returncode for rank, process in started.items()}


def _hand_on(writing: int) -> None:
    """Copy standard input, whose end is the conversation's."""
    with suppress(OSError):
        while data := os.read(0, 8192):
            os.write(writing, data)
        os.write(writing, b"\n/exit\n")


def _has_input() -> bool:
    waiting = array.array("i", [0])
    with suppress(OSError):  # no pipe and no file
        fcntl.ioctl(0, termios.FIONREAD, waiting)
    return waiting[0] > 0 and not os.isatty(0)

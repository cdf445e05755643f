"""``kvant launch``: run a command of kvant with MLX's launcher, mlx.launch."""

import array
import fcntl
import os
import sys
import termios
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from kvant.cli import interrupts
from kvant.cli.defaults import BadValueError
from kvant.cli.ranks import COMMANDS
from kvant.errors import did_you_mean
from kvant.ranks.environment import LAUNCHER
from kvant.ranks.launcher import free_ports, read_hosts, run_launcher

MAX_RANKS = 64
# Like the console script, this handles Ctrl-C before the package loads libraries, and does not import modules
# from the current folder.
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
        int | None, typer.Option("--ranks", "-n", help="Run this many ranks, all on this machine.")
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Run a rank on each of MLX's hosts.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(metavar="ring|jaccl|jaccl-ring|nccl", help="The backend of mlx.launch.")
    ] = None,
    starting_port: Annotated[
        int | None,
        typer.Option(
            "--starting-port",
            "-p",
            help="The first port that the ranks use; default: free ones with -n, else 32323.",
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="Set a variable of the environment for every rank; repeatable."
        ),
    ] = None,
    cwd: Annotated[str | None, typer.Option(metavar="FOLDER", help="Run every rank in this folder.")] = None,
    python: Annotated[
        str | None, typer.Option(metavar="PATH", help="Run every rank with this Python, which has kvant.")
    ] = None,
) -> None:
    """Run a command on several machines at once.

    `kvant launch -n 2 -- generate "Hello"` runs two ranks on this machine, `--hostfile hosts.json` runs
    them on the machines of a file. Rank 0 is the command that you see. mlx.launch starts it and the others,
    with ssh on other machines. The exit code is rank 0's, but never 0 if another rank failed.
    """
    words = command[1:] if command and os.path.basename(command[0]) == "kvant" else command
    if not words or words[0] not in COMMANDS:
        problem = f"{words[0]!r} cannot run on several machines" if words else "no command after --"
        near = did_you_mean(words[0], COMMANDS) if words else ""
        raise BadValueError(f"{problem}; expected one of {', '.join(COMMANDS)}{near}")
    if (ranks is None) == (hostfile is None):
        raise BadValueError(f"{'both' if hostfile else 'neither'} -n and --hostfile; expected one of them")
    if ranks is not None and not 1 <= ranks <= MAX_RANKS:
        raise BadValueError(f"--ranks is {ranks}; expected 1 to {MAX_RANKS}")
    if words[0] == "generate" and _has_input():
        raise BadValueError(
            "the ranks cannot read standard input; expected the prompt as an argument or with --prompt"
        )
    if hostfile is not None:
        read_hosts(hostfile)
    elif ranks is not None:
        env = [f"{LAUNCHER}={os.getpid()}", *(env or [])]
        # the guard uses the port below
        starting_port = free_ports(1 + ranks) + 1 if starting_port is None else starting_port
    values = {"repeat-hosts": ranks, "hostfile": hostfile, "backend": backend, "starting-port": starting_port}
    flags = [f"--{name}={value}" for name, value in (values | {"cwd": cwd}).items() if value is not None]
    flags += [f"--env={text}" for text in env or []]
    arguments = [*flags, f"--python={python or sys.executable}", "--", *START, *words]
    try:
        with interrupts.patient():
            codes = run_launcher(arguments, talks=words[0] == "chat")
    except ValueError as error:  # from MLX, about a flag
        raise BadValueError(str(error)) from error
    first = codes.get(0, 1)
    if code := 128 - first if first < 0 else first or int(any(codes.values())):
        raise typer.Exit(code)


def _has_input() -> bool:
    waiting = array.array("i", [0])
    with suppress(OSError):  # neither a pipe nor a file
        fcntl.ioctl(0, termios.FIONREAD, waiting)
    return waiting[0] > 0 and not os.isatty(0)

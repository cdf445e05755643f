"""``kvant launch``: a command on several machines at once, or as several processes of this one."""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvant.cli.bad_value import BadValueError
from kvant.cli.ranks import COMMANDS
from kvant.errors import did_you_mean

MAX_PORT = 65535
# As the console script starts: before the package loads libraries Ctrl-C is taken over, and the folder that the
# command runs in is not searched for modules.
START = ("-P", "-c", "from kvant_command import main; main()")


def complete_commands(incomplete: str) -> list[str]:
    """Commands that a shell completes."""
    return [name for name in COMMANDS if name.startswith(incomplete)]


def launch(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- COMMAND",
            help=f"One of {', '.join(COMMANDS)}, and its own flags.",
            autocompletion=complete_commands,
        ),
    ] = None,
    *,
    ranks: Annotated[int | None, typer.Option("--ranks", "-n", help="Run so many ranks, all on this machine.")] = None,
    hostfile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Run a rank on each host of MLX's host file (`mlx.distributed_config`)."),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="ring|jaccl|jaccl-ring|nccl",
            help="MLX's way between ranks; default: the host file's, else nccl on CUDA, else ring.",
        ),
    ] = None,
    starting_port: Annotated[
        int | None,
        typer.Option(
            "--starting-port",
            "-p",
            help="The first of the back end's ports; the guard's is one below. Default: free ones with -n, else 32323.",
        ),
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="An environment variable of every rank; repeatable.")
    ] = None,
    cwd: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Where every rank runs; default: this folder, where it exists.")
    ] = None,
    python: Annotated[
        str | None, typer.Option(metavar="PATH", help="Every rank's Python, which has kvant; default: this one's path.")
    ] = None,
) -> None:
    """Run a command as ranks: `kvant launch -n 2 -- generate "Hello"`, or `--hostfile hosts.json`.

    Rank 0 is the command that you see and type to. The first host is reached without ssh if it is this machine. The
    exit code is rank 0's, and never 0 if another rank failed. Ctrl-C goes to rank 0; Ctrl-Z does nothing.
    """
    words = distributed(command or [])
    if (ranks is None) == (hostfile is None):
        given = "both -n and --hostfile; expected one of them" if hostfile else "no -n and no --hostfile; expected one"
        raise BadValueError(given)
    if ranks is not None and not 1 <= ranks <= 64:
        raise BadValueError(f"--ranks is {ranks}; expected 1 to 64")
    if cwd is not None and hostfile is None and not os.path.isdir(cwd):
        raise BadValueError(f"--cwd is {cwd!r}, which is not a folder")
    from kvant.ranks import hosts as machines
    from kvant.ranks.launcher import run_ranks

    found = machines.local_hosts(ranks) if ranks is not None else machines.read_hosts(Path(hostfile or ""))
    chosen = checked_backend(backend or found.backend, local=hostfile is None)
    variables = checked_variables([*found.envs, *(env or [])])
    needed = machines.count_ports(found.hosts)
    if starting_port is None and hostfile is None:
        ports: Sequence[int] = machines.free_ports(needed)
    else:
        first = machines.STARTING_PORT if starting_port is None else starting_port
        if not 1 < first <= MAX_PORT + 2 - needed:
            raise BadValueError(f"--starting-port is {first}; expected 2 to {MAX_PORT + 2 - needed}")
        ports = range(first - 1, first - 1 + needed)
    group = machines.make_group(found.hosts, chosen, ports)
    terminal = all(os.isatty(stream) for stream in range(3))
    with tempfile.TemporaryDirectory(prefix="kvant-launch-") as folder:
        outcome = run_ranks(
            machines.rank_commands(
                found.hosts,
                group,
                [python or sys.executable, *START, *words],
                variables,
                cwd=cwd,
                folder=Path(folder),
                terminal=terminal,
            )
        )
    if outcome.problem:
        print(f"kvant: error: {outcome.problem}", file=sys.stderr)
    if outcome.code:
        raise typer.Exit(outcome.code)


def distributed(words: list[str]) -> list[str]:
    """The command and its flags, without the word ``kvant`` in front.

    Raises:
        BadValueError: it is none that runs as ranks.
    """
    words = words[1:] if words and os.path.basename(words[0]) == "kvant" else words
    expected = f"expected one of {', '.join(COMMANDS)}"
    if not words:
        raise BadValueError(f"no command after --; {expected}")
    if words[0] not in COMMANDS:
        near = did_you_mean(words[0], COMMANDS)
        raise BadValueError(f"{words[0]!r} is not a command that runs on several machines; {expected}{near}")
    return words


def checked_backend(name: str, *, local: bool) -> str:
    """The back end by its name, or the machine's where it is empty.

    Raises:
        BadValueError: it is none, or none that runs so.
    """
    from kvant.ranks.hosts import BACKENDS

    if not name:
        import mlx.core as mx

        return "nccl" if mx.cuda.is_available() else "ring"
    if name == "mpi":
        raise BadValueError("--backend is 'mpi', which has its own launcher: mpirun, or mlx.launch --backend mpi")
    if name not in BACKENDS:
        raise BadValueError(f"--backend is {name!r}; expected {', '.join(BACKENDS)}")
    if local and name.startswith("jaccl"):
        raise BadValueError(f"--backend is {name!r}, which is between machines; it needs --hostfile")
    return name


def checked_variables(given: Sequence[str]) -> dict[str, str]:
    """Environment variables by name.

    Raises:
        BadValueError: one is not NAME=VALUE, or would make another group of the ranks.
    """
    from kvant.ranks.hosts import VARIABLES

    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier() or not name.isascii():
            raise BadValueError(f"environment variable {text!r}; expected NAME=VALUE")
        if name in VARIABLES:
            raise BadValueError(f"environment variable {name} is set by kvant launch itself")
        found[name] = value
    return found

"""Run a command as one of several ranks that a launcher started; only rank 0 reads and prints."""

import os
import signal
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from kvant.cli import interrupts
from kvant.cli.defaults import BadValueError
from kvant.errors import EXIT_INTERRUPTED
from kvant.ranks.environment import LAUNCHER, RANK, find_place

if TYPE_CHECKING:
    from kvant.ranks.guard import Guard

COMMANDS = ("generate", "chat", "serve", "plan", "doctor")
PACKAGES = ("kvant", "mlx", "mlx-lm")
SAME_ERROR_S = 1.0

_guard: "Guard | None" = None


def begin(arguments: Sequence[str]) -> None:
    """Join the other ranks, if a launcher started this process as one of several."""
    global _guard
    place = find_place(os.environ)
    if place is None:
        return
    if place.rank:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115, stays open until the end
        # a terminal's Ctrl-C reaches all ranks; rank 0 decides what it means
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    command = arguments[0] if arguments else ""
    if not command or any(text in ("--help", "-h", "--version") for text in arguments):
        return
    if command not in COMMANDS:
        raise BadValueError(
            f"{command!r} was started as {place.size} ranks, which would all do the same; "
            f"on several ranks expected one of {', '.join(COMMANDS)}"
        )
    from kvant.ranks.guard import Guard

    launcher = os.environ.get(LAUNCHER, "")
    facts = {name: version(name) for name in PACKAGES} | {"the command": command}
    _guard = Guard.join(
        place, facts, launcher=int(launcher) if launcher.isdecimal() and len(launcher) < 10 else None
    )
    interrupts.at_deadline(lambda: end(EXIT_INTERRUPTED))


def end(code: int, why: str = "") -> None:
    """Tell the other ranks that this one ends, with its exit code and the reason."""
    if _guard is not None:
        if _guard.rank and why:
            # usually rank 0 has the same error, reports it, and ends this process meanwhile
            time.sleep(SAME_ERROR_S)
        _guard.end(code, why)


def guard() -> "Guard | None":
    """Return the connection between the ranks, or None for a single process."""
    return _guard


def reads_input() -> bool:
    """Whether to read standard input: mlx.launch copies its own to all ranks and never closes it."""
    return RANK not in os.environ and _guard is None


def refuse_head(draft: str) -> None:
    """Refuse drafts of the model's head on several ranks: each has a part of the model, and none the head."""
    if _guard is not None and draft == "mtp":
        raise BadValueError(f"--draft is mtp; over {_guard.size} ranks expected --draft prompt")


def refuse(draft_model: str | None, **files: object) -> None:
    """Refuse a draft model, and ``files`` by flag that need the whole cache, if there are several ranks."""
    for name, value in files.items():
        if _guard is not None and value:
            raise BadValueError(
                f"--{name.replace('_', '-')} is not supported: the cache is divided over {_guard.size} "
                "ranks, and a file needs all of it"
            )
    if _guard is not None and draft_model is not None:
        raise BadValueError(
            f"--draft-model is {draft_model!r:.80}; over {_guard.size} ranks expected --draft prompt"
        )

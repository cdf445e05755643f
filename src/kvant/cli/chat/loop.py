"""The conversation's loop: a line is a command or a question."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from typer.exceptions import TyperException

from kvant.cli.chat import commands
from kvant.cli.chat.commands import Leave
from kvant.cli.chat.talk import Talk, notice
from kvant.errors import KvantError, one_line, printable

FAILURES = (KvantError, ValueError, TyperException, OSError, RuntimeError, MemoryError)  # MLX's are RuntimeErrors
ENDS = ("exit", "quit")  # typed alone, on a terminal


def converse(
    talk: Talk, read: Callable[[], str], silent: Callable[[], AbstractContextManager[None]] = nullcontext
) -> None:
    """Read and answer until the input ends or the user leaves. An error is one line, and the conversation goes on.

    Args:
        talk: the conversation.
        read: gives the next message or command.
        silent: what to be in while something is done, so that keys do not appear.
    """
    while True:
        try:
            line = read().strip()
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            continue  # on a terminal it clears the line
        except EOFError:
            return
        if sys.stdin.isatty() and line in ENDS:
            return
        try:
            with silent():
                _do(talk, line)
        except Leave:
            return
        except KeyboardInterrupt:
            notice("stopped")
        except FAILURES as error:
            notice(f"error: {_worded(error)}")


def _do(talk: Talk, line: str) -> None:
    command = commands.find(line)
    if isinstance(command, str):
        notice(command)
    elif command is not None:
        commands.perform(command, talk, line)
    elif line:
        talk.send(line[1:] if line.startswith("//") else line)


def _worded(error: Exception) -> str:
    if isinstance(error, TyperException):
        return printable(error.format_message())
    return str(error) if isinstance(error, KvantError) else one_line(error)

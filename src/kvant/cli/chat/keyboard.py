"""The keyboard while nobody reads it: keys do not appear in an answer. They are in the next line to be edited.

However the program ends, but for SIGKILL, the terminal is as it was found.
"""

import os
import re
import select
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

# What prompt_toolkit may have switched: the cursor is shown, pasted text is not marked.
RESET = b"\x1b[?25h\x1b[?2004l"
SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.|.)?", re.DOTALL)  # an arrow, a function key, Alt with a key
ERASED = re.compile(r"[^\x7f]\x7f|^\x7f")
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Keyboard:
    """The terminal on standard input, for the time of a ``with``."""

    def __init__(self) -> None:
        self._terminal = sys.stdin.fileno()
        self._found: list[Any] = termios.tcgetattr(self._terminal)
        self._is_silent = False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "Keyboard":
        for number in ENDING:
            if signal.getsignal(number) is signal.SIG_DFL:
                self._handlers[number] = signal.signal(number, self._end)
        self._handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._suspend)
        return self

    def __exit__(self, *error: object) -> None:
        self._set(self._found)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @contextmanager
    def silent(self, take: Callable[[str], None]) -> Iterator[None]:
        """Show no keys inside; ``take`` is given the text that was typed. Ctrl-C works as ever, and drops that text."""
        self._silence()
        try:
            yield
        finally:
            take(typed_text(self._waiting()))
            self._set(self._found)
            self._is_silent = False

    def _silence(self) -> None:
        attributes = termios.tcgetattr(self._terminal)
        attributes[3] &= ~(termios.ECHO | termios.ICANON)
        self._set(attributes)
        self._is_silent = True

    def _set(self, attributes: list[Any]) -> None:
        with suppress(termios.error):  # the terminal has gone
            termios.tcsetattr(self._terminal, termios.TCSANOW, attributes)

    def _waiting(self) -> bytes:
        found = b""
        with suppress(OSError):
            while select.select([self._terminal], [], [], 0)[0] and (more := os.read(self._terminal, 4096)):
                found += more
        return found

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._set(self._found)
        with suppress(OSError):
            os.write(2, RESET)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        was_silent = self._is_silent
        self._set(self._found)
        os.kill(os.getpid(), signal.SIGSTOP)
        if was_silent:  # and goes on here
            self._silence()


def typed_text(keys: bytes) -> str:
    """The text that keys make: without arrows and the like, with what was erased gone. Enter is a new line."""
    text = SEQUENCE.sub("", keys.decode("utf-8", "ignore")).replace("\r", "\n")
    text = "".join(c for c in text if c.isprintable() or c in "\n\t\x7f")
    while text != (shorter := ERASED.sub("", text, count=1)):
        text = shorter
    return text.strip()

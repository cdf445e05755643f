"""The keyboard while nobody reads it: keys do not appear in an answer. They are in the next line to be edited.

However the program ends, but for SIGKILL, the terminal is as it was found.
"""

import os
import re
import select
import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from kvant.cli import interrupts

# What prompt_toolkit may have switched: the cursor is shown, pasted text is not marked.
RESET = b"\x1b[?25h\x1b[?2004l"
SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.|.)?", re.DOTALL)  # an arrow, a function key, Alt with a key
ERASED = re.compile(r"[^\x7f]\x7f|^\x7f")
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Keyboard:
    """The terminal on standard input; where that is none, nothing is done.

    Attributes:
        typed: the text that was typed while nobody read it, since it was taken last.
    """

    def __init__(self) -> None:
        self.typed = ""
        self._terminal = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._found: list[Any] = [] if self._terminal is None else termios.tcgetattr(self._terminal)
        self._is_silent = False

    @contextmanager
    def kept(self) -> Iterator[None]:
        """However the block ends, or the program in it, the terminal is as it was found."""
        if self._terminal is None:
            yield
            return
        handlers = {number: self._end for number in ENDING if signal.getsignal(number) is signal.SIG_DFL}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        if signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:  # several ranks ignore it: one that stops is lost
            before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._suspend)
        try:
            with interrupts.restoring(self._restore):
                yield
        finally:
            self._restore()
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Show no keys inside, and keep their text. Ctrl-C works as ever, and drops that text."""
        if self._terminal is None:
            yield
            return
        self._silence()
        try:
            yield
        finally:
            self.typed += typed_text(self._waiting())
            self._is_silent = False
            self._restore()

    def _silence(self) -> None:
        assert self._terminal is not None
        attributes = termios.tcgetattr(self._terminal)
        attributes[3] &= ~(termios.ECHO | termios.ICANON)
        self._is_silent = True
        self._set(attributes)

    def _restore(self) -> None:
        self._set(self._found)

    def _set(self, attributes: list[Any]) -> None:
        assert self._terminal is not None
        with suppress(termios.error):  # the terminal has gone
            termios.tcsetattr(self._terminal, termios.TCSANOW, attributes)

    def _waiting(self) -> bytes:
        assert self._terminal is not None
        found = b""
        with suppress(OSError):
            while select.select([self._terminal], [], [], 0)[0] and (more := os.read(self._terminal, 4096)):
                found += more
        return found

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._restore()
        with suppress(OSError):
            os.write(2, RESET)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        was_silent = self._is_silent
        self._restore()
        signal.signal(number, signal.SIG_DFL)  # it does nothing where no shell could continue the program
        os.kill(os.getpid(), number)
        signal.signal(number, self._suspend)  # and it goes on here
        if was_silent:
            self._silence()


def typed_text(keys: bytes) -> str:
    """The text that keys make: without arrows and the like, with what was erased gone. Enter is a new line."""
    text = SEQUENCE.sub("", keys.decode("utf-8", "ignore")).replace("\r", "\n")
    text = "".join(c for c in text if c.isprintable() or c in "\n\t\x7f")
    while text != (shorter := ERASED.sub("", text, count=1)):
        text = shorter
    return text.strip()

"""A command on a terminal, driven by keys, and what its screen shows."""

import os
import re
import time
from collections.abc import Callable

import pexpect
import pyte

from support.command import COMMAND


class Terminal:
    """A command on a terminal of its own. pyte is the terminal: it keeps what scrolls off its top too."""

    def __init__(self, *arguments: str, columns: int = 80, rows: int = 24, **environment: str) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=10_000, ratio=0.001)
        self._stream = pyte.ByteStream(self.screen)
        self._shown: list[str] = []
        self.written = b""
        settings = os.environ | {"TERM": "xterm-256color", "HF_HUB_OFFLINE": "1"} | environment
        settings = {name: value for name, value in settings.items() if name not in ("COLUMNS", "LINES")}
        options = {"dimensions": (rows, columns), "env": settings, "timeout": 60}
        self.child = pexpect.spawn(COMMAND[0], [*COMMAND[1:], *arguments], **options)
        self.child.delaybeforesend = None
        # prompt_toolkit asks where the cursor is
        self.screen.write_process_input = lambda text: self.child.send(text)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *error: object) -> None:
        self.child.close(force=True)

    def press(self, keys: str) -> None:
        """Type; \\r is Enter, \\x1b Escape."""
        self.child.send(keys)

    def read(self, seconds: float = 0.05) -> bool:
        """Take in what the command writes within that time; whether it still runs."""
        piece = b""
        try:
            while len(piece) < 1 << 16:
                piece += self.child.read_nonblocking(1 << 16, 0.005 if piece else seconds)
        except pexpect.TIMEOUT:
            running = True
        except pexpect.EOF:
            running = False
        self.written += piece
        self._stream.feed(piece)
        return running

    def wait(self, holds: Callable[[], bool], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not holds():
            running = self.read()
            assert holds() or (running and time.monotonic() < end), "\n".join([*self.history, *self.lines])

    def wait_for(self, text: str, seconds: float = 60) -> None:
        """Read until the screen shows a text, whatever the line breaks in it."""
        self.wait(lambda: squeezed(text) in squeezed("\n".join(self.lines)), seconds)

    def resize(self, columns: int, rows: int) -> None:
        """Change the window's size. As xterm, this terminal does not wrap its lines anew."""
        self.screen.resize(rows, columns)
        self.child.setwinsize(rows, columns)

    @property
    def lines(self) -> list[str]:
        if self.screen.dirty:  # to draw it takes milliseconds
            self._shown = [line.rstrip() for line in self.screen.display]
            self.screen.dirty.clear()
        return self._shown

    @property
    def history(self) -> list[str]:
        columns = range(self.screen.columns)
        return ["".join(line[column].data for column in columns).rstrip() for line in self.screen.history.top]


def squeezed(text: str) -> str:
    """Text with a space for every run of white space."""
    return re.sub(r"\s+", " ", text)

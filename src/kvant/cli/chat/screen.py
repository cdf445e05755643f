"""Show an answer on a terminal: print finished blocks for good, and redraw only the unfinished block.

So an answer may be longer than the screen, and all of it is in the terminal's history afterwards.
"""

import os
import time
from typing import TextIO

from kvant.cli.chat.markdown import GrowingText

EVERY_S = 0.03
SHARE = 9  # pause between drawings, in multiples of their time, so that a fast model is not slowed down
STEADY_S = 0.2  # a window that is being resized changes its size more often
ERASE_BELOW = "\x1b[J"
ERASE_SCREEN = "\x1b[H\x1b[2J"


class Screen:
    """Draws one answer. It begins and ends with the cursor at the start of an empty line."""

    def __init__(self, stream: TextIO, *, markdown: bool) -> None:
        """``stream``: standard output, a terminal."""
        self._stream = stream
        self._markdown = markdown
        self._pieces: list[tuple[bool, str]] = []
        self._text: GrowingText | None = None
        self._is_thinking = False
        self._final: list[str] = []  # final lines that are not printed yet
        self._rows = 1  # rows of the unfinished block on the screen
        self._size = self._seen = terminal_size(stream)
        self._seen_at = 0.0
        self._next_at = 0.0

    def write(self, text: str, *, is_thinking: bool = False) -> None:
        """Show the next piece; thinking is dim and plain."""
        self._pieces.append((is_thinking, text))
        self._add(text, is_thinking)
        started = time.monotonic()
        if started < self._next_at:
            return
        self._draw()
        drawn = time.monotonic()
        self._next_at = drawn + max(EVERY_S, SHARE * (drawn - started))

    def close(self) -> None:
        self._draw(ended=True)

    @property
    def _width(self) -> int:
        return max(1, self._size[0] - 1)  # a terminal may show a character wider than expected

    def _add(self, text: str, is_thinking: bool) -> None:
        if self._text is None or is_thinking != self._is_thinking:
            text = text.lstrip("\n")
            if not text:
                return
            if self._text is not None:
                self._final += [*self._text.take(self._width, ended=True)[0], ""]
            markdown = self._markdown and not is_thinking
            self._text = GrowingText(self._stream, markdown=markdown, style="dim" if is_thinking else "")
            self._is_thinking = is_thinking
        self._text.add(text)

    def _draw(self, *, ended: bool = False) -> None:
        erase = self._erase(ended)
        if self._text is None or erase is None:
            return
        final, under_way = self._text.take(self._width, ended=ended)
        room = max(1, self._size[1] - 1)  # show only the end of a longer block while it grows
        under_way = under_way[-room:]
        drawn = erase + "".join(f"{line}\n" for line in self._final + final) + "\n".join(under_way)
        self._final = []
        self._rows = max(1, len(under_way))
        # Written at once: after Ctrl-C in between, rows above the answer would be erased.
        self._stream.write(drawn)
        self._stream.flush()

    def _erase(self, ended: bool) -> str | None:
        """Return codes that erase the unfinished block; None while the window is being resized."""
        size = terminal_size(self._stream)
        now = time.monotonic()
        if size != self._seen:
            self._seen = size
            self._seen_at = now
        if size[0] == self._size[0]:
            self._size = size
            return "\r" + f"\x1b[{self._rows - 1}A" * (self._rows > 1) + ERASE_BELOW
        if now - self._seen_at < STEADY_S and not ended:
            return None
        # Only the terminal knows where the lines are now. Move the screen's content to its history, and print
        # the answer again.
        self._size = size
        self._text = None
        self._final = []
        for is_thinking, text in self._pieces:
            self._add(text, is_thinking)
        return "\n" * size[1] + ERASE_SCREEN


def terminal_size(stream: TextIO) -> tuple[int, int]:
    """Return a terminal's columns and rows."""
    try:
        columns, rows = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        columns = 0
        rows = 0
    return columns or 80, rows or 24

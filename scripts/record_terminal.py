"""Record `kvant generate` and `kvant chat` on a terminal, and draw the recording as an animated SVG.

Usage: python scripts/record_terminal.py [file, by default docs/data/terminal.svg]. It needs the extras cpu and test,
and bash. What KEYS says is typed as a person types. All else is what the programs wrote, when they wrote it; a pause
longer than IDLE is shortened to that. The picture has no scripts and asks no other machine. It stands still if the
reader prefers that.
"""

import os
import random
import re
import sys
import tempfile
import time
from collections import defaultdict
from html import escape
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

import pexpect
import pyte

COLUMNS, ROWS = 100, 19
PER_SECOND = 30  # moments
IDLE, HOLD = 2.5, 5.0  # seconds
WIDTH, HEIGHT, EDGE = 8.4, 19, 14  # of a cell, and around all of them, in pixels
PROMPT = re.compile(r"[$>] ")
KEYS = [  # seconds to read what is there, and the line that is then typed
    (0.6, 'kvant generate "Tell me a story about a fox named Pip." --seed 3'),
    (2.4, "clear"),
    (0.2, "kvant chat --seed 1"),
    (0.8, "Tell me a story about a hare named Tara who could not sleep."),
    (2.4, "Who helped Tara?"),
]
COLOURS = {"default": "#e6edf3", "brightblack": "#8b949e", "cursor": "#e6edf3"}
STYLE = """\
rect{fill:#0d1117}text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre}
g{visibility:hidden;animation:%.2fs step-end infinite}
@media(prefers-reduced-motion:reduce){g{animation:none}.end{visibility:visible}}
"""


class Piece(NamedTuple):
    """Characters of one row in one colour."""

    row: int
    column: int
    text: str
    colour: str


Cell = tuple[str, str]  # a character and its colour
Frame = tuple[list[list[Cell]], Piece | None]  # the rows of a screen, and its cursor


def record() -> dict[int, Frame]:
    """What the screen showed at each moment it changed, PER_SECOND of them a second."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    frames: dict[int, Frame] = {}
    hand = random.Random(0)

    def read(seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                stream.feed(shell.read_nonblocking(1 << 16, left))
            except pexpect.TIMEOUT:
                return
            rows = [[screen.buffer[y][x] for x in range(COLUMNS)] for y in range(ROWS)]
            cells = [[(char.data, char.fg) for char in row] for row in rows]
            cursor = None if screen.cursor.hidden else Piece(screen.cursor.y, screen.cursor.x, "█", "cursor")
            frames[int((time.monotonic() - start) * PER_SECOND)] = cells, cursor

    with tempfile.TemporaryDirectory() as home:  # the chat keeps a history there
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        settings = os.environ | {"HOME": home, "PATH": path, "PS1": "$ ", "TERM": "xterm-256color"}
        shell = pexpect.spawn("bash", ["--norc", "--noprofile"], env=settings, dimensions=(ROWS, COLUMNS))
        shell.delaybeforesend = None
        screen.write_process_input = shell.send  # prompt_toolkit asks where the cursor is
        start = time.monotonic()
        for pause, line in [*KEYS, (0.5, "")]:
            while not PROMPT.fullmatch(screen.display[screen.cursor.y][: screen.cursor.x]):
                read(0.1)
            read(pause)
            for key in line and f"{line}\r":
                shell.send(key)
                read(hand.uniform(0.03, 0.09))
            read(0.2)
        shell.close(force=True)
    return frames


def spans(frames: dict[int, Frame]) -> tuple[dict[tuple[float, float], list[Piece]], float]:
    """What is seen from one second to another, and the end. What a row gains is a piece of its own."""
    shown: dict[Piece, float] = {}
    seen: dict[tuple[float, float], list[Piece]] = defaultdict(list)
    now = 0.0
    for before, moment in pairwise([min(frames), *sorted(frames)]):
        now += min((moment - before) / PER_SECOND, IDLE)
        rows, cursor = frames[moment]
        wanted = {piece for row, cells in enumerate(rows) for piece in row_pieces(row, cells, shown)} | (
            {cursor} - {None}
        )
        for piece in shown.keys() - wanted:
            seen[shown.pop(piece), now].append(piece)
        shown |= dict.fromkeys(wanted - shown.keys(), now)
    end = now + HOLD
    for piece, since in shown.items():
        seen[since, end].append(piece)
    return seen, end


def row_pieces(row: int, cells: list[Cell], shown: dict[Piece, float]) -> list[Piece]:
    """The pieces that are shown and stay, and new ones for the rest."""
    stay = []
    cells = list(cells)
    for piece in shown:
        place = slice(piece.column, piece.column + len(piece.text))
        if piece.row == row and cells[place] == [(char, piece.colour) for char in piece.text]:
            stay.append(piece)
            cells[place] = [(" ", "default")] * len(piece.text)
    column = 0
    for colour, run in groupby(cells, lambda cell: cell[1]):
        text = "".join(char for char, _ in run)
        stay += [Piece(row, column + m.start(), m[0], colour) for m in re.finditer(r"\S+( \S+)*", text)]
        column += len(text)
    return stay


def drawn(piece: Piece) -> str:
    x, y = EDGE + piece.column * WIDTH, EDGE + piece.row * HEIGHT + 14
    length = f' textLength="{len(piece.text) * WIDTH:.1f}"' if len(piece.text) > 1 else ""
    fill = COLOURS.get(piece.colour, COLOURS["default"])
    return f'<text x="{x:.1f}" y="{y}" fill="{fill}"{length}>{escape(piece.text, quote=False)}</text>'


def svg(seen: dict[tuple[float, float], list[Piece]], end: float) -> str:
    """The picture. Each span is a group with an animation of its own."""
    width, height = round(COLUMNS * WIDTH + 2 * EDGE), ROWS * HEIGHT + 2 * EDGE
    style, groups = STYLE % end, []
    for number, ((since, until), pieces) in enumerate(sorted(seen.items())):
        hide = f"{100 * until / end:.2f}%{{visibility:hidden}}" if until < end else ""
        style += f"@keyframes k{number}{{{100 * since / end:.2f}%{{visibility:visible}}{hide}}}\n"
        last = "" if hide else ' class="end"'
        groups.append(f'<g style="animation-name:k{number}"{last}>{"".join(map(drawn, sorted(pieces)))}</g>\n')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
        f"<title>kvant generate and kvant chat on a terminal</title>\n<style>\n{style}</style>\n"
        f'<rect width="100%" height="100%" rx="8"/>\n{"".join(groups)}</svg>\n'
    )


if __name__ == "__main__":
    default = Path(__file__).parents[1] / "docs" / "data" / "terminal.svg"
    (Path(sys.argv[1]) if len(sys.argv) > 1 else default).write_text(svg(*spans(record())), encoding="utf-8")

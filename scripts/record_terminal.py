"""Record `kvant generate` and `kvant chat` on a terminal, and draw the recording as an animated SVG.

Usage: python scripts/record_terminal.py. It writes docs/data/terminal.svg, and needs the extras cpu and test,
bash, and `kvant pull smollm2-135m-q4`.
The lines of KEYS are typed as a person types. All else is what the programs wrote, when they wrote it; a
pause longer than IDLE is shortened to that. The picture stands still if the reader prefers that.
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

import pexpect
import pyte

COLUMNS, ROWS = 100, 19
PER_SECOND = 30  # moments at which the screen is looked at
IDLE, HOLD = 2.5, 5.0  # seconds
WIDTH, HEIGHT, EDGE = 8.4, 19, 14  # of a cell, and around all of them, in pixels
PROMPT = re.compile(r"[$>] ")
KEYS = [  # seconds to read what is there, and the line that is typed then
    (0.6, 'kvant generate --model smollm2-135m-q4 --temp 0 "Write a haiku about the sea."\r'),
    (3.0, "clear\r"),
    (0.2, "kvant chat --model smollm2-135m-q4 --temp 0\r"),
    (0.8, "What is the capital of France?\r"),
    (1.6, "And of Italy?\r"),
    (0.5, ""),
]
STYLE = """\
rect{fill:#0d1117}.default{fill:#e6edf3}.brightblack{fill:#8b949e}
text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre}
g{visibility:hidden;animation:%.2fs step-end infinite}
@media(prefers-reduced-motion:reduce){g{animation:none}.end{visibility:visible}}
"""

Cell = tuple[str, str]  # a character and its colour
Piece = tuple[int, int, str, str]  # row, column, characters side by side, and their colour
Frame = tuple[float, list[list[Cell]], set[Piece]]  # when the screen was looked at, its rows and its cursor


def record() -> list[Frame]:
    """The screen, each time that it had changed."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    frames: list[Frame] = []
    hand = random.Random(0)

    def read(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(1 / PER_SECOND)
            try:
                stream.feed(shell.read_nonblocking(1 << 16, 0))
            except pexpect.TIMEOUT:
                continue
            lines = (map(screen.buffer[y].__getitem__, range(COLUMNS)) for y in range(ROWS))
            cells = [[(char.data, char.fg) for char in line] for line in lines]
            cursor = set() if screen.cursor.hidden else {(screen.cursor.y, screen.cursor.x, "█", "default")}
            frames.append((time.monotonic(), cells, cursor))

    with tempfile.TemporaryDirectory() as home:  # the chat keeps a history there
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        settings = os.environ | {"HOME": home, "PATH": path, "PS1": "$ ", "TERM": "xterm-256color"}
        shell = pexpect.spawn("bash", ["--norc", "--noprofile"], env=settings, dimensions=(ROWS, COLUMNS))
        shell.delaybeforesend = None
        screen.write_process_input = shell.send  # prompt_toolkit asks where the cursor is
        for pause, line in KEYS:
            while not PROMPT.fullmatch(screen.display[screen.cursor.y][: screen.cursor.x]):
                read(0.1)
            read(pause)
            for key in line:
                shell.send(key)
                read(hand.uniform(0.01, 0.09))
            read(0.2)
        shell.close(force=True)
    return frames


def spans(frames: list[Frame]) -> dict[tuple[float, float], list[Piece]]:
    """What is seen from one second to another. A piece stays as long as its characters do."""
    shown: dict[Piece, float] = {}
    seen: dict[tuple[float, float], list[Piece]] = defaultdict(list)
    now = 0.0
    for (before, _, _), (moment, rows, cursor) in pairwise([frames[0], *frames]):
        now += min(moment - before, IDLE)
        wanted = cursor.union(*(pieces(row, cells, set(shown)) for row, cells in enumerate(rows)))
        for piece in shown.keys() - wanted:
            seen[shown.pop(piece), now].append(piece)
        shown |= dict.fromkeys(wanted - shown.keys(), now)
    for piece, since in shown.items():
        seen[since, now + HOLD].append(piece)
    return seen


def pieces(row: int, cells: list[Cell], shown: set[Piece]) -> set[Piece]:
    """The pieces of a row: those shown that still hold, and new ones for the rest."""
    found = set()
    for piece in shown:
        at, column, text, colour = piece
        place = slice(column, column + len(text))
        if at == row and cells[place] == [(char, colour) for char in text]:
            found.add(piece)
            cells[place] = [(" ", "default")] * len(text)
    column = 0
    for colour, run in groupby(cells, lambda cell: cell[1]):
        text = "".join(char for char, _ in run)
        found |= {(row, column + m.start(), m[0], colour) for m in re.finditer(r"\S+( \S+)*", text)}
        column += len(text)
    return found


def svg(seen: dict[tuple[float, float], list[Piece]]) -> str:
    """The picture: a group for each span, with an animation of its own."""
    end = max(until for _, until in seen)
    style, groups = STYLE % end, ""
    for number, ((since, until), shown) in enumerate(sorted(seen.items())):
        kind, hide = (
            ("", f"{100 * until / end:.2f}%{{visibility:hidden}}") if until < end else (' class="end"', "")
        )
        style += f"@keyframes k{number}{{{100 * since / end:.2f}%{{visibility:visible}}{hide}}}\n"
        groups += f'<g{kind} style="animation-name:k{number}">'
        for row, column, text, colour in sorted(shown):
            place = f'x="{EDGE + column * WIDTH:.1f}" y="{EDGE + row * HEIGHT + 14}"'
            length = f"{len(text) * WIDTH:.1f}"  # whatever font the reader has
            groups += (
                f'<text class="{colour}" {place} textLength="{length}">{escape(text, quote=False)}</text>'
            )
        groups += "</g>\n"
    width, height = round(COLUMNS * WIDTH + 2 * EDGE), ROWS * HEIGHT + 2 * EDGE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}">\n'
        f"<title>kvant on a terminal</title>\n<style>\n{style}</style>\n"
        f'<rect width="100%" height="100%" rx="8"/>\n{groups}</svg>\n'
    )


if __name__ == "__main__":
    picture = Path(__file__).parents[1] / "docs" / "data" / "terminal.svg"
    picture.write_text(svg(spans(record())), encoding="utf-8")

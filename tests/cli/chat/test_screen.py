"""An answer on a terminal while it streams: what the screen and its history hold in the end, and what is
written.
"""

import io
import re
from pathlib import Path

import pyte
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.counts import count
from support.terminal import squeezed

from kvant.cli.chat import screen as module
from kvant.cli.chat.markdown import PARSER
from kvant.cli.chat.screen import Screen

DATA = Path(__file__).parents[2] / "data/screen"
ANSWER, SHOWN_AT_60 = ((DATA / name).read_text("utf-8") for name in ("answer.md", "shown_at_60.txt"))
# What may be written beside text: styles, the cursor up, erase below, home and erase all.
ALLOWED = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\d+A|\x1b\[J|\x1b\[H\x1b\[2J|\r|\n|\t")
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class _Window(io.StringIO):
    """Standard output that is a terminal: pyte shows what is written."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.size = columns, rows
        self.screen = pyte.HistoryScreen(columns, rows, history=100_000, ratio=0.001)
        self._stream = pyte.Stream(self.screen)

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._stream.feed(text.replace("\n", "\r\n"))
        return super().write(text)

    def resize(self, columns: int, rows: int) -> None:
        self.size = columns, rows
        self.screen.resize(rows, columns)

    @property
    def lines(self) -> list[str]:
        columns = range(self.screen.columns)
        above = ["".join(line[column].data for column in columns) for line in self.screen.history.top]
        return [line.rstrip() for line in [*above, *self.screen.display]]

    @property
    def text(self) -> str:
        return "\n".join(self.lines).rstrip() + "\n"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every piece is drawn, on a terminal with colours."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(module, "EVERY_S", 0)
    monkeypatch.setattr(module, "SHARE", 0)
    monkeypatch.setattr(module, "STEADY_S", 0)
    monkeypatch.setattr(module, "terminal_size", lambda stream: stream.size)


def _write(screen: Screen, text: str, size: int) -> None:
    for start in range(0, len(text), size):
        screen.write(text[start : start + size])


def _show(window: _Window, text: str, size: int = 10_000, *, markdown: bool = True) -> None:
    screen = Screen(window, markdown=markdown)
    _write(screen, text, size)
    screen.close()


@pytest.mark.parametrize(("size", "rows"), [(1, 4), (7, 50), (10_000, 4)])
def test_markdown_whatever_the_pieces_and_the_height(size: int, rows: int) -> None:
    """Blocks longer than the screen too: all is in the terminal's history, once."""
    window = _Window(60, rows)
    _show(window, ANSWER, size)
    assert window.text == SHOWN_AT_60
    assert window.screen.cursor.x == 0


def test_a_block_is_shown_while_it_grows() -> None:
    window = _Window(40, 10)
    screen = Screen(window, markdown=True)
    _write(screen, "One **bold** word and the next one come to the margin", 1)
    assert window.text == "One bold word and the next one come to\nthe margin\n"
    screen.write("\n\n```\ncode\nmore")
    assert window.text.endswith("margin\n\n```\ncode\nmore\n```\n")
    assert "\x1b[1mbold" in window.getvalue()


@pytest.mark.parametrize("size", [1, 9])
def test_plain_text_has_whole_words_and_its_lines(size: int) -> None:
    words = "  Two spaces, # no *heading*,\nand more words than a line of\nthirty columns has."
    window = _Window(30, 6)
    _show(window, f"  {' '.join(words.split())}\n\n\n- x\n{'long' * 20}\n", size, markdown=False)
    assert window.text == f"{words}\n\n\n- x\n" + "".join(
        f"{('long' * 20)[at : at + 29]}\n" for at in (0, 29, 58)
    )


@pytest.mark.parametrize(("at", "columns"), [(30, 25), (300, 70), (500, 25), (900, 70)])
def test_resizing_shows_the_whole_answer_in_the_new_width(columns: int, at: int) -> None:
    window = _Window(50, 8)
    window.write("an earlier line\n")
    screen = Screen(window, markdown=True)
    _write(screen, ANSWER[:at], 5)
    window.resize(columns, 9)
    _write(screen, ANSWER[at:], 5)
    screen.close()
    fresh = _Window(columns, 9)
    _show(fresh, ANSWER)
    assert window.text.endswith(fresh.text)
    assert "an earlier line" in window.text


def test_a_window_that_is_dragged_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEADY_S", 60)
    window = _Window(50, 20)
    screen = Screen(window, markdown=False)
    screen.write("one ")
    window.resize(30, 20)
    before = window.getvalue()
    screen.write("two ")
    assert window.getvalue() == before
    screen.close()
    assert window.text.endswith("one two\n")


def test_a_change_of_height_alone_prints_nothing_twice() -> None:
    window = _Window(30, 20)
    screen = Screen(window, markdown=True)
    words = "".join(f"word{number} " for number in range(60))
    _write(screen, words[:200], 7)
    window.resize(30, 5)
    _write(screen, words[200:], 7)
    screen.close()
    assert window.text.split()[-40:] == words.split()[-40:]


def test_thinking_is_dim_and_plain() -> None:
    window = _Window(40, 10)
    screen = Screen(window, markdown=True)
    screen.write("\nI *think*", is_thinking=True)
    screen.write(" so\n\n", is_thinking=True)
    screen.write("\n\nIt is *so*.")
    screen.close()
    assert window.text == "I *think* so\n\nIt is so.\n"
    assert "\x1b[2mI *think* so\x1b[0m" in window.getvalue()
    assert "\x1b[3mso\x1b[0m" in window.getvalue()


HOSTILE = [
    "a \x1b]52;c;aGk=\x07 b",
    "`\x1b[2J`",
    "```\x1b[31m\n\x1b[1A\x9b2J\r\n```\n",
    "[x](http://a.example/\x1b]8;;http://b.example\x07)",
    "&#27;[2J &#x9b;2J &#155;31m &Tab; &NewLine;",
    "[bold red]x[/] [link=http://b.example]y[/link] :bomb:",
    "| \x1b[2J | b |\n|---|---|\n| \x9b1A | \x07 |\n",
    "- \x08\n  ~~~\x1b[5m\n  x\r\ty\n",
    "![\x1b[1m](x\x1by)",
    "\ud800 \u2028 \x85",
]


def _check_written(window: _Window) -> None:
    assert not CONTROL.search(ALLOWED.sub("", window.getvalue()))
    for style in re.findall(r"\x1b\[([0-9;]*)m", window.getvalue()):
        assert style in {"", *"0123479"} or re.fullmatch(r"(\d+;)*\d+", style)


@pytest.mark.parametrize("markdown", [True, False])
@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_controls_the_terminal(text: str, markdown: bool) -> None:
    for size in (1, 1000):
        window = _Window(40, 10)
        screen = Screen(window, markdown=markdown)
        _write(screen, text, size)
        screen.write(text, is_thinking=True)
        screen.close()
        _check_written(window)
    if "bold red" in text:
        assert text in squeezed(window.text)


def test_what_a_parser_lets_through_is_escaped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = PARSER.parse
    monkeypatch.setattr(PARSER, "parse", lambda source: parse(source.replace("\\x1b", "\x1b")))
    window = _Window(30, 5)
    _show(window, "**a\x1b[2Jb**\n\n```\n\x1b[1A\n```\n")
    _check_written(window)
    assert window.text == "a\\x1b[2Jb\n\n```\n\\x1b[1A\n```\n"


MARKS = [
    "# ",
    "\n",
    "\n\n",
    "- ",
    "1. ",
    "> ",
    "```",
    "\n```\n",
    "~~~",
    "|",
    "\n|---|---|\n",
    "    ",
    "---\n",
    "===\n",
]
MARKS += [
    "**",
    "*",
    "`",
    "[a](b)",
    "![c](d)",
    "<p>",
    "&amp;",
    "\\",
    "word ",
    "\t",
    "\x1b[2J",
    "\r",
    "狐",
    "🦊",
]
TEXTS = st.lists(st.sampled_from([*MARKS, "- [ ] "]) | st.text(max_size=8), max_size=40)


@settings(max_examples=count(30, 2000))
@given(TEXTS, st.integers(1, 60), st.integers(1, 12), st.booleans())
def test_any_text_in_any_window(pieces: list[str], columns: int, rows: int, markdown: bool) -> None:
    window, one = _Window(columns, rows), _Window(columns, rows)
    screen = Screen(window, markdown=markdown)
    for piece in pieces:
        screen.write(piece)
    screen.close()
    _check_written(window)
    _show(one, "".join(pieces), markdown=markdown)
    assert re.sub(r"\s", "", window.text) == re.sub(r"\s", "", one.text)

"""Text on a terminal while it is still being written: pieces that are final, and the piece under way.

A piece is a block of markdown, an item of a list or a line of code; rich renders it. What a model wrote is
never rich's own markup, and no part of it is left out: HTML, the address of a link and the definition of one
are shown as text.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, TextIO

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich import markdown as elements
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.rule import Rule
from rich.segment import Segment
from rich.syntax import Syntax
from rich.text import Text
from rich.theme import Theme

from kvant.cli.terminal import escaped

# No backgrounds and no blue: an answer can be read on dark and on light.
THEME = Theme({"markdown.code": "cyan", "markdown.link": "underline", "markdown.link_url": "dim"})
PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable("reference")
LISTS = ("bullet_list_open", "ordered_list_open")
BEFORE = 40  # lines of code that are looked at again for the colours of the next: a long text in quotes
UNLIMITED = 1 << 20  # columns


class _Heading(elements.Heading):
    LEVEL_ALIGN: ClassVar = {"h1": "left"}


class _List(elements.ListElement):
    """Numbers with a full stop, as wide in the first item as in the tenth: items are rendered one by one."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ordered = self.list_type == "ordered_list_open"
        for number, item in enumerate(self.items, self.list_start or 0):
            mark = f"{number}.".rjust(3) + " " if ordered else " • "
            inner = options.update(width=max(1, options.max_width - len(mark)))
            for index, line in enumerate(console.render_lines(item.elements, inner, style=item.style)):
                yield Segment(mark if index == 0 else " " * len(mark))
                yield from line
                yield Segment.line()


class _Markdown(elements.Markdown):
    elements = elements.Markdown.elements | {"heading_open": _Heading} | dict.fromkeys(LISTS, _List)


# Without hyperlinks: a link's text would hide where it leads. It is copied, because to make one takes long.
EMPTY = _Markdown("", code_theme="ansi_dark", hyperlinks=False)


def _markdown(tokens: list[Token]) -> _Markdown:
    """Make a renderable of a block's tokens; of an image its text and address."""
    for token in tokens:
        for child in token.children or ():
            if child.type == "image":
                child.type = "text"
                child.tag = ""
                child.content = f"{child.content} ({child.attrs.get('src')})"
                child.children = None
    made = copy.copy(EMPTY)
    made.parsed = tokens
    return made


class _CodeLine(Text):
    """A line of code. When it is final, the terminal breaks it, so that it can be copied whole."""


@dataclass(frozen=True, slots=True)
class _Block:
    """A block, or an item of a list."""

    start: int  # its first line in the source
    pieces: list[RenderableType]
    number: int | None = None  # of an item after the first


class GrowingText:
    """Text that grows, as markdown or as it is."""

    def __init__(self, stream: TextIO, *, markdown: bool, style: str = "") -> None:
        """``stream``: the terminal, for the colours it has; ``style``: of text that is no markdown."""
        self._console = Console(file=stream, theme=THEME, highlight=False, markup=False, emoji=False)
        self._markdown = markdown
        self._style = style
        self._source = ""  # from the start of the block under way
        self._end = 0  # of the complete lines of it that were looked at
        self._number: int | None = None  # of that block
        self._is_first = True  # whether that block is the first
        self._given = 0  # of its pieces

    def add(self, text: str) -> None:
        self._source = (self._source + text).replace("\r\n", "\n")

    def take(self, width: int, *, ended: bool = False) -> tuple[list[str], list[str]]:
        """Return the lines that are final, each given once, and the lines under way. Empty lines at the end
        are left out.

        ``ended``: no text follows.
        """
        # A line that is not complete may still change what the lines before it mean.
        end = len(self._source) if ended else self._source.rfind("\n") + 1
        pieces = self._finished(end, ended) if ended or end > self._end else []
        final = [line for piece in pieces for line in self._lines(piece, width, True)]
        under_way = [] if ended else _flat(self._blocks(self._source))[self._given :]
        return final, [line for piece in under_way for line in self._lines(piece, width, False)]

    def _finished(self, end: int, ended: bool) -> list[RenderableType]:
        """Return the pieces that the source's first ``end`` characters make final, and drop blocks before the
        last.
        """
        blocks = self._blocks(self._source[:end])
        pieces = _flat(blocks)
        count = len(pieces) if ended else max(0, len(pieces) - 1)  # the last may go on
        final = pieces[self._given : count]
        self._end = end
        self._given = count
        if len(blocks) > 1:
            last = blocks[-1]
            left = "\n".join(self._source.split("\n")[last.start :])
            self._end -= len(self._source) - len(left)
            self._given -= len(pieces) - len(last.pieces)
            self._source = left
            self._number = last.number
            self._is_first = False
        return final

    def _blocks(self, source: str) -> list[_Block]:
        """Cut the source into blocks. An empty line is a piece of the block after it."""
        if not self._markdown:
            lines = source.rstrip().split("\n") if source.strip() else []
            return [_Block(i, [Text(escaped(line), self._style)]) for i, line in enumerate(lines)]
        found: list[_Block] = []
        for tokens in _outermost(PARSER.parse(escaped(source))):
            opening = tokens[0]
            start = opening.map[0] if opening.map else 0
            empty: list[RenderableType] = [] if self._is_first and not found else [""]
            if opening.type in LISTS:
                number = None if found else self._number
                found += _items(tokens, empty if number is None else [], number)
            elif opening.type == "fence":
                found.append(_Block(start, empty + _code(opening, 0 if found else self._given)))
            else:
                is_rule = opening.type == "hr"
                found.append(_Block(start, [*empty, Rule(style="dim") if is_rule else _markdown(tokens)]))
        return found

    def _lines(self, piece: RenderableType, width: int, is_final: bool) -> list[str]:
        """Render a piece, with no control character but those of styles and no spaces at the lines' ends."""
        columns = UNLIMITED if is_final and isinstance(piece, _CodeLine) else width
        rows = self._console.render_lines(piece, self._console.options.update_width(columns), pad=False)
        with self._console.capture() as captured:
            for row in rows:
                line = Text.assemble(*((escaped(segment.text), segment.style or "") for segment in row))
                line.rstrip()
                self._console.print(line, soft_wrap=True)
        return captured.get().strip("\n").split("\n")


def _flat(blocks: list[_Block]) -> list[RenderableType]:
    return [piece for block in blocks for piece in block.pieces]


def _outermost(tokens: list[Token]) -> list[list[Token]]:
    """Return the tokens of each block of the outermost level."""
    found: list[list[Token]] = []
    for token in tokens:
        if token.level == 0 and token.nesting >= 0:
            found.append([])
        found[-1].append(token)
    return found


def _items(tokens: list[Token], empty: list[RenderableType], number: int | None) -> Iterator[_Block]:
    """Make a block of each item of a list; ``number``: of the first one, if there were items before it."""
    opening = tokens[0]
    starts = [i for i, token in enumerate(tokens) if token.type == "list_item_open" and token.level == 1]
    first = int(opening.attrs.get("start", 1)) if number is None else number
    for index, (start, end) in enumerate(pairwise([*starts, len(tokens) - 1])):
        opening = opening.copy(attrs={"start": first + index})
        shown = _markdown([opening, *tokens[start:end], tokens[-1]])
        pieces = [*([] if index else empty), shown]
        yield _Block((tokens[start].map or [0])[0], pieces, first + index if index else number)


def _code(token: Token, given: int) -> list[RenderableType]:
    """Cut a block of code into lines with its marks, of which the first ``given`` need no colours."""
    lines = token.content.removesuffix("\n").split("\n") if token.content else []
    skipped = max(0, given - BEFORE)
    syntax = Syntax("", token.info.partition(" ")[0] or "text", theme="ansi_dark", background_color="default")
    code = syntax.highlight("\n".join(lines[skipped:])).split("\n", allow_blank=True)
    coloured = [_CodeLine.assemble(line) for line in code[: len(lines) - skipped]]
    mark = Text(token.markup, "dim")
    return [mark + Text(token.info, "dim"), *[""] * skipped, *coloured, mark]

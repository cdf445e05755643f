"""Render text while it is still being written: return final pieces, and the unfinished piece.

A piece is a block of markdown, an item of a list or a line of code; rich renders it. Model output is never
read as rich's markup, and nothing in it is dropped: HTML, the addresses of links and link definitions are
shown as text.
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

# No backgrounds and no blue, so that answers are readable on dark and on light.
THEME = Theme({"markdown.code": "cyan", "markdown.link": "underline", "markdown.link_url": "dim"})
PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable("reference")
LISTS = ("bullet_list_open", "ordered_list_open")
BEFORE = 40  # lines of code that are highlighted again before new ones, for example for multi-line strings
UNLIMITED = 1 << 20  # columns


class _Heading(elements.Heading):
    LEVEL_ALIGN: ClassVar = {"h1": "left"}


class _List(elements.ListElement):
    """Numbers end with a full stop and have equal width, because items are rendered one by one."""

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


# Without hyperlinks: a link's text would hide its address. Copied, because constructing one is slow.
EMPTY = _Markdown("", code_theme="ansi_dark", hyperlinks=False)


def _markdown(tokens: list[Token]) -> _Markdown:
    """Make a renderable of a block's tokens; an image becomes its text and address."""
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
    """A line of code. When it is final, the terminal wraps it, so that it can be copied as one line."""


@dataclass(frozen=True, slots=True)
class _Block:
    """A block, or an item of a list."""

    start: int  # first line in the source
    pieces: list[RenderableType]
    number: int | None = None  # of an item after the first


class GrowingText:
    """Text that grows, shown as markdown or plain."""

    def __init__(self, stream: TextIO, *, markdown: bool, style: str = "") -> None:
        """``stream``: the terminal, which determines the colors; ``style``: of plain text."""
        self._console = Console(file=stream, theme=THEME, highlight=False, markup=False, emoji=False)
        self._markdown = markdown
        self._style = style
        self._source = ""  # from the start of the unfinished block
        self._end = 0  # how much of the source, in complete lines, was processed
        self._number: int | None = None  # of the unfinished block
        self._is_first = True  # whether the unfinished block is the first one
        self._num_returned = 0  # pieces of the source that were returned

    def add(self, text: str) -> None:
        self._source = (self._source + text).replace("\r\n", "\n")

    def take(self, width: int, *, ended: bool = False) -> tuple[list[str], list[str]]:
        """Return lines that are final, each only once, and unfinished lines, without empty ones at the end.

        ``ended``: no text follows.
        """
        # An incomplete line may still change the meaning of the lines before it.
        end = len(self._source) if ended else self._source.rfind("\n") + 1
        pieces = self._finished(end, ended) if ended or end > self._end else []
        final = [line for piece in pieces for line in self._lines(piece, width, True)]
        under_way = [] if ended else _flat(self._blocks(self._source))[self._num_returned :]
        return final, [line for piece in under_way for line in self._lines(piece, width, False)]

    def _finished(self, end: int, ended: bool) -> list[RenderableType]:
        """Return pieces that the first ``end`` characters make final; drop all blocks but the last."""
        blocks = self._blocks(self._source[:end])
        pieces = _flat(blocks)
        count = len(pieces) if ended else max(0, len(pieces) - 1)  # the last one may still grow
        final = pieces[self._num_returned : count]
        self._end = end
        self._num_returned = count
        if len(blocks) > 1:
            last = blocks[-1]
            left = "\n".join(self._source.split("\n")[last.start :])
            self._end -= len(self._source) - len(left)
            self._num_returned -= len(pieces) - len(last.pieces)
            self._source = left
            self._number = last.number
            self._is_first = False
        return final

    def _blocks(self, source: str) -> list[_Block]:
        """Cut the source into blocks. An empty line is a piece of the block after it."""
        if not self._markdown:
            lines = source.rstrip().split("\n") if source.strip() else []
            return [_Block(i, [Text(escaped(line), self._style)]) for i, line in enumerate(lines)]
        blocks: list[_Block] = []
        for tokens in _outermost(PARSER.parse(escaped(source))):
            opening = tokens[0]
            start = opening.map[0] if opening.map else 0
            empty: list[RenderableType] = [] if self._is_first and not blocks else [""]
            if opening.type in LISTS:
                number = None if blocks else self._number
                blocks += _items(tokens, empty if number is None else [], number)
            elif opening.type == "fence":
                skippable = 0 if blocks else self._num_returned
                blocks.append(_Block(start, empty + _code(opening, skippable)))
            else:
                is_rule = opening.type == "hr"
                blocks.append(_Block(start, [*empty, Rule(style="dim") if is_rule else _markdown(tokens)]))
        return blocks

    def _lines(self, piece: RenderableType, width: int, is_final: bool) -> list[str]:
        """Render a piece without control characters except styles, and without trailing spaces."""
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
    """Group the tokens by outermost block."""
    blocks: list[list[Token]] = []
    for token in tokens:
        if token.level == 0 and token.nesting >= 0:
            blocks.append([])
        blocks[-1].append(token)
    return blocks


def _items(tokens: list[Token], empty: list[RenderableType], number: int | None) -> Iterator[_Block]:
    """Make a block of each list item; ``number`` is the first item's if items before it were dropped."""
    opening = tokens[0]
    starts = [i for i, token in enumerate(tokens) if token.type == "list_item_open" and token.level == 1]
    first = int(opening.attrs.get("start", 1)) if number is None else number
    for index, (start, end) in enumerate(pairwise([*starts, len(tokens) - 1])):
        opening = opening.copy(attrs={"start": first + index})
        shown = _markdown([opening, *tokens[start:end], tokens[-1]])
        pieces = [*([] if index else empty), shown]
        yield _Block((tokens[start].map or [0])[0], pieces, first + index if index else number)


def _code(token: Token, skippable: int) -> list[RenderableType]:
    """Cut a code block into lines with its marks; the first ``skippable`` lines need no highlighting."""
    lines = token.content.removesuffix("\n").split("\n") if token.content else []
    skipped = max(0, skippable - BEFORE)
    syntax = Syntax("", token.info.partition(" ")[0] or "text", theme="ansi_dark", background_color="default")
    code = syntax.highlight("\n".join(lines[skipped:])).split("\n", allow_blank=True)
    coloured = [_CodeLine.assemble(line) for line in code[: len(lines) - skipped]]
    mark = Text(token.markup, "dim")
    return [mark + Text(token.info, "dim"), *[""] * skipped, *coloured, mark]

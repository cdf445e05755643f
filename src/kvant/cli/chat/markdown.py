"""Markdown on a terminal while it is still being written: blocks that are finished, and the block under way.

Rich renders a block. What a model wrote is never rich's own markup, and no part of it is left out: HTML, the
address of a link and the definition of one are shown as text.
"""

import copy
import re
from typing import TextIO

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

# No backgrounds, and colours of the terminal's own palette: they can be read on dark and on light.
THEME = Theme(
    {
        "markdown.code": "cyan",
        "markdown.block_quote": "italic",
        "markdown.h1": "bold underline",
        "markdown.h2": "bold underline",
        "markdown.h3": "bold",
        "markdown.h4": "bold",
        "markdown.h5": "italic",
        "markdown.h6": "italic",
        "markdown.hr": "dim",
        "markdown.link": "underline",
        "markdown.link_url": "dim",
        "markdown.table.border": "dim",
        "markdown.table.header": "bold",
    }
)
PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable("reference")
BEFORE = 40  # lines of code that are looked at again for the colours of the next: a long text in quotes
STYLE = re.compile(r"(\x1b\[[0-9;]*m)")  # all that rich writes beside text
TRAILING = re.compile(r"(?: |m[0-9;]*\[\x1b)*")  # of a line read backwards, so that it takes linear time


def highlighted(code: str, language: str) -> list[Text]:
    text = Syntax(
        "", language or "text", theme="ansi_dark", background_color="default", tab_size=0
    ).highlight(code)
    return list(text.split("\n", allow_blank=True))[: code.count("\n") + 1]


class _Heading(elements.Heading):
    LEVEL_ALIGN = dict.fromkeys(("h1", "h2", "h3", "h4", "h5", "h6"), "left")


class _List(elements.ListElement):
    """Numbers as they are written, and as wide in the first item as in the tenth: items are rendered one
    by one.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ordered = self.list_type == "ordered_list_open"
        for number, item in enumerate(self.items, self.list_start or 0):
            mark = f"{number}.".rjust(3) + " " if ordered else " • "
            inner = options.update(width=max(1, options.max_width - len(mark)))
            for index, line in enumerate(console.render_lines(item.elements, inner, style=item.style)):
                yield Segment(mark if index == 0 else " " * len(mark))
                yield from line
                yield Segment.line()


class _Line(elements.HorizontalRule):
    new_line = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Rule(style="markdown.hr")


class _Code(elements.CodeBlock):
    """Code inside of a list or a quotation."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from highlighted(str(self.text).removesuffix("\n"), self.lexer_name)


class _Markdown(elements.Markdown):
    elements = elements.Markdown.elements | {
        "heading_open": _Heading,
        "hr": _Line,
        "bullet_list_open": _List,
        "ordered_list_open": _List,
        "fence": _Code,
        "code_block": _Code,
    }

    def __init__(self, tokens: list[Token]) -> None:
        super().__init__("", hyperlinks=False)  # a link's text would hide where it leads
        for token in tokens:
            for child in token.children or ():
                if child.type == "image":
                    child.type, child.tag, child.content = (
                        "text",
                        "",
                        f"{child.content} ({child.attrs.get('src')})",
                    )
                    child.children = None
        self.parsed = tokens


class Renderer:
    """Renderables to lines for a terminal, with no control character but those of styles."""

    def __init__(self, stream: TextIO) -> None:
        """``stream``: the terminal, for the colours it has."""
        self._console = Console(file=stream, theme=THEME, highlight=False, markup=False, emoji=False)

    def lines(self, shown: RenderableType, width: int | None) -> list[str]:
        """Lines of at most ``width`` columns; None: the terminal breaks them."""
        with self._console.capture() as captured:
            if width is None:
                self._console.print(shown, soft_wrap=True)
            else:
                self._console.print(shown, width=width)
        return [_shown(line) for line in captured.get().removesuffix("\n").split("\n")]

    def block(self, tokens: list[Token], width: int) -> list[str]:
        """Lines of a block of markdown, without empty ones around it."""
        lines = self.lines(_Markdown(tokens), width)
        kept = [index for index, line in enumerate(lines) if line]
        return lines[kept[0] : kept[-1] + 1] if kept else []


def _shown(line: str) -> str:
    """A rendered line without the spaces at its end, with escapes for what a terminal would obey beside
    styles.
    """
    backwards = TRAILING.match(line[::-1])
    filling = backwards.end() if backwards else 0
    line = line[: len(line) - filling]
    parts = [part if STYLE.fullmatch(part) else escaped(part) for part in STYLE.split(line)]
    return "".join([*parts, "\x1b[0m"]) if filling and len(parts) > 1 else "".join(parts)


class PlainText:
    """Text that grows, as it is, with whole words at the margin."""

    def __init__(self, renderer: Renderer, style: str = "") -> None:
        self._renderer, self._style = renderer, style
        self._source = ""  # that is not final

    def add(self, text: str) -> None:
        self._source = (self._source + text).replace("\r\n", "\n")

    def finished(self, width: int, *, ended: bool = False) -> list[str]:
        """Lines that are final, each given once; ``ended``: no text follows. Empty lines at the end are
        left out.
        """
        text = self._source.rstrip()
        end = len(text) if ended else text.rfind("\n") + 1
        done, self._source = self._source[:end], self._source[end:]
        return self._rendered(done.removesuffix("\n"), width) if done else []

    def current(self, width: int) -> list[str]:
        """The line or block under way, as it would be if it ended here."""
        text = self._source.rstrip()
        return self._rendered(text, width) if text else []

    def _rendered(self, text: str, width: int) -> list[str]:
        return self._renderer.lines(Text(escaped(text), self._style), width)


class MarkdownText(PlainText):
    """Text that grows, as markdown, by blocks. Of a long one, items of a list or lines of code are given
    when final.
    """

    def __init__(self, renderer: Renderer) -> None:
        super().__init__(renderer)
        self._separate = False  # something was given: an empty line comes before the next block
        self._items = 0  # of the list under way, given before
        self._first = 1  # the number of its first item
        # of the code under way, given before; None: not even its first line
        self._code_lines: int | None = None

    def finished(self, width: int, *, ended: bool = False) -> list[str]:
        return self._take(width, ended, None)

    def current(self, width: int) -> list[str]:
        return copy.copy(self)._take(width, True, width)

    def _take(self, width: int, ended: bool, code_width: int | None) -> list[str]:
        # A line that is not complete may still change what the lines before it mean.
        lines = self._source.split("\n")
        complete = len(lines) if ended else len(lines) - 1
        tokens = PARSER.parse(escaped("\n".join(lines[:complete])))
        blocks = _blocks(tokens)
        found: list[str] = []
        cut = 0
        for index, block in enumerate(blocks):
            is_last = index == len(blocks) - 1 and not ended
            start, end = block[0].map or (0, 0)
            if block[0].type == "fence":
                closed = not is_last or _is_closed(block[0], lines[end - 1], end - start)
                found += self._code(block[0], code_width, closed)
                cut = end if closed else start
            elif block[0].type in ("bullet_list_open", "ordered_list_open"):
                cut = self._list(block, width, found, is_last)
            elif not is_last:
                found += self._separated() + self._renderer.block(block, width)
                cut = end
            else:
                cut = start
        self._source = "\n".join(lines[complete:] if ended else lines[cut:])
        return found

    def _separated(self) -> list[str]:
        empty = [""] if self._separate else []
        self._separate = True
        return empty

    def _code(self, token: Token, width: int | None, closed: bool) -> list[str]:
        """The lines of a code block that were not given yet, all of them complete."""
        found: list[Text] = []
        empty: list[str] = []
        if self._code_lines is None:
            empty, self._code_lines = self._separated(), 0
            found.append(Text(f"{token.markup}{token.info}", "dim"))
        lines = token.content.removesuffix("\n").split("\n") if token.content else []
        if len(lines) > self._code_lines:
            begin = max(0, self._code_lines - BEFORE)
            colours = highlighted("\n".join(lines[begin:]), token.info.partition(" ")[0])
            found += colours[self._code_lines - begin :]
        self._code_lines = len(lines)
        if closed:
            found.append(Text(token.markup, "dim"))
            self._code_lines = None
        return empty + [line for text in found for line in self._renderer.lines(text, width)]

    def _list(self, tokens: list[Token], width: int, found: list[str], is_last: bool) -> int:
        """Append the lines of finished items to ``found``; the source line after them."""
        opening, closing = tokens[0], tokens[-1]
        starts = [
            index for index, token in enumerate(tokens) if token.type == "list_item_open" and token.level == 1
        ]
        if not self._items:
            self._first = int(opening.attrs.get("start", 1))
        opening.attrs["start"] = self._first + self._items
        end = starts[-1] if is_last else len(tokens) - 1  # the last item may go on
        if end > 1:
            if not self._items:
                found += self._separated()
            found += self._renderer.block([opening, *tokens[1:end], closing], width)
        self._items = self._items + len(starts) - 1 if is_last else 0
        after = tokens[end].map if is_last else None
        return after[0] if after else (opening.map or (0, 0))[1]


def _blocks(tokens: list[Token]) -> list[list[Token]]:
    """Tokens of each block of the outermost level."""
    found: list[list[Token]] = []
    for token in tokens:
        if token.level == 0 and token.nesting >= 0:
            found.append([])
        found[-1].append(token)
    return found


def _is_closed(token: Token, last_line: str, lines: int) -> bool:
    """Whether the last of a code block's lines closes it."""
    mark = rf" {{0,3}}{re.escape(token.markup[0])}{{{len(token.markup)},}}[ \t]*"
    return lines > 1 and re.fullmatch(mark, last_line) is not None

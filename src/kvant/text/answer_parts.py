"""Split an answer while it streams into thinking, text and tool calls."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvant.text.call_form import NoCallError, Reader, ToolFormat, schemas, to_json
from kvant.text.stream import AnswerPart, CallPart, TextPart, overlap, text_parts
from kvant.text.thinking import Thinking
from kvant.text.tokenizer import Tokenizer


class AnswerParts:
    """Split one answer.

    Text is returned as soon as it cannot be the beginning of a mark or of a call. Text that looks like a call
    but is not one stays text. Whitespace around calls is dropped. Without tools there are no calls, and all
    text is returned at once.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: str | None,
        tools: Sequence[Mapping[str, Any]] = (),
        format: ToolFormat | None = None,  # noqa: A002
        *,
        only_calls: bool = False,
    ) -> None:
        """Make a splitter.

        Args:
            tokenizer: provides the marks of thinking.
            prompt: the rendered messages; None if the answer continues a text.
            tools: in OpenAI's format.
            format: the format of calls.
            only_calls: whether a grammar allows nothing but calls. Any text is then a truncated call and is
                dropped.
        """
        self._thinking = None if prompt is None else Thinking.of(tokenizer, prompt)
        self._tools = schemas(tools)
        self._format = format if tools else None
        self._pending = ""  # may begin a call, or is an incomplete one
        self._space = ""  # whitespace that is text unless a call follows
        self._reader: Reader | None = None
        self._called = False  # whether there was a call
        self._only_calls = only_calls
        # "first" before any output, "text" after text, "called" directly after a call
        self._state = "first"

    def add(self, text: str) -> list[AnswerPart]:
        """Add the next piece of the answer; return the parts that are certain now."""
        pieces = [(False, text)] if self._thinking is None else self._thinking.add(text)
        return self._split(pieces, is_all=False)

    def finish(self) -> list[AnswerPart]:
        """Return the pending parts at the end of the answer."""
        pieces = [] if self._thinking is None else self._thinking.finish()
        return self._split([*pieces, (False, "")], is_all=True)

    def _split(self, pieces: Sequence[tuple[bool, str]], is_all: bool) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for place, (thinking, text) in enumerate(pieces):
            if thinking:
                parts.append(TextPart(text, True))
            elif self._format is None:
                parts += text_parts(text)
            else:
                self._pending += text
                last = is_all and place == len(pieces) - 1
                while self._step(self._format, parts, last):
                    pass
        if is_all and self._state != "called":
            parts += text_parts(self._space)
        return parts

    def _step(self, format: ToolFormat, parts: list[AnswerPart], is_all: bool) -> bool:  # noqa: A002
        """Move what is certain from the pending text to ``parts``. Return whether there may be more."""
        if not self._pending:
            return False
        if self._reader is None:
            return self._look(format, parts, is_all)
        try:
            end = self._reader.end(self._pending, is_all)
            if end is None:
                return False
            for name, arguments in format.calls(self._pending[:end], self._tools):
                parts.append(CallPart(name, to_json(arguments)))
        except NoCallError as error:
            self._say(self._take(error.length), parts)
        else:
            self._take(end)
            self._space = ""
            self._state = "called"
            self._called = True
        self._reader = None
        return True

    def _look(self, format: ToolFormat, parts: list[AnswerPart], is_all: bool) -> bool:  # noqa: A002
        """Look for the start of calls. Return whether there is one."""
        marks = format.starts if format.several or not self._called else ()
        blank = len(self._pending) - len(self._pending.lstrip())
        if self._state == "first" and format.first and self._pending.startswith(format.first, blank):
            start = blank
        else:
            start = min((at for mark in marks if (at := self._pending.find(mark)) >= 0), default=-1)
        head_at = len(self._pending)  # text before it cannot belong to a head
        is_head = False
        if format.head:
            head_at, is_head = self._find_head(format.head)
        if is_head and not 0 <= start < head_at:
            start = head_at
        if start >= 0:
            self._say(self._take(start), parts)
            self._reader = format.reader()
            return True
        uncertain = max((overlap(self._pending, mark) for mark in marks), default=0)
        certain = len(self._pending) if is_all else min(head_at, len(self._pending) - uncertain)
        self._say(self._take(certain), parts)
        return False

    def _find_head(self, head: str) -> tuple[int, bool]:
        """Find a line that begins with a head and a known tool's name; return where, and if it is complete.

        If there is no such line, the position is where one may still begin, or the end of the text.
        """
        pending = self._pending
        at = pending.find(head)
        while at >= 0:
            start = at + len(head)
            end = pending.find(">", start)
            name = pending[start : end if end >= 0 else None].rstrip()
            if self._begins_line(at):
                if end >= 0 and name in self._tools:
                    return at, True
                if end < 0 and any(tool.startswith(name) for tool in self._tools):
                    return at, False
            at = pending.find(head, start)
        at = len(pending) - overlap(pending, head)
        return at if self._begins_line(at) else len(pending), False

    def _begins_line(self, at: int) -> bool:
        """Whether a position in the pending text is the start of a line, or of the answer."""
        before = self._pending[at - 1] if at else self._space[-1:]
        return before == "\n" or (not at and self._state != "text" and not self._space)

    def _take(self, length: int) -> str:
        text = self._pending[:length]
        self._pending = self._pending[length:]
        return text

    def _say(self, text: str, parts: list[AnswerPart]) -> None:
        if self._only_calls:
            return
        text = self._space + text
        if self._state == "called":
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            parts.append(TextPart(shown))
            self._state = "text"

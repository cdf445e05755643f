"""An answer split while it streams: what the model thinks, what it says, and its tool calls."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvant.text.call_form import NoCallError, Reader, ToolFormat, schemas, to_json
from kvant.text.stream import CallPart, Part, TextPart, overlap, text_parts
from kvant.text.thinking import Thinking
from kvant.text.tokenizer import Tokenizer


class AnswerParts:
    """Splits one answer.

    Text comes as soon as it cannot be the beginning of a mark or of a call. What looks like a call and is
    none is text. Whitespace beside calls is left out. Where there are no tools, there are no calls, and all
    text comes at once.
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
            tokenizer: has the marks of thinking.
            prompt: the rendered messages; None: text goes on.
            tools: in OpenAI's form.
            format: of calls.
            only_calls: a grammar allows nothing but calls, so that text can only be a call that was cut. It
                is dropped.
        """
        self._thinking = None if prompt is None else Thinking.of(tokenizer, prompt)
        self._tools = schemas(tools)
        self._format = format if tools else None
        self._pending = ""  # may begin a call, or is one under way
        self._space = ""  # whitespace that is text if no call follows
        self._reader: Reader | None = None
        self._called = False  # there was a call
        self._only_calls = only_calls
        # nothing was said yet; then "text", and "called" where a call was the last thing
        self._state = "first"

    def add(self, text: str) -> list[Part]:
        """Take the next piece of the answer; return what is certain."""
        pieces = [(False, text)] if self._thinking is None else self._thinking.add(text)
        return self._split(pieces, is_all=False)

    def finish(self) -> list[Part]:
        """What was held back, at the end of the answer."""
        pieces = [] if self._thinking is None else self._thinking.finish()
        return self._split([*pieces, (False, "")], is_all=True)

    def _split(self, pieces: Sequence[tuple[bool, str]], is_all: bool) -> list[Part]:
        parts: list[Part] = []
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

    def _step(self, format: ToolFormat, parts: list[Part], is_all: bool) -> bool:  # noqa: A002
        """Take from the held text what is certain. Returns whether there may be more."""
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

    def _look(self, format: ToolFormat, parts: list[Part], is_all: bool) -> bool:  # noqa: A002
        """Look for a mark that begins calls. Returns whether there is one."""
        marks = format.starts if format.several or not self._called else ()
        blank = len(self._pending) - len(self._pending.lstrip())
        if self._state == "first" and format.first and self._pending.startswith(format.first, blank):
            found = blank
        else:
            found = min((at for mark in marks if (at := self._pending.find(mark)) >= 0), default=-1)
        head_at = len(self._pending)  # the text before it cannot be part of a head
        is_head = False
        if format.head:
            head_at, is_head = self._find_head(format.head)
        if is_head and not 0 <= found < head_at:
            found = head_at
        if found >= 0:
            self._say(self._take(found), parts)
            self._reader = format.reader()
            return True
        kept = max((overlap(self._pending, mark) for mark in marks), default=0)
        certain = len(self._pending) if is_all else min(head_at, len(self._pending) - kept)
        self._say(self._take(certain), parts)
        return False

    def _find_head(self, head: str) -> tuple[int, bool]:
        """Return where a line begins with a head and a known tool's name, and whether both are complete.

        The place is the end of the text if there is no such line, even if more text comes.
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
        """Return whether a place of the held text is the start of a line, or of the answer."""
        before = self._pending[at - 1] if at else self._space[-1:]
        return before == "\n" or (not at and self._state != "text" and not self._space)

    def _take(self, length: int) -> str:
        taken = self._pending[:length]
        self._pending = self._pending[length:]
        return taken

    def _say(self, text: str, parts: list[Part]) -> None:
        if self._only_calls:
            return
        text = self._space + text
        if self._state == "called":
            text = text.lstrip()
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            parts.append(TextPart(said))
            self._state = "text"

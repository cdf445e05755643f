"""Separate a model's thinking from its answer while the text streams, by the marks in its template."""

from dataclasses import dataclass

from kvant.text.stream import overlap
from kvant.text.template import all_templates
from kvant.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Marks:
    """Marks around a model's thinking."""

    starts: tuple[str, ...]  # each of them begins thinking
    end: str
    left_out: tuple[str, ...] = ()  # marks before an answer that do not belong to it

    def opened_by(self, prompt: str) -> bool:
        """Whether a rendered prompt has begun the thinking, as some templates do."""
        return prompt.rstrip().endswith(self.starts)


# gpt-oss writes a channel before each part of its answer (github.com/openai/harmony, docs/format.md).
HARMONY_TOKENS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")
HARMONY_SAID = ("final", "commentary")  # channels of the answer; the second one before a call
HARMONY = Marks(
    ("<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>analysis<|message|>"),
    "<|end|>",
    tuple(
        f"{start}<|channel|>{name}<|message|>"
        for start in ("", "<|start|>assistant")
        for name in HARMONY_SAID
    ),
)
ENDS_ALONE = ("<mm:think>",)  # MiniMax M3 may skip thinking and begin with the end mark
IN_WORDS = Marks(("<think>",), "</think>")  # for Olmo 3 and others without tokens for these marks


def marks_of(tokenizer: Tokenizer) -> Marks | None:
    """Return the marks in a tokenizer's vocabulary or chat template; None if there are none."""
    if tokenizer.think_start is not None and tokenizer.think_end is not None:
        start = tokenizer.think_start
        end = tokenizer.think_end
        return Marks((start,), end, (end,) if start in ENDS_ALONE else ())
    ids = tokenizer.convert_tokens_to_ids(HARMONY_TOKENS)
    if None not in ids and tokenizer.unk_token_id not in ids:
        return HARMONY
    return IN_WORDS if IN_WORDS.starts[0] in all_templates(tokenizer.chat_template) else None


class Thinking:
    """Split one answer into thinking and text. Marks and the line breaks around them are dropped.

    Thinking comes at the start of an answer, before it or between marks. A mark later in the answer is text:
    a model may write about marks.
    """

    def __init__(self, marks: Marks, prompt: str) -> None:
        """``prompt``: the rendered messages."""
        self._marks = marks
        opened = marks.opened_by(prompt)
        self._state = "thinking" if opened else "before"
        self._pending = ""  # may be part of a mark, or line breaks before one
        self._after_mark = opened

    @classmethod
    def of(cls, tokenizer: Tokenizer, prompt: str) -> "Thinking | None":
        """Return a splitter for an answer to a rendered prompt; None if the tokenizer has no marks."""
        marks = marks_of(tokenizer)
        return None if marks is None else cls(marks, prompt)

    def add(self, text: str) -> list[tuple[bool, str]]:
        """Add the next piece of the answer; return certain pieces, not empty: (is it thinking, text)."""
        self._pending += text
        pieces: list[tuple[bool, str]] = []
        while self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[tuple[bool, str]]:
        """Return the pending text at the end of the answer."""
        pending = self._pending
        self._pending = ""
        is_thinking = self._state == "thinking"
        pending = pending.rstrip("\n") if is_thinking else pending
        return [(is_thinking, pending)] if pending else []

    def split(self, text: str) -> tuple[str, str]:
        """Split a complete answer into its thinking and the answer itself."""
        pieces = [*self.add(text), *self.finish()]
        thinking = "".join(piece for is_thinking, piece in pieces if is_thinking)
        return thinking, "".join(piece for is_thinking, piece in pieces if not is_thinking)

    def _step(self, pieces: list[tuple[bool, str]]) -> bool:
        """Move what is certain from the pending text to ``pieces``. Return whether there may be more."""
        if self._after_mark:
            self._pending = self._pending.lstrip("\n")
            self._after_mark = not self._pending
        if not self._pending:
            return False
        if self._state == "answer":
            pieces.append((False, self._pending))
            self._pending = ""
            return False
        return self._before() if self._state == "before" else self._thinking(pieces)

    def _before(self) -> bool:
        text = self._pending.lstrip()
        marks = (*self._marks.starts, *self._marks.left_out)
        for mark in marks:
            if text.startswith(mark):
                self._pending = text[len(mark) :]
                self._after_mark = True
                self._state = "thinking" if mark in self._marks.starts else "before"
                return True
        if any(mark.startswith(text) for mark in marks):
            return False
        self._state = "answer"
        return True

    def _thinking(self, pieces: list[tuple[bool, str]]) -> bool:
        end = self._marks.end
        thought, mark, rest = self._pending.partition(end)
        if mark:
            if thought := thought.rstrip("\n"):
                pieces.append((True, thought))
            self._pending = rest
            self._state = "before"
            self._after_mark = True
            return True
        begun = overlap(self._pending, end)
        certain = self._pending[: len(self._pending) - begun].rstrip("\n")
        if certain:
            pieces.append((True, certain))
            self._pending = self._pending[len(certain) :]
        return False

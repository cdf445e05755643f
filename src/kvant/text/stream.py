"""Convert tokens to text as they come: whole characters, and never part of a stop string."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvant.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kvant.text.answer_parts import AnswerParts


@dataclass(frozen=True, slots=True)
class TextPart:
    """A nonempty piece of text."""

    text: str
    thinking: bool = False


@dataclass(frozen=True, slots=True)
class CallPart:
    """A complete call of a known tool. Without a grammar, arguments may violate the tool's schema."""

    name: str
    arguments: str  # a JSON object as text


AnswerPart = TextPart | CallPart


class TextStream:
    """The text and calls of one answer, token by token, cut before the stop string that ends first.

    mlx-lm's streaming detokenizer holds back incomplete characters; this class holds back text that may still
    become a stop string. Thinking and calls are not searched for stop strings.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), splitter: "AnswerParts | None" = None
    ) -> None:
        """``splitter`` separates thinking and calls from text; None: everything is text."""
        self.detokenizer = tokenizer.detokenizer
        self.is_thinking: bool | None = None  # whether everything so far was thinking; None: nothing yet
        self._splitter = splitter
        self._stop = StopText(stop)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stop.match

    def add(self, token: int) -> list[AnswerPart]:
        """Add a token; return the parts that are certain now, possibly none."""
        self.detokenizer.add_token(token)
        return self._cut(self._split())

    def finish(self) -> list[AnswerPart]:
        """Return the pending parts at the end of the sequence."""
        self.detokenizer.finalize()
        parts = self._split()
        if self._splitter is not None:
            parts += self._splitter.finish()
        return self._cut(parts) + self._stop.finish()

    def _split(self) -> list[AnswerPart]:
        text = self.detokenizer.last_segment
        return text_parts(text) if self._splitter is None else self._splitter.add(text)

    def _cut(self, parts: Sequence[AnswerPart]) -> list[AnswerPart]:
        """Return the parts before the stop string, without text that may still become one."""
        certain: list[AnswerPart] = []
        for item in parts:
            if self.stop is not None:
                break
            if isinstance(item, TextPart) and item.thinking:
                self.is_thinking = self.is_thinking is not False
                certain.append(item)
                continue
            self.is_thinking = False
            if isinstance(item, TextPart):
                certain += self._stop.add(item.text)
            else:
                certain += [*self._stop.finish(), item]
        return certain


def text_parts(text: str) -> list[AnswerPart]:
    """Return a text as a list of parts, empty if the text is."""
    return [TextPart(text)] if text else []


class StopText:
    """Cut a growing text before the stop string that ends first; hold back what may still become one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._pending = ""
        self.match: str | None = None  # the stop string that ended the text

    def add(self, text: str) -> list[AnswerPart]:
        """Add text; return what is certain now."""
        text = self._pending + text
        # Choose by the earliest end, so that chunking does not matter; of equal ends the longest string.
        places = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if places:
            _, at, self.match = min(places)
            self._pending = ""
            return text_parts(text[:at])
        keep = max((overlap(text, stop) for stop in self._stop), default=0)
        self._pending = text[len(text) - keep :]
        return text_parts(text[: len(text) - keep])

    def finish(self) -> list[AnswerPart]:
        """Return the pending text at the end."""
        pending = self._pending
        self._pending = ""
        return text_parts(pending)


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a prefix of ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)

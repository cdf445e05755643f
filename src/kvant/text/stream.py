"""Tokens to text as they come: whole characters only, and never a part of a stop string."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvant.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kvant.text.answer_parts import AnswerParts


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of text, never empty."""

    text: str
    thinking: bool = False


@dataclass(frozen=True, slots=True)
class CallPart:
    """A whole call of a known tool. Without a grammar its arguments may not keep to the tool's schema."""

    name: str
    arguments: str  # an object, as JSON text


Part = TextPart | CallPart


class TextStream:
    """The text and the calls of one answer, token by token, cut before the stop string that ends first.

    mlx-lm's streaming detokenizer holds back bytes that are not yet a whole character; this holds back text
    that may still become a stop string. Thinking and calls are not searched for stop strings.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), splitter: "AnswerParts | None" = None
    ) -> None:
        """``splitter``: tells thinking and calls from text; None: all of it is text."""
        self.detokenizer = tokenizer.detokenizer
        self.is_thinking: bool | None = None  # whether all so far was thinking; None: nothing came yet
        self._splitter = splitter
        self._stop = StopText(stop)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text; None: none did."""
        return self._stop.found

    def add(self, token: int) -> list[Part]:
        """Take a token; return what is now certain. It may be nothing."""
        self.detokenizer.add_token(token)
        return self._cut(self._split())

    def finish(self) -> list[Part]:
        """Return what was held back, at the end of the sequence."""
        self.detokenizer.finalize()
        parts = self._split()
        if self._splitter is not None:
            parts += self._splitter.finish()
        return self._cut(parts) + self._stop.finish()

    def _split(self) -> list[Part]:
        text = self.detokenizer.last_segment
        return text_parts(text) if self._splitter is None else self._splitter.add(text)

    def _cut(self, parts: Sequence[Part]) -> list[Part]:
        """Return the parts before the stop string, without text that may still become one."""
        found: list[Part] = []
        for part in parts:
            if self.stop is not None:
                break
            if isinstance(part, TextPart) and part.thinking:
                self.is_thinking = self.is_thinking is not False
                found.append(part)
                continue
            self.is_thinking = False
            found += self._stop.add(part.text) if isinstance(part, TextPart) else [*self._stop.finish(), part]
        return found


def text_parts(text: str) -> list[Part]:
    """Return a text as a part; nothing if it is empty."""
    return [TextPart(text)] if text else []


class StopText:
    """Cuts a growing text before the stop string that ends first, and holds back what may still become
    one.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._pending = ""
        self.found: str | None = None  # the stop string that ended the text

    def add(self, text: str) -> list[Part]:
        """Take text; return what is now certain."""
        text = self._pending + text
        # The one that ends first, whatever pieces the text comes in; of several the longest.
        places = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if places:
            _, at, self.found = min(places)
            self._pending = ""
            return text_parts(text[:at])
        keep = max((overlap(text, stop) for stop in self._stop), default=0)
        self._pending = text[len(text) - keep :]
        return text_parts(text[: len(text) - keep])

    def finish(self) -> list[Part]:
        """Return what was held back, at the end of the text."""
        pending = self._pending
        self._pending = ""
        return text_parts(pending)


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)

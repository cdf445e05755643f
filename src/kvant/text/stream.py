"""Tokens to text as they come: whole characters only, and never a part of a stop string."""

from collections.abc import Callable, Sequence

from kvant.errors import ModelError, library_errors
from kvant.text.tokenizer import Tokenizer


class TextStream:
    """Text of a growing sequence of tokens, cut before the first stop string.

    mlx-lm's streaming detokenizer holds back bytes that are not yet a whole character; this holds back text that may
    still become a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._detokenizer = tokenizer.detokenizer
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Take a token; return the text that is now certain. It may be empty."""
        return self._release(self._segment(lambda: self._detokenizer.add_token(token)))

    def finish(self) -> str:
        """Return the text that was held back, at the end of the sequence."""
        text = self._release(self._segment(self._detokenizer.finalize))
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _segment(self, advance: Callable[[], object]) -> str:
        with library_errors(ModelError, "the tokenizer cannot decode the generated tokens"):
            advance()
            return str(self._detokenizer.last_segment)

    def _release(self, segment: str) -> str:
        if self.stopped:
            return ""
        text = self._held + segment
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)

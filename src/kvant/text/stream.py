"""Tokens to text as they come: whole characters only, and never a part of a stop string."""

from collections.abc import Sequence

from kvant.text.tokenizer import Tokenizer


class TextStream:
    """Text of a growing sequence of tokens, cut before the stop string that ends first.

    mlx-lm's streaming detokenizer holds back bytes that are not yet a whole character; this holds back text
    that may still become a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._detokenizer = tokenizer.detokenizer
        self._stop = StopText(stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self._stop.found is not None

    @property
    def length(self) -> int:
        """Return the number of whole characters so far, with those that are held back for a stop string."""
        return len(self._detokenizer.text)

    def add(self, token: int) -> str:
        """Take a token; return the text that is now certain. It may be empty."""
        self._detokenizer.add_token(token)
        return self._stop.add(self._detokenizer.last_segment)

    def finish(self) -> str:
        """Return the text that was held back, at the end of the sequence."""
        self._detokenizer.finalize()
        return self._stop.add(self._detokenizer.last_segment) + self._stop.finish()

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, which need not be whole characters."""
        return self._detokenizer.token_bytes(token)


class StopText:
    """Cuts a growing text before the stop string that ends first, and holds back what may still become
    one.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._pending = ""
        self.found: str | None = None  # the stop string that ended the text

    def add(self, text: str) -> str:
        """Take text; return what is now certain. It may be empty."""
        if self.found is not None:
            return ""
        text = self._pending + text
        # The one that ends first, whatever pieces the text comes in; of several the longest.
        places = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if places:
            _, at, self.found = min(places)
            self._pending = ""
            return text[:at]
        keep = max((overlap(text, stop) for stop in self._stop), default=0)
        self._pending = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return what was held back, at the end of the text."""
        pending = self._pending
        self._pending = ""
        return pending


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)

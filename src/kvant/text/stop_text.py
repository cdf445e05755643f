"""Text cut before a stop string."""

from collections.abc import Sequence


class StopText:
    """Cuts a growing text before the stop string that ends first, and holds back what may still become one.

    Attributes:
        found: the stop string that ended the text; None: there was none yet.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.found: str | None = None

    def add(self, text: str) -> str:
        """Take text; return what is now certain. It may be empty."""
        if self.found is not None:
            return ""
        text = self._held + text
        # The one that ends first, whatever pieces the text comes in; of several the longest.
        places = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if places:
            _, at, self.found = min(places)
            self._held = ""
            return text[:at]
        keep = max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return what was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)

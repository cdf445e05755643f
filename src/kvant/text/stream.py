"""Tokens to text as they come: whole characters only, and never a part of a stop string."""

from collections.abc import Callable, Sequence

from kvant.errors import ModelError, library_errors
from kvant.text.stop_text import StopText
from kvant.text.tokenizer import Tokenizer


class TextStream:
    """Text of a growing sequence of tokens, cut before the stop string that ends first.

    mlx-lm's streaming detokenizer holds back bytes that are not yet a whole character; this holds back text that may
    still become a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._detokenizer = tokenizer.detokenizer
        self._stop = StopText(stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self._stop.found is not None

    def add(self, token: int) -> str:
        """Take a token; return the text that is now certain. It may be empty."""
        return self._stop.add(self._segment(lambda: self._detokenizer.add_token(token)))

    def finish(self) -> str:
        """Return the text that was held back, at the end of the sequence."""
        return self._stop.add(self._segment(self._detokenizer.finalize)) + self._stop.finish()

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, which need not be whole characters."""
        with library_errors(ModelError, "the tokenizer cannot decode a token"):
            return self._detokenizer.token_bytes(token)

    def _segment(self, advance: Callable[[], object]) -> str:
        with library_errors(ModelError, "the tokenizer cannot decode the generated tokens"):
            advance()
            return str(self._detokenizer.last_segment)

"""One answer's tokens to pieces of text and tool calls, with the log-probabilities of the tokens in each."""

from collections.abc import Sequence

from kvant.engine.request import Token
from kvant.server.generation import Call, Text, TokenLogprob
from kvant.text.answer_parts import AnswerParts, CallPart, Part, TextPart
from kvant.text.stream import StopText, TextStream
from kvant.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # of a token that cannot come: JSON has no infinity. OpenAI's number


class AnswerText:
    """Takes the tokens of one answer.

    Attributes:
        tokens: so far.
        thinking_tokens: those before the answer itself, where the model thought.
        calls: tool calls so far.
    """

    def __init__(
        self, number: int, tokenizer: Tokenizer, parts: AnswerParts | None, stop: Sequence[str], *, logprobs: bool
    ) -> None:
        """For answer ``number`` of a request. ``parts``: splits it; None: all of it is text."""
        self.tokens = self.thinking_tokens = self.calls = 0
        self._number = number
        self._text = TextStream(tokenizer)
        self._parts = parts
        self._stop = StopText(stop)
        self._logprobs = _Pending() if logprobs else None
        self._thought = self._said = False

    @property
    def stop(self) -> str | None:
        """The stop string that ended it. One is looked for in the answer itself: thinking and calls do not count."""
        return self._stop.found

    def take(self, token: Token) -> list[Text | Call]:
        """The next token, and after the last one what was held back."""
        assert token.token is not None
        self.tokens += 1
        parts: list[Part] = []
        if token.finish_reason != "stop":  # an end of text is no part of it
            if self._logprobs is not None:
                self._logprobs.add(self._logprob(token))
            parts += self._split(self._text.add(token.token))
        if token.finish_reason is not None:
            parts += self._split(self._text.finish())
            parts += [] if self._parts is None else self._parts.finish()
        events = self._events(parts)
        if token.finish_reason is not None and (rest := self._stop.finish()):
            events.append(self._piece(rest, False))
        if self._thought and not self._said:
            self.thinking_tokens = self.tokens
        return events

    def _split(self, text: str) -> Sequence[Part]:
        if self._parts is not None:
            return self._parts.add(text)
        return [TextPart(text)] if text else []

    def _events(self, parts: Sequence[Part]) -> list[Text | Call]:
        events: list[Text | Call] = []
        for part in parts:
            if self.stop is not None:
                break
            if isinstance(part, CallPart):
                if held := self._stop.finish():
                    events.append(self._piece(held, False))
                events.append(Call(self._number, self.calls, part.name, part.arguments))
                if self._logprobs is not None:
                    self._logprobs.drop()
                self.calls += 1
                self._said = True
            elif part.thinking:
                self._thought = True
                events.append(self._piece(part.text, True))
            else:
                self._said = True
                if text := self._stop.add(part.text):
                    events.append(self._piece(text, False))
        return events

    def _piece(self, text: str, thinking: bool) -> Text:
        logprobs = () if self._logprobs is None else self._logprobs.take(text)
        return Text(self._number, text, thinking, logprobs)

    def _logprob(self, token: Token) -> TokenLogprob:
        assert token.token is not None
        assert token.logprob is not None
        top = [self._told(other, logprob) for other, logprob in token.top_logprobs]
        return self._told(token.token, token.logprob, top)

    def _told(self, token: int, logprob: float, top: Sequence[TokenLogprob] = ()) -> TokenLogprob:
        written = self._text.token_bytes(token)
        return TokenLogprob(written.decode("utf-8", "replace"), max(logprob, LEAST_LOGPROB), written, top)


class _Pending:
    """Tokens whose text is not out yet. Marks, and what is held back, come between a token and its text."""

    def __init__(self) -> None:
        self._tokens: list[TokenLogprob] = []

    def add(self, token: TokenLogprob) -> None:
        self._tokens.append(token)

    def drop(self) -> None:
        """They were a call."""
        self._tokens = []

    def take(self, text: str) -> list[TokenLogprob]:
        """Those that a piece of text was made of. Those before it were marks."""
        content = text.encode("utf-8", "replace")
        written = b"".join(token.bytes for token in self._tokens)
        ends: list[int] = []
        for token in self._tokens:
            ends.append((ends[-1] if ends else 0) + len(token.bytes))
        starts = [0, *ends[:-1]]
        at = next((start for start in starts if written.startswith(content, start)), written.find(content))
        if at < 0:  # not the tokens' own bytes, such as marks of what is no character
            taken, self._tokens = self._tokens, []
            return taken
        last = at + len(content)
        taken = [
            token
            for token, start, end in zip(self._tokens, starts, ends, strict=True)
            if start < last and at < end <= last
        ]
        self._tokens = [token for token, end in zip(self._tokens, ends, strict=True) if end > last]
        return taken

"""A bound of how many tokens a model thinks: at its end the mark that ends thinking is the only token there is."""

from dataclasses import dataclass

import mlx.core as mx

from kvant.server.errors import ApiError
from kvant.text.thinking import marks_of
from kvant.text.tokenizer import Tokenizer

BEGINNING = 4  # tokens of an answer that the mark is among: blank ones may come before it


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """A logits processor of one prompt.

    Attributes:
        first: the place of the answer's first token.
        tokens: of thinking, its marks in the answer among them.
        start: the token that begins thinking; None: the prompt has begun it.
        end: the token that ends it.
    """

    first: int
    tokens: int
    start: int | None
    end: int

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """``tokens``: all so far (T,); ``logits``: (1, vocab)."""
        if tokens.size - self.first < self.tokens - 1:
            return logits
        answer: list[int] = tokens[self.first :].tolist()  # type: ignore[assignment]
        if self.end in answer or (self.start is not None and self.start not in answer[:BEGINNING]):
            return logits
        return mx.where(mx.arange(logits.shape[-1]) == self.end, 0.0, -mx.inf)[None].astype(logits.dtype)


def thinking_budget(tokenizer: Tokenizer, prompt: str, first: int, tokens: int) -> ThinkingBudget:
    """The bound for the answers to a rendered prompt of ``first`` tokens.

    Raises:
        ApiError: 400: the model's marks are not single tokens.
    """
    marks = marks_of(tokenizer)
    if marks is not None:
        start, end = tokenizer.convert_tokens_to_ids([marks.starts[0], marks.end])
        if None not in (start, end) and tokenizer.unk_token_id not in (start, end):
            return ThinkingBudget(first, tokens, None if marks.opened_by(prompt) else start, end)
    raise ApiError("a budget of thinking cannot be kept: the model has no tokens that begin and end thinking")

"""A model's thinking: variables of the chat template, a bound of its length, and what a client keeps for later."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvant.server.errors import ApiError
from kvant.text.prompt import mentioned
from kvant.text.thinking import marks_of
from kvant.text.tokenizer import Tokenizer

SWITCH = "enable_thinking"  # of Qwen3's template, and of others after it
EFFORT = "reasoning_effort"  # of gpt-oss
EFFORTS = ("low", "medium", "high")
OPAQUE = "kvant:"  # begins a text that thinking is kept in
BEGINNING = 4  # tokens of an answer that the mark is among: blank ones may come before it


def switched(tokenizer: Tokenizer, on: bool, field: str) -> Mapping[str, Any]:
    """Variables that switch thinking on or off; none where the model cannot do otherwise."""
    if SWITCH in mentioned(tokenizer):
        return {SWITCH: on}
    if on is (marks_of(tokenizer) is not None):
        return {}
    problem = "the model does not think" if on else "the model's chat template cannot switch its thinking off"
    raise ApiError(f"{field} wants thinking {'on' if on else 'off'}; {problem}", param=field)


def with_effort(tokenizer: Tokenizer, effort: str, field: str) -> Mapping[str, Any]:
    """Variables for an effort of thinking; "none" switches it off."""
    if effort == "none":
        return switched(tokenizer, False, field)
    if EFFORT not in mentioned(tokenizer):
        raise ApiError(f"{field} is {effort!r}; the model's chat template knows no {EFFORT}", param=field)
    if effort not in EFFORTS:
        raise ApiError(f"{field} is {effort!r}; expected one of {', '.join(EFFORTS)}", param=field)
    return {EFFORT: effort}


def opaque(thinking: str) -> str:
    """Thinking for a client that keeps it without showing it. It is encoded, not encrypted."""
    return OPAQUE + base64.b64encode(thinking.encode()).decode()


def from_opaque(text: str, field: str) -> str:
    """The thinking in a text of :func:`opaque`."""
    try:
        if text.startswith(OPAQUE):
            return base64.b64decode(text.removeprefix(OPAQUE), validate=True).decode()
    except ValueError:  # no ASCII, no base64, or no UTF-8 in it
        pass
    raise ApiError(f"{field} is not from this server; leave the thinking out or send its text", param=field)


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
    """The bound for the answers to a rendered prompt of ``first`` tokens."""
    marks = marks_of(tokenizer)
    if marks is not None:
        start, end = tokenizer.convert_tokens_to_ids([marks.starts[0], marks.end])
        if None not in (start, end) and tokenizer.unk_token_id not in (start, end):
            return ThinkingBudget(first, tokens, None if marks.opened_by(prompt) else start, end)
    raise ApiError("a budget of thinking cannot be kept: the model has no tokens that begin and end thinking")

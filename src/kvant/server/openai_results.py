"""Parts of OpenAI's answers that its interfaces share: usage and log-probabilities."""

from collections.abc import Sequence
from typing import Any

from kvant.server.generation import Begun, End, Event, TokenLogprob


class Usage:
    """Tokens of a prompt and all its answers."""

    def __init__(self) -> None:
        self.prompt_tokens = self.cached_tokens = self.tokens = self.thinking_tokens = 0

    def take(self, event: Event) -> None:
        """Count an event."""
        if isinstance(event, Begun):
            self.prompt_tokens += event.prompt_tokens
            self.cached_tokens += event.cached_tokens
        elif isinstance(event, End):
            self.tokens += event.tokens
            self.thinking_tokens += event.thinking_tokens

    def shaped(self) -> dict[str, Any]:
        """In the shape of chat and completions."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": self.prompt_tokens + self.tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.thinking_tokens},
        }


def logprobs_content(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Log-probabilities as chat's ``logprobs.content``."""
    return [{**_token(each), "top_logprobs": [_token(other) for other in each.top]} for each in logprobs]


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes)}

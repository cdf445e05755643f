"""Log one line for each request on ``kvant.server.requests``, without any text of prompts or answers."""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus

from starlette.types import Scope

from kvant.errors import printable
from kvant.server.generation import Begun, End, Event, Text

logger = logging.getLogger("kvant.server.requests")
# Monitors and the page poll these; only their errors are logged.
POLLED = frozenset({"/live", "/health", "/metrics", "/page/{name}", "/control/models"})
MAX_NAME = 80  # columns of a path or of a model's name: clients choose them


class Usage:
    """The model and token counts of a request, for its line in the log."""

    def __init__(self) -> None:
        self.model = ""  # the name that the client used; empty if nothing was generated
        self._prompt_tokens = 0
        self._cached_tokens: int | None = None  # of the prompt; None: no answer has ended
        self._generated: dict[int, int] = {}  # tokens by answer

    def fed(self, prompt_tokens: int) -> None:
        """Count the tokens of texts to which there is no answer."""
        self._prompt_tokens += prompt_tokens

    async def count(self, events: AsyncGenerator[Event, None], answers: int) -> AsyncGenerator[Event, None]:
        """Yield a request's events and count its tokens. Each of its prompts has ``answers`` answers."""
        async with aclosing(events):
            async for event in events:
                match event:
                    case Begun():
                        self._prompt_tokens += event.prompt_tokens
                    case Text():
                        self._generated[event.answer] = event.tokens
                    case End():
                        self._generated[event.answer] = event.tokens
                        if event.answer % answers == 0:  # once for each prompt
                            self._cached_tokens = (self._cached_tokens or 0) + event.cached_tokens
                yield event

    def describe(self) -> str:
        """Return the model and the numbers of tokens, as ``pocket, 31 tokens in (0 cached), 20 out``."""
        cached = "" if self._cached_tokens is None else f" ({self._cached_tokens} cached)"
        counts = f"{self._prompt_tokens} tokens in{cached}, {sum(self._generated.values())} out"
        return f"{printable(self.model, MAX_NAME)}, {counts}"


def log_request(scope: Scope, status: int, seconds: float, usage: Usage) -> None:
    """Log a request that has ended. ``status`` 0: the client left before the response began."""
    route = getattr(scope.get("route"), "path", None)
    if route in POLLED and 0 < status < HTTPStatus.BAD_REQUEST:
        return
    path = printable(scope["path"], MAX_NAME) if route is None else route
    counted = f", {usage.describe()}" if usage.model else ""
    logger.info("%s %s %s%s, %.2f s", scope["method"], path, status or "no answer", counted, seconds)

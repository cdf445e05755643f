"""One request on a cache, for tests that want tokens without text."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvant.cache import KVCache
from kvant.engine.cache_scheduler import CacheScheduler
from kvant.engine.drafts import DraftCounts, Drafts
from kvant.engine.request import PREFILL_STEP_SIZE, FinishReason, Request
from kvant.models import LanguageModel


class Run:
    """One request on a cache. Iterating it generates.

    Attributes:
        scheduler: keeps the last token, or ends the run.
        generated: token ids that were handed out.
        from_draft: whether the last one was drafted.
        finish_reason: None while there may be more.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompt: Sequence[int],
        cache: Sequence[KVCache],
        *,
        max_tokens: int = -1,
        prefill_step_size: int = PREFILL_STEP_SIZE,
        drafts: Drafts | None = None,
        **options: Any,
    ) -> None:
        """Check everything; nothing is fed yet. The arguments are those of :class:`Request`."""
        self.scheduler = scheduler = CacheScheduler(model, cache, prefill_step_size=prefill_step_size)
        self.generated: list[int] = []
        self.from_draft = False
        self.finish_reason: FinishReason | None = None
        self._drafts = None if drafts is None else drafts.beside(scheduler.cache)
        ids = scheduler.ids + list(prompt) if prompt else ()
        request = Request(ids, max_tokens, drafts=self._drafts, keep_logprobs=True, **options)
        self._tokens = scheduler.answer([request])

    @property
    def drafts(self) -> DraftCounts | None:
        """What drafts did; None: there are none."""
        return None if self._drafts is None else self.scheduler.drafts

    def __iter__(self) -> "Run":
        return self

    def __next__(self) -> tuple[int, mx.array]:
        """The next token and its log-probabilities (vocab,)."""
        for token in self._tokens:
            self.finish_reason, self.from_draft = token.finish_reason, token.from_draft
            if token.token is not None and token.logprobs is not None:
                self.generated.append(token.token)
                return token.token, token.logprobs
        raise StopIteration

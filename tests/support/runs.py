"""One request on a cache, for tests that want tokens without text."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from kvant.cache import KVCache
from kvant.engine.cache_scheduler import CacheScheduler
from kvant.engine.drafts import DraftCounts, Drafts
from kvant.engine.model_drafts import ModelDrafts
from kvant.engine.request import FinishReason, Request
from kvant.models import LanguageModel


class Run:
    """One request behind what a cache holds. Iterating it gives tokens, each with its log-probabilities
    (vocab,).
    """

    def __init__(
        self,
        model: LanguageModel,
        prompt: Sequence[int],
        cache: Sequence[KVCache],
        *,
        max_tokens: int = -1,
        prefill_step_size: int = 512,
        drafts: Drafts | ModelDrafts | None = None,
        **options: Any,
    ) -> None:
        """Check everything; nothing is fed yet. The arguments are those of a Request."""
        self.scheduler = CacheScheduler(model, cache, prefill_step_size=prefill_step_size)
        self.generated: list[int] = []  # that were handed out
        self.from_draft = False  # whether the last one was drafted
        self.finish_reason: FinishReason | None = None
        self._drafts = None if drafts is None else drafts.for_pool(self.scheduler.cache.pool)
        ids = self.scheduler.ids + list(prompt) if prompt else ()
        request = Request(ids, max_tokens, drafts=self._drafts, keep_logprobs=True, **options)
        self._tokens = self.scheduler.answer([request])

    @property
    def drafts(self) -> DraftCounts | None:
        return None if self._drafts is None else self.scheduler.drafts

    def __iter__(self) -> "Run":
        return self

    def __next__(self) -> tuple[int, mx.array]:
        for token in self._tokens:
            self.finish_reason, self.from_draft = token.finish_reason, token.from_draft
            if token.token is not None and token.logprobs is not None:
                self.generated.append(token.token)
                return token.token, token.logprobs
        raise StopIteration

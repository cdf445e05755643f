"""A scheduler of one request at a time on the cache of a conversation."""

from collections import deque
from collections.abc import Sequence

from kvant.cache import KVCache
from kvant.engine.request import PREFILL_STEP_SIZE, Request, Token, check_count
from kvant.engine.request_state import PromptState
from kvant.engine.scheduler import Scheduler
from kvant.engine.step import feed_tokens
from kvant.models import LanguageModel
from kvant.models.language_model import context_limit


class CacheScheduler(Scheduler):
    """Answers requests one after another through a cache, which keeps their tokens.

    A prompt is the whole text: the prefix that is in the cache is not fed again. Whenever the caller has
    control, the cache has the prompt and all returned tokens except the last; after a step that verified
    drafts, also the accepted tokens that are returned next, until the request ends. An error before the first
    token restores the cache, or empties it if a window or a state cannot go back.

    A cache serves one request at a time: once something else used it, a step raises a RuntimeError.
    """

    def __init__(
        self, model: LanguageModel, cache: Sequence[KVCache], *, prefill_step_size: int = PREFILL_STEP_SIZE
    ) -> None:
        check_count("prefill_step_size", prefill_step_size)
        self.cache = model.check_cache(cache)
        self.sequence = self.cache.sequence
        super().__init__(model, self.cache.pool, max_batch=1, prefill_step_size=prefill_step_size)
        self._pending: deque[Token] = deque()  # of the last step
        self._last: int | None = None  # the last returned token
        # The sequence's step and lengths at the last look.
        self._state: tuple[object | None, int, int] = (None, 0, 0)

    @property
    def ids(self) -> list[int]:
        """Return the ids of the cache's tokens, without those not returned yet."""
        return self.sequence.ids[: self._handed_out]

    @property
    def _handed_out(self) -> int:
        """Return the number of the cache's tokens, without those not returned yet."""
        return self.sequence.length - self.sequence.lookahead

    def submit(self, request: Request | PromptState) -> None:
        with self._pool.lock:
            super().submit(request)
            self.sequence.go_back(self._handed_out)  # a suspended request cannot continue
            self._last = None
            self._note_state()

    @property
    def idle(self) -> bool:
        return not self._pending and super().idle

    def step(self) -> list[Token]:
        """Return the next token, if there is one yet."""
        sequence = self.sequence
        with self._pool.lock:
            if not self._owns_cache:
                self._end_all()
                raise RuntimeError(
                    "the prompt cache changed while this generation was paused; start a new one"
                )
            handed_out = self._handed_out
            try:
                if not self._pending:
                    self._pending.extend(super().step())
                tokens = [self._pending.popleft()] if self._pending else []
                if tokens and tokens[0].token is not None:
                    self._last = tokens[0].token
                    handed_out = sequence.length - len(self._pending)  # an error comes after a token
                sequence.lookahead = max(0, sequence.length - handed_out)
                self._note_state(go_back=bool(tokens) and tokens[0].token is None)
            except BaseException:
                self._end_all()
                sequence.lookahead = max(0, sequence.length - handed_out)
                self._note_state(go_back=True)
                raise
            return tokens

    def cancel(self, request: Request, answer: int | None = None) -> None:
        super().cancel(request, answer)
        if self._pending and self._pending[-1].finish_reason is not None:  # its end was not handed out yet
            self._tokens.append(Token(request, 0, None, finish_reason="cancelled"))
        self._drop()

    def close(self, error: BaseException | None = None) -> None:
        self._end_all(error)
        self._drop()

    def keep_last(self) -> None:
        """Commit the last token of an ended request, if there is room, as mlx-lm's cache does."""
        batch = self.cache.batch
        with self._pool.lock:
            limit = context_limit(self._model, self.cache.max_seq_len)
            is_full = limit is not None and self.sequence.length >= limit
            if self._last is None or is_full or not self._owns_cache:
                return
            if self.sequence.step is None:
                feed_tokens(self._model, batch, [[self._last]])
            else:
                batch.commit(1, ids=[[self._last]])
            self._last = None
            self._note_state()

    def _end_all(self, error: BaseException | None = None) -> None:
        super().close(error)
        self._tokens.clear()
        self._pending.clear()

    def _drop(self) -> None:
        """Forget tokens that were computed and not returned."""
        self._pending.clear()
        with self._pool.lock:
            if self._owns_cache:
                self._note_state(go_back=True)

    @property
    def _owns_cache(self) -> bool:
        """Return whether nothing else used the cache since the last look."""
        return self._state[0] is self.sequence.step and self._state[1:] == (
            self.sequence.length,
            self.sequence.lookahead,
        )

    def _note_state(self, *, go_back: bool = False) -> None:
        """Note the sequence's state; ``go_back``: first drop tokens that were not returned."""
        if go_back and self.sequence.lookahead:
            self.sequence.go_back(self._handed_out)
        self._state = (self.sequence.step, self.sequence.length, self.sequence.lookahead)

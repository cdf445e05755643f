"""A scheduler of one request at a time, on the cache of a conversation."""

from collections import deque
from collections.abc import Sequence

import mlx.core as mx

from kvant.cache import KVCache
from kvant.engine.request import PREFILL_STEP_SIZE, Request, Token, check_count
from kvant.engine.scheduler import Scheduler
from kvant.engine.work import Work
from kvant.models import LanguageModel
from kvant.models.language_model import context_limit


class CacheScheduler(Scheduler):
    """Answers requests one after another through a cache, which keeps what they leave.

    A prompt is the whole text: what the cache has of its beginning is not fed again. Whenever the caller has
    control, the cache holds the prompt and every token handed out but the last; of a step that verified
    drafts those too that are handed out next, until the request ends. After an error before the first token
    it holds what it held. A cache that cannot go back, because a window or a state has moved on, is emptied
    instead.

    A cache serves one request at a time: once it was used otherwise, a step is a RuntimeError.
    """

    def __init__(
        self, model: LanguageModel, cache: Sequence[KVCache], *, prefill_step_size: int = PREFILL_STEP_SIZE
    ) -> None:
        check_count("prefill_step_size", prefill_step_size)
        self.cache = model.check_cache(cache)
        self.cache.prefill_step_size = prefill_step_size
        super().__init__(model, self.cache, max_batch=1)
        self._later: deque[Token] = deque()  # of the last step
        self._last: int | None = None  # handed out last
        # the cache's step and lengths at the last look
        self._found: tuple[mx.array | None, int, int] = None, 0, 0

    @property
    def ids(self) -> list[int]:
        """Ids of the tokens that the cache holds."""
        return self.cache.ids[0][: self._kept]

    @property
    def _kept(self) -> int:
        """Tokens that the cache holds for what was handed out."""
        return self.cache.offset - self.cache.ahead

    def submit(self, request: Request | Work) -> None:
        with self.cache.turn:
            super().submit(request)
            self.cache.go_back(self._kept)  # what was left suspended here does not go on
            self._last = None
            self._look()

    @property
    def idle(self) -> bool:
        return not self._later and super().idle

    def step(self) -> list[Token]:
        """Give the next token, if there is one yet."""
        cache = self.cache
        with cache.turn:
            if not self._is_mine:
                self._end_all()
                raise RuntimeError("the run was ended: another run, a call or a trim changed its cache")
            kept = self._kept
            try:
                if not self._later:
                    self._later.extend(super().step())
                tokens = [self._later.popleft()] if self._later else []
                if tokens and tokens[0].token is not None:
                    # an error is behind a token
                    self._last, kept = tokens[0].token, cache.offset - len(self._later)
                cache.ahead = max(0, cache.offset - kept)
                self._look(go_back=bool(tokens) and tokens[0].token is None)
            except BaseException:
                self._end_all()
                cache.ahead = max(0, cache.offset - kept)
                self._look(go_back=True)
                raise
            return tokens

    def cancel(self, request: Request, answer: int | None = None) -> None:
        super().cancel(request, answer)
        if self._later and self._later[-1].finish_reason is not None:  # it has ended, which was not said yet
            self._ready.append(Token(request, 0, None, finish_reason="cancelled"))
        self._drop()

    def close(self, error: BaseException | None = None) -> None:
        self._end_all(error)
        self._drop()

    def keep_last(self) -> None:
        """Count the last token of a request that has ended, if there is room, as mlx-lm's cache does."""
        cache = self.cache
        with cache.turn:
            limit = context_limit(self._model, cache.max_seq_len)
            if self._last is None or (limit is not None and cache.offset >= limit) or not self._is_mine:
                return
            if cache.step is None:
                self._decoder.feed(cache, [[self._last]])
            else:
                cache.commit(1, ids=[[self._last]])
            self._last = None
            self._look()

    def _end_all(self, error: BaseException | None = None) -> None:
        super().close(error)
        self._ready.clear()
        self._later.clear()

    def _drop(self) -> None:
        """Forget what was computed and not handed out."""
        self._later.clear()
        with self.cache.turn:
            if self._is_mine:
                self._look(go_back=True)

    @property
    def _is_mine(self) -> bool:
        """Whether nobody else used the cache since the last look."""
        return self._found[0] is self.cache.step and self._found[1:] == (self.cache.offset, self.cache.ahead)

    def _look(self, *, go_back: bool = False) -> None:
        """Note how the cache is; ``go_back``: once it holds what was handed out alone."""
        cache = self.cache
        if go_back and cache.ahead:
            cache.go_back(self._kept)
        self._found = cache.step, cache.offset, cache.ahead

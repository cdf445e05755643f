"""Drafts from a smaller model: it continues the text in a cache of its own."""

from collections import deque
from collections.abc import Iterable, Sequence

import mlx.core as mx

from kvant.cache import ModelCache
from kvant.engine.draw import greedy
from kvant.engine.kernel_failure import kernel_failures
from kvant.engine.limits import go_back
from kvant.engine.run import PREFILL_STEP_SIZE, prefill
from kvant.engine.step import CompiledStep, should_compile
from kvant.models import LanguageModel


class Followed:
    """A sequence that a model drafts for, and what of it the model has been fed.

    Attributes:
        ended: why nothing can be drafted any more; None: it can.
    """

    is_free = False
    match = 0

    def __init__(self, model: LanguageModel, ahead: Iterable[int] = ()) -> None:
        """``ahead``: tokens that the model's cache holds already; used as far as the sequence begins with them."""
        self.name = f"model {id(model) if model.identity is None else model.identity.model}"
        self.ended: str | None = None
        self._model = model
        self._tokens: list[int] = []
        self._held = 0  # of these, the first that the cache has
        self._ahead = deque(ahead)  # what it has behind them, while that is what came

    def extend(self, tokens: Sequence[int]) -> None:
        """Take tokens that are sure."""
        for token in tokens:
            if token >= self._model.config.vocab_size:
                self.ended = f"token {token} is not in the draft model's vocabulary"
            if self._held == len(self._tokens) and self._ahead and self._ahead[0] == token:
                self._ahead.popleft()
                self._held += 1
            else:
                self._ahead.clear()
            self._tokens.append(token)


class ModelDrafter(Followed):
    """Drafts of one sequence by a model, greedily; see :class:`kvant.engine.drafting.drafter.Drafter`.

    Nothing is computed before a draft is asked for. Then the model is fed what it has not seen: the prompt in chunks,
    later the tokens since. What was drafted and is not in the text is taken back from its cache.
    """

    def __init__(
        self, model: LanguageModel, cache: ModelCache, vocab_size: int, prefill_step_size: int = PREFILL_STEP_SIZE
    ) -> None:
        """For a sequence.

        Args:
            model: drafts.
            cache: the model's, of one sequence. What it holds is used as far as the sequence begins with it.
            vocab_size: of the model that is drafted for. No id is proposed that it does not have.
            prefill_step_size: prompt tokens fed at a time.
        """
        super().__init__(model, cache.ids[0])
        self._cache, self._vocab_size = cache, vocab_size
        self._step_size = prefill_step_size
        self._compiled: CompiledStep | None = None
        self._decided = False  # whether there is one

    def propose(self, count: int) -> list[int]:
        """At most ``count`` tokens that may follow; none once :attr:`ended`."""
        reserved = self._cache.max_seq_len
        assert reserved is not None
        if self.ended is None and len(self._tokens) > reserved:
            self.ended = f"the draft model's context, {reserved} tokens, is full"
        count = min(count, reserved - len(self._tokens) + 1)  # the last one drafted is not fed
        if self.ended is not None or count < 1:
            return []
        with self._cache.turn, kernel_failures(self._cache):
            return self._draft(count)

    def _draft(self, count: int) -> list[int]:
        cache = self._cache
        self._ahead.clear()
        cache.end_step()
        self._held = min(self._held, len(self._tokens) - 1)  # one has to be fed for there to be logits
        if not go_back(cache, self._held):
            self._held = 0
        token = self._catch_up()
        drafted: list[int] = []
        while (token_id := int(token.item())) < self._vocab_size:  # type: ignore[arg-type]
            drafted.append(token_id)
            if len(drafted) == count:
                break
            # Read before it is fed: a queued append to a buffer that is still read would copy it on a CPU.
            token = self._feed(token)
            mx.async_eval(token)
            cache.commit(ids=[[token_id]])
        self._ahead.extend(drafted[: cache.offset - len(self._tokens)])
        return drafted

    def _catch_up(self) -> mx.array:
        """Feed the tokens that the cache does not have. Returns the token (1,) that may follow."""
        rest = self._tokens[self._held :]
        if len(rest) == 1:
            token = self._feed(mx.array(rest, mx.uint32))
            mx.async_eval(token)
            self._cache.commit(ids=[rest])
        else:
            logits = prefill(self._model, rest, self._cache, step_size=self._step_size)
            token = mx.argmax(logits, axis=-1)
        self._held = len(self._tokens)
        return token

    def _feed(self, token: mx.array) -> mx.array:
        """Begin the step of a token (1,). Returns the one that may follow, not evaluated."""
        if not self._decided and should_compile() and self._model.can_compile(self._cache):
            self._compiled = CompiledStep(self._model, self._cache, greedy, processed=False)
        self._decided = True
        if self._compiled is not None:
            return self._compiled(token)[0]
        return mx.argmax(self._model.next_logits(token[None], self._cache), axis=-1)

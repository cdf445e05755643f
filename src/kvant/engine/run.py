"""One request on a cache: its prompt is fed in chunks, then token by token what was sampled."""

from collections.abc import Callable, Collection, Sequence
from typing import Literal, TypeVar

import mlx.core as mx

from kvant.cache import KVCache, ModelCache
from kvant.engine.constraint import for_answer
from kvant.engine.drafting.choice import DraftCounts
from kvant.engine.draw import Sampler, for_a_run, greedy
from kvant.engine.kernel_failure import kernel_failures
from kvant.engine.limits import check_count, go_back, room_after
from kvant.engine.processors import LogitsProcessor
from kvant.engine.row_sampling import Row, check_options, no_token, sample_rows
from kvant.engine.step import CompiledStep, can_compile
from kvant.errors import PromptError
from kvant.models import LanguageModel
from kvant.threads import check_process

T = TypeVar("T")
FinishReason = Literal["stop", "length", "context"]
PromptProgress = Callable[[int, int], None]
PREFILL_STEP_SIZE = 512


class Run:
    """What is known of one request, from its prompt to its last token. Iterating it generates.

    The step after a token is queued before the token is handed out, and committed when the next one is asked for.
    Whenever the caller has control, the cache holds what it held, the prompt, and every token handed out but the last;
    after an error too. An error before the first token leaves the cache as it was. A cache that cannot go back to what
    it was, because a window or a state has moved on, is emptied instead.

    A cache serves one run at a time: once it was used otherwise, this run raises a RuntimeError.

    Attributes:
        prompt: token ids that are fed.
        logits: (1, vocab) after the prompt; None until it was fed.
        generated: token ids that were handed out.
        from_draft, drafts: whether the last token was drafted, and what drafts did; without any False and None.
        finish_reason: None while there may be more; "stop": the last token is one of ``stop_tokens``, or :meth:`stop`
            was called; "length": ``max_tokens``; "context": the cache, or the model's context, is full.
    """

    _most_tokens = 1  # of a step

    def __init__(
        self,
        model: LanguageModel,
        prompt: Sequence[int],
        cache: Sequence[KVCache],
        *,
        max_tokens: int = -1,
        sampler: Sampler | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        stop_tokens: Collection[int] = (),
        prefill_step_size: int = PREFILL_STEP_SIZE,
        progress: PromptProgress | None = None,
        compiled: bool | None = None,
        logits: mx.array | None = None,
        begun: Sequence[int] = (),
    ) -> None:
        """Check everything; nothing is fed yet.

        Args:
            model: computes the logits.
            prompt: token ids, at least one.
            cache: appended to.
            max_tokens: generate at most this many; -1: until the context is full.
            sampler: (1, vocab) log-probabilities -> (1,); default: greedy. A seeded one draws with the key of the
                token's position.
            logits_processors: mlx-lm's, called with all tokens of the cache, the prompt and the answer, and the logits.
            stop_tokens: token ids that end the run.
            prefill_step_size: prompt tokens a chunk; it bounds the memory of activations.
            progress: called with (prompt tokens fed, prompt tokens in all), first with 0.
            compiled: whether the step is a compiled function; default: where that is faster and the cache allows it.
            logits: (1, vocab) after the last token that the cache holds; the prompt is empty then.
            begun: the first tokens of the answer, where the prompt ends with them.
        """
        check_count("max_tokens", max_tokens, or_minus_one=True)
        check_count("prefill_step_size", prefill_step_size)
        if not len(prompt) and logits is None:
            raise PromptError("the prompt is empty; expected at least one token")
        self.prompt = list(prompt)
        self.logits = logits
        self.generated: list[int] = []
        self.from_draft = False
        self.drafts: DraftCounts | None = None
        self.finish_reason: FinishReason | None = None
        self._model = model
        self._cache = cache = model.check_cache(cache)
        self._sampler = for_a_run(sampler or greedy)
        self._processors = for_answer(logits_processors, model.config.vocab_size, stop_tokens, begun)
        check_options(self._sampler, self._processors, model.config.vocab_size)
        self._stop_tokens = stop_tokens
        self._step_size = prefill_step_size
        self._progress = progress
        self._compiled = compiled
        self._step_function: CompiledStep | None = None
        self._decided = False  # whether there is one
        with cache.turn:
            can_compile(model, cache, compiled)
            room = room_after(model, cache, len(self.prompt))
            cache.end_step()  # a run that was left suspended here does not go on
            self._lengths = cache.lengths
        # One more than there is room for: the last one is sampled and not fed.
        self._limit = room + 1 if max_tokens == -1 else min(room + 1, max_tokens)
        self._full: FinishReason = "length" if self._limit == max_tokens else "context"
        self._tokens: mx.array | None = None  # all so far, for the processors
        self._next: tuple[mx.array, mx.array] | None = None  # the next token (1,) and its log-probabilities (vocab,)
        self._fed: mx.array | None = None  # the step it comes from
        self._failed = False

    def __iter__(self) -> "Run":
        return self

    def __next__(self) -> tuple[int, mx.array]:
        """The next token and its log-probabilities (vocab,)."""
        if self.finish_reason or self._failed:
            raise StopIteration
        return self._consistently(self._next_token)

    def read_prompt(self) -> mx.array:
        """Feed the prompt now, where it was not fed yet. Returns :attr:`logits`; errors as in the iteration."""
        return self._consistently(self._read_prompt)

    def _consistently(self, work: Callable[[], T]) -> T:
        """Do the work, if nobody else used the cache since; after an error the cache is as it was before."""
        check_process()
        cache = self._cache
        with cache.turn:
            held = cache.lengths
            self._failed = True  # until it is known that it did not
            if cache.step is not self._fed if self.generated else held != self._lengths:
                raise RuntimeError("the run was ended: another run, a call or a trim changed its cache")
            try:
                result = work()
                self._lengths = cache.lengths
                self._failed = False
            except BaseException as error:
                go_back(cache, held[0])
                if isinstance(error, StopIteration):  # it would end the answer without a word, as PEP 479 says
                    raise RuntimeError("a sampler, logits processor or progress raised StopIteration") from error
                raise
        return result

    def _next_token(self) -> tuple[int, mx.array]:
        self._settle_last()
        token, logprobs = self._take_next()
        self.generated.append(token)
        if token in self._stop_tokens:
            self.stop()
        elif len(self.generated) == self._limit:
            self.finish_reason = self._full
        return token, logprobs

    def stop(self) -> None:
        """End the run after the token that was handed out last."""
        self.finish_reason = "stop"
        self._next = None

    def keep_last(self) -> None:
        """Count the last token of a run that has ended, where there is room, as mlx-lm's cache does."""
        with (cache := self._cache).turn:
            if not self.finish_reason or cache.lengths != self._lengths or not room_after(self._model, cache, 0):
                return
            if self._fed is None or cache.step is not self._fed:
                with kernel_failures(cache):
                    mx.eval(self._model.feed(mx.array([self.generated[-1:]]), cache))
            cache.commit(1, ids=[self.generated[-1:]])

    def _settle_last(self) -> None:
        """Have the first token computed, or commit the one that was handed out last."""
        model, cache = self._model, self._cache
        if self._next is None and not self.generated:
            logits = self._read_prompt()
            if self._processors:
                ids = cache.ids[0]
                known = model.config.vocab_size - 1
                if max(ids) > known:  # of a file; processors read logits at these places
                    raise ValueError(f"the cache holds token {max(ids)}; the model knows 0 to {known}")
                self._tokens = mx.array(ids)
            self._next = self._sample(logits, cache.offset)
            self._queue(self._next)
        elif cache.step is not None:  # else it was committed, and what followed is repeated
            cache.commit(1, ids=[self.generated[-1:]])

    def _take_next(self) -> tuple[int, mx.array]:
        """The token that is computed, and its log-probabilities; the step that feeds it is queued."""
        assert self._next is not None
        token, logprobs = self._next
        following = None
        if len(self.generated) + 1 < self._limit:
            following = self._feed(token)
        token_id = self._read(token, logprobs)
        if following is not None:
            # Not before: while the cache is read MLX would copy its buffers (19 ms a step instead of 0.2, CPU).
            # The log-probabilities go with the token: kept lazily they would hold the cache's buffers.
            self._queue(following)
        self._next, self._fed = following, self._cache.step
        return token_id, logprobs

    def _read(self, token: mx.array, logprobs: mx.array) -> int:
        """Wait for a token (1,) of log-probabilities (vocab,); an error if the model has none such, or drew none."""
        with kernel_failures(self._cache):
            token_id = int(token.item())  # type: ignore[arg-type]
        vocab_size = self._model.config.vocab_size
        if not 0 <= token_id < vocab_size:  # as an index it would be read out of bounds
            raise ValueError(f"the sampler picked token {token_id}; the model knows 0 to {vocab_size - 1}")
        logprob: float = memoryview(logprobs)[token_id]  # type: ignore[arg-type]
        if error := no_token(self._sampler, self._processors, logprob):
            raise error
        return token_id

    def _read_prompt(self) -> mx.array:
        if self.logits is None:
            with kernel_failures(self._cache):
                self.logits = prefill(
                    self._model, self.prompt, self._cache, step_size=self._step_size, progress=self._progress
                )
        return self.logits

    def _feed(self, token: mx.array) -> tuple[mx.array, mx.array]:
        """Begin the step of a token (1,). Returns the token that follows and its log-probabilities, not evaluated."""
        if self._tokens is not None:
            self._tokens = mx.concatenate([self._tokens, token])
        step = self._compiled_step()
        with kernel_failures(self._cache):
            result = (self._model.next_logits(token[None], self._cache),) if step is None else step(token)
        return result if len(result) == 2 else self._sample(result[0], self._cache.offset + 1)

    def _queue(self, arrays: Sequence[mx.array]) -> None:
        """Have them computed while Python goes on."""
        with kernel_failures(self._cache):
            mx.async_eval(*arrays)

    def _compiled_step(self) -> CompiledStep | None:
        """What steps are compiled as; None: they are not."""
        if not self._decided and can_compile(self._model, self._cache, self._compiled):
            processed, most = bool(self._processors), self._most_tokens
            self._step_function = CompiledStep(
                self._model, self._cache, self._sampler, processed=processed, most_tokens=most
            )
        self._decided = True
        return self._step_function

    def _sample(self, logits: mx.array, position: int) -> tuple[mx.array, mx.array]:
        """The next token (1,) of logits (1, vocab), and its log-probabilities (vocab,)."""
        tokens = () if self._tokens is None else self._tokens
        token, logprobs = sample_rows(logits, [Row(self._sampler, self._processors, position, tokens)])
        return token, logprobs.squeeze(0)


def prefill(
    model: LanguageModel,
    prompt: Sequence[int],
    cache: Sequence[KVCache],
    *,
    step_size: int = PREFILL_STEP_SIZE,
    progress: PromptProgress | None = None,
) -> mx.array:
    """Feed every token of the prompt, in chunks of ``step_size``; arguments as those of :class:`Run`.

    Returns:
        (1, vocab) logits of the last token, evaluated.
    """
    cache = ModelCache.of(cache)
    total, fed = len(prompt), 0
    tell = progress or (lambda fed, total: None)
    tell(0, total)
    chunks = [list(prompt[first : first + step_size]) for first in range(0, total, step_size)]
    if model.last_token_alone and len(chunks[-1]) > 1:
        chunks[-1:] = [chunks[-1][:-1], chunks[-1][-1:]]
    # A chunk is evaluated so that its activations are freed before the next one's are made, and progress is true.
    for chunk in chunks[:-1]:
        mx.eval(model.feed(mx.array([chunk]), cache))
        cache.commit(ids=[chunk])
        mx.clear_cache()
        fed += len(chunk)
        tell(fed, total)
    logits = model.next_logits(mx.array([chunks[-1]]), cache)
    mx.eval(logits)
    cache.commit(ids=[chunks[-1]])
    tell(total, total)
    return logits

"""Continuous batching: prompts are fed in order, and every running answer gets a token per step."""

import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx

from kvant.cache import ModelCache
from kvant.cache.pool import Pool, PoolSequence
from kvant.engine.drafts import DraftCounts
from kvant.engine.embedding import EmbeddingRequest, EmbeddingState
from kvant.engine.kernel_failures import kernel_failures
from kvant.engine.model_drafts import ModelDrafts, check_drafts
from kvant.engine.request import CHUNK, FinishReason, Request, Token, check_count
from kvant.engine.request_state import Answer, PromptState, RequestState
from kvant.engine.row_sampling import SampledToken
from kvant.engine.sequential_sampling import sample_each
from kvant.engine.speculation import Speculation
from kvant.engine.step import Step, begin_lookahead, begin_step, feed_tokens
from kvant.errors import ArgumentError, ContextError, QueueFullError
from kvant.models import LanguageModel
from kvant.threads import check_process

BURST = 2  # long prompt chunks fed before new answers continue, if no answer was running


class Counts(NamedTuple):
    """A scheduler's work."""

    waiting: int  # requests without reserved pages
    prefilling: int  # answers whose prompt is being fed
    running: int  # answers that get a token every step
    free_pages: int  # available to requests


class Scheduler:
    """Serves the requests of one model and one pool. It has no thread: :meth:`step` computes.

    Requests are admitted one at a time in order of arrival, as soon as the previous prompt was fed, the pages
    are free and the batch has room. None overtakes another, so none starves. All pages of a request are
    reserved on admission, so nothing is preempted and nothing runs out.

    In a step every running answer gets one token, or several if it drafts. Answers that end or are cancelled
    leave at once and free their pages. Then one chunk of the admitted prompt is fed, followed by whole short
    prompts: at most 128 tokens together, or ``prefill_step_size`` if nothing was running, twice before the
    new answers continue. The last chunk of a prompt gives its answers their first tokens. Whole pages of
    prompts and answers are shared with later requests of the same salt.

    If deterministic, a request's tokens, and its logits on a CPU, do not depend on other requests: every step
    has ``max_batch`` rows, chunks end at multiples of 128, and only pages computed in such chunks are shared.
    """

    def __init__(
        self,
        model: LanguageModel,
        pool: Pool,
        *,
        max_batch: int,
        max_queue: int | None = None,
        deterministic: bool = False,
        prefill_step_size: int | None = None,
    ) -> None:
        """Make it for a model and a pool that nothing else uses.

        Args:
            max_batch: maximum number of running answers.
            max_queue: maximum number of waiting requests; None: no limit.
            prefill_step_size: maximum number of prompt tokens fed at once; None: the pool's.
        """
        check_count("max_batch", max_batch)
        if max_batch > pool.max_sequences:
            raise ValueError(f"max_batch is {max_batch}; the pool is for {pool.max_sequences} sequences")
        if max_queue is not None:
            check_count("max_queue", max_queue)
        if deterministic and pool.prefill_step_size < CHUNK:
            raise ValueError(
                f"deterministic feeds {CHUNK} tokens at once; the pool takes {pool.prefill_step_size}"
            )
        if deterministic and not pool.attends_separately:
            raise ValueError(
                f"deterministic is not possible with {model.config.model_type}: it reads the padded tokens "
                f"of all sequences at once, so that rounding depends on their lengths"
            )
        self._model = model
        self._pool = pool
        self._prefill_step_size = min(prefill_step_size or pool.prefill_step_size, pool.prefill_step_size)
        self._max_batch = max_batch
        self._max_queue = max_queue
        self._deterministic = deterministic
        self._rows = max_batch if deterministic else None  # of every step; None: as many as answers
        self._speculation = Speculation(model, pool)
        self._states: dict[Request, PromptState] = {}  # of all requests that have not ended
        self._waiting: deque[PromptState] = deque()
        # the number of free pages when the first waiting request did not fit
        self._free_when_full: int | None = None
        self._prefilling: PromptState | None = None  # its prompt is being fed
        self._running: list[Answer] = []  # those that call the caller's functions come last
        self._burst = 0  # prompt tokens to feed before running answers continue
        self._lookahead: Step | None = None  # the next step, if it could already begin
        self._tokens: list[Token] = []  # to be returned
        self.steps = 0  # number of decoding steps
        self.feeding_s = 0.0  # seconds spent on prompts
        self.decoding_s = 0.0  # seconds spent on decoding steps

    @property
    def idle(self) -> bool:
        """Return whether a step would do nothing."""
        return not (self._states or self._tokens)

    @property
    def num_waiting(self) -> int:
        """Return the number of requests without reserved pages, in any thread."""
        return len(self._waiting)

    @property
    def counts(self) -> Counts:
        """Return the work to do. Another thread must not ask during a step."""
        fed = () if self._prefilling is None else self._prefilling.open
        return Counts(len(self._waiting), len(fed), len(self._running), self._pool.num_free)

    @property
    def drafts(self) -> DraftCounts:
        """Return the drafts' counts, summed over all answers. Another thread must not ask."""
        return replace(self._speculation.counts)

    @property
    def reserved_answers(self) -> list[tuple[Request, int, PoolSequence]]:
        """Return (request, number, sequence) of answers with reserved pages. Another thread must not ask."""
        answers = [(answer.state.request, answer.number, answer.sequence) for answer in self._running]
        if (state := self._prefilling) is not None:
            answers += [(state.request, number, each) for number, each in enumerate(state.sequences)]
        return answers

    def check(self, request: Request) -> PromptState:
        """Check whether the pool can serve a request, in any thread."""
        if isinstance(request, EmbeddingRequest):
            return EmbeddingState(request, self._model, self._pool, is_exact=self._deterministic)
        check_drafts(request.drafts, self._pool, deterministic=self._deterministic)
        if isinstance(request.drafts, ModelDrafts):
            raise ArgumentError("draft_model", "is not for this pool; expected the result of its for_pool")
        return RequestState(request, self._model, self._pool, self._max_batch, is_exact=self._deterministic)

    def submit(self, request: Request | PromptState) -> None:
        """Queue a request."""
        state = self.check(request) if isinstance(request, Request) else request
        if state.request in self._states:
            raise ValueError("the request was submitted before and has not ended; expected another one")
        if self._max_queue is not None and (waiting := len(self._waiting)) >= self._max_queue:
            raise QueueFullError(
                f"the queue is full: {waiting} requests wait, and {len(self._running)} answers run; try "
                f"again later"
            )
        self._states[state.request] = state
        self._waiting.append(state)

    def cancel(self, request: Request, answer: int | None = None) -> None:
        """End the request's answers, or one of them, and free the pages; the next step reports it.

        Ended answers are ignored. Another thread must not call it during a step.
        """
        if (state := self._states.get(request)) is not None:
            self._end(state, "cancelled", state.open if answer is None else state.open & {answer})

    def close(self, error: BaseException | None = None) -> None:
        """End all requests: cancel them, or fail them with ``error``."""
        self._lookahead = None
        for state in list(self._states.values()):
            self._end(state, "cancelled" if error is None else "error", state.open, error)

    def step(self) -> list[Token]:
        """Compute one step and return the new tokens.

        Errors of a request or the model end the requests they belong to. An interruption ends all requests
        and releases every sequence; in the middle of the pool's bookkeeping it may leak a page.
        """
        check_process()
        try:
            # In this order an answer's first two tokens come from two steps, each as soon as it is ready.
            started = time.perf_counter()
            if not self._running:
                self._burst = BURST * max(CHUNK, self._prefill_step_size)
            elif self._prefilling is None:
                self._burst = 0
            if not (self._running and self._burst):
                self._decode()
            decoded = time.perf_counter()
            if self._prefilling is not None or self._waiting:
                self._feed_prompts()
            self.decoding_s += decoded - started
            self.feeding_s += time.perf_counter() - decoded
        except BaseException as error:
            self.close(error)
            raise
        tokens = self._tokens
        self._tokens = []
        return tokens

    def answer(self, requests: Sequence[Request]) -> Iterator[Token]:
        """Submit requests now, and return an iterator over their tokens, which raises a request's error."""
        for request in requests:
            self.submit(request)
        return self._rest()

    def _rest(self) -> Iterator[Token]:
        while not self.idle:
            for token in self.step():
                if token.error is not None:
                    raise token.error
                yield token

    def _decode(self) -> None:
        """Give every running answer its next token.

        Unless something has to see a token before the next one is sampled, the next step is built while this
        one is computed. It is queued after this one's tokens were read; before, the pool's arrays are in use,
        and MLX would copy them.
        """
        if not self._running:
            self._lookahead = None
            return
        answers = list(self._running) if self._lookahead is None else self._lookahead.answers
        try:
            with kernel_failures(self._pool):
                step = self._begin_step()
                step.start()
                following = self._begin_lookahead(step)
                step.wait()
                if following is not None and following.sampled is not None:
                    mx.async_eval(following.sampled.arrays)
                self._speculation.finish(step, following)
        except Exception as error:
            for answer in answers:
                self._end(answer.state, "error", answer.state.open, error)
            return
        self.steps += 1
        self._lookahead = following
        for answer, token, is_drafted in step.tokens():
            self._take(answer, token, from_draft=is_drafted)
        if not self._running:
            self._lookahead = None

    def _begin_step(self) -> Step:
        """Return the lookahead, or begin a step: one that verifies drafts if they pay."""
        step = self._lookahead
        self._lookahead = None
        self._speculation.update(self._running)
        if step is None:
            step = self._speculation.begin(self._running)
        if step is None:
            step = begin_step(self._model, self._pool, self._running, rows=self._rows)
        return step

    def _begin_lookahead(self, step: Step) -> Step | None:
        """Begin the step after the current one, if possible.

        The answers of a prompt being fed belong in the next step, and drafts need the current tokens. A step
        that computes while it is built would delay the current tokens.
        """
        if self._prefilling is not None or self._model.computes_at_once or step.batch.computes_at_once:
            return None
        if step.is_speculative or self._speculation.may_draft_next():
            return None
        return begin_lookahead(self._model, self._pool, step, self._running, rows=self._rows)

    def _feed_prompts(self) -> None:
        """Feed a chunk of the first prompt, and further whole prompts that fit in the same token budget."""
        most = room = min(self._burst, max(CHUNK, self._prefill_step_size)) or CHUNK
        self._admit()
        while (state := self._prefilling) is not None and (room == most or state.left <= room):
            left = state.left
            self._speculation.interrupt()
            self._feed(state, room)
            room -= min(left, room)
            self._admit()
        left = self._burst - (most - room)
        self._burst = left if left >= CHUNK else 0

    def _admit(self) -> None:
        """Reserve the pages of the first waiting request, if it can run next."""
        if self._prefilling is not None or not self._waiting or self._pool.num_free == self._free_when_full:
            return
        state = self._waiting[0]
        if len(self._running) + state.sequences_needed > self._max_batch:
            return
        try:
            if self._pool.disk is not None:
                self._wait_for_lookahead()
            if state.fetch():
                return  # the next step reads more of it from disk
            state.reserve(self._pool)
        except ContextError as error:
            if not self._running:  # nothing will free pages: something else uses the pool
                self._end(state, "error", state.open, error)
            else:
                self._free_when_full = self._pool.num_free
        except Exception as error:
            self._end(state, "error", state.open, error)
        else:
            self._waiting.popleft()
            self._free_when_full = None
            self._prefilling = state

    def _feed(self, state: PromptState, room: int) -> None:
        """Feed a chunk of at most ``room`` tokens of a prompt; after the last chunk its answers begin."""
        try:
            with kernel_failures(self._pool):
                self._wait_for_lookahead()
                logits = state.feed(self._model, self._pool, min(room, self._prefill_step_size))
            if isinstance(state, EmbeddingState):
                self._hand_out_vectors(state)
                return
            if logits is None:
                return
            assert isinstance(state, RequestState)
            answers = state.begin_answers()
        except Exception as error:
            self._end(state, "error", state.open, error)
            return
        self._running = sorted([*self._running, *answers], key=lambda answer: answer.state.calls_out)
        self._prefilling = None
        state.sequences = []
        sampled = sample_each(mx.broadcast_to(logits, (len(answers), logits.shape[-1])), answers)
        for answer, token in zip(answers, sampled, strict=True):
            self._take(answer, token)

    def _hand_out_vectors(self, state: EmbeddingState) -> None:
        """Hand out the vectors of texts that have ended. After a pass other requests have their turn."""
        for number, vector in state.take():
            if number in state.open:
                ended = Token(state.request, number, None, finish_reason="stop", embedding=vector)
                self._hand_out(state, ended)
        if not state.sequences:
            self._prefilling = None
            if state.open:
                self._waiting.append(state)

    def _wait_for_lookahead(self) -> None:
        """Wait until nothing reads the pool's arrays; otherwise MLX copies them for the next write."""
        if self._lookahead is not None:
            mx.eval(self._lookahead.logits)

    def _take(self, answer: Answer, sampled: SampledToken | Exception, *, from_draft: bool = False) -> None:
        """Queue the next token of an answer to be returned; after its last token the answer leaves."""
        state = answer.state
        if answer.number not in state.open:
            return  # it was cancelled, or another answer of its request failed
        if isinstance(sampled, Exception):
            self._end(state, "error", state.open, sampled)
            return
        answer.tokens.append(sampled.token)
        reason: FinishReason | None = None if answer.left else state.limit_reason
        if sampled.token in state.stop_tokens:
            reason = "stop"
        cache = error = None
        if reason is not None:
            cache, error = self._leave(answer)
            reason = reason if error is None else "error"
        token = Token(state.request, answer.number, *sampled, reason, state.cached, cache, error, from_draft)
        if len(answer.tokens) == len(state.ids) + 1 and state.logprobs is not None:
            token.prompt_logprobs = [each[:3] for each in state.logprobs.tokens]
        self._hand_out(state, token)

    def _hand_out(self, state: PromptState, token: Token) -> None:
        self._tokens.append(token)
        if token.finish_reason is not None:
            state.open.discard(token.answer)
            if not state.open:
                self._states.pop(token.request, None)

    def _leave(self, answer: Answer) -> tuple[ModelCache | None, Exception | None]:
        """Remove an answer from the batch and free its pages; return its cache, if kept, or an error."""
        self._running.remove(answer)
        sequence = answer.sequence
        state = answer.state
        keeps = state.request.keep_cache
        try:
            # mlx-lm's caches include the last token.
            if keeps and sequence.length < min(len(answer.tokens), sequence.max_tokens):
                feed_tokens(self._model, self._pool.batch([sequence]), [answer.tokens[-1:]])
            if not self._deterministic:  # decoded tokens differ from those computed in chunks
                state.prefix.share(sequence, last_page=True)
            if not keeps:
                return None, None
            tokens = self._pool.max_seq_len if state.cache is None else state.cache.max_seq_len
            cache: ModelCache = self._pool.make_cache(max(tokens, state.reserved))
            cache.sequence.load(sequence)
            return cache, None
        except Exception as error:
            return None, error
        finally:
            answer.release()

    def _end(
        self,
        state: PromptState,
        reason: FinishReason,
        numbers: Collection[int],
        error: BaseException | None = None,
    ) -> None:
        """End answers of a request early."""
        if isinstance(error, StopIteration):  # it would look like the end of an iterator (PEP 479)
            error = RuntimeError("a sampler, logits processor or progress raised StopIteration")
        for number in sorted(numbers):
            cache = None
            for answer in [each for each in self._running if each.state is state and each.number == number]:
                if error is None:
                    cache, _ = self._leave(answer)
                else:
                    self._running.remove(answer)
                    answer.release()
            ended = Token(state.request, number, None, finish_reason=reason, cached_tokens=state.cached)
            self._hand_out(state, replace(ended, cache=cache, error=error))
        if state.open:
            return
        if error is None and state is self._prefilling:  # a repeated request can continue from here
            state.share(last_page=not self._deterministic)
        state.release()
        if state is self._prefilling:
            self._prefilling = None
        elif state in self._waiting:
            self._waiting.remove(state)
            self._free_when_full = None  # another request may be the first now

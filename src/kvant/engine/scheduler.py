"""Many requests at once: the order in which prompts are fed, and a token for every running answer."""

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

BURST = 2  # long chunks of prompts that are fed before the answers they begin continue, if none was running


class Counts(NamedTuple):
    """What a scheduler has to do."""

    waiting: int  # requests without reserved pages
    prefilling: int  # answers whose prompt is being fed
    running: int  # answers that get a token every step
    free_pages: int  # that requests could have


class Scheduler:
    """Serves the requests of one model and one pool. It has no thread: :meth:`step` computes.

    Requests are admitted in the order they came, one at a time: the next one once the last one's prompt was
    fed, its pages are free and the batch has room. None overtakes another, so none starves. All pages of a
    request are reserved when it is admitted: nothing is preempted and nothing runs out.

    In a step every running answer gets one token, or several if it drafts. An answer that has ended, or was
    cancelled, leaves at once, and its pages are free. Then one chunk of the admitted prompt is fed, and whole
    short prompts behind it: 128 tokens together at most, or ``prefill_step_size`` if nothing was running;
    twice, before the answers that begin so continue. The last chunk of a prompt gives its answers their first
    tokens. Whole pages of prompts and answers are shared with later requests of the same salt.

    Deterministic: the tokens of a request, and its logits on a CPU, do not depend on other requests. Every
    step has ``max_batch`` rows then, chunks end at multiples of 128, and only pages that such chunks computed
    are shared.
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
        """For a model and its pool, which serves nobody else.

        ``max_batch``: answers that run at once, at most. ``max_queue``: requests that wait, at most; None:
            any number. ``prefill_step_size``: prompt tokens that are fed at once, at most; None: as many as
            the pool takes.
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
        self._states: dict[Request, PromptState] = {}  # of every request that has not ended
        self._waiting: deque[PromptState] = deque()
        # the number of free pages when the first waiting request did not fit
        self._free_when_full: int | None = None
        self._prefilling: PromptState | None = None  # its prompt is being fed
        self._running: list[Answer] = []  # those that call functions of the caller's come last
        self._burst = 0  # prompt tokens that are fed before running answers continue
        self._lookahead: Step | None = None  # the next step, if it could be begun already
        self._tokens: list[Token] = []  # to be handed out
        self.steps = 0  # in which running answers got a token
        self.feeding_s = 0.0  # seconds that prompts took
        self.decoding_s = 0.0  # seconds that these steps took

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not (self._states or self._tokens)

    @property
    def num_waiting(self) -> int:
        """The number of requests without reserved pages; any thread may ask."""
        return len(self._waiting)

    @property
    def counts(self) -> Counts:
        """What there is to do. Another thread must not ask during a step."""
        fed = () if self._prefilling is None else self._prefilling.open
        return Counts(len(self._waiting), len(fed), len(self._running), self._pool.num_free)

    @property
    def drafts(self) -> DraftCounts:
        """What drafts achieved for all answers, whose steps are counted one by one. Another thread must not
        ask.
        """
        return replace(self._speculation.counts)

    @property
    def reserved_answers(self) -> list[tuple[Request, int, PoolSequence]]:
        """Every answer whose pages are reserved: its request, number and sequence. Another thread must not
        ask.
        """
        found = [(answer.state.request, answer.number, answer.sequence) for answer in self._running]
        if (state := self._prefilling) is not None:
            found += [(state.request, number, each) for number, each in enumerate(state.sequences)]
        return found

    def check(self, request: Request) -> PromptState:
        """Check whether the pool can serve a request; any thread may."""
        if isinstance(request, EmbeddingRequest):
            return EmbeddingState(request, self._model, self._pool, is_exact=self._deterministic)
        check_drafts(request.drafts, self._pool, deterministic=self._deterministic)
        if isinstance(request.drafts, ModelDrafts):
            raise ArgumentError(
                "draft_model", "is given for a single sequence; expected what for_pool returns"
            )
        return RequestState(request, self._model, self._pool, self._max_batch, is_exact=self._deterministic)

    def submit(self, request: Request | PromptState) -> None:
        """Queue a request."""
        state = self.check(request) if isinstance(request, Request) else request
        if state.request in self._states:
            raise ValueError("the request was submitted before and has not ended; expected another one")
        if self._max_queue is not None and (waiting := len(self._waiting)) >= self._max_queue:
            raise QueueFullError(
                f"{waiting} requests wait, which is all that may, and {len(self._running)} answers run; try "
                f"again later"
            )
        self._states[state.request] = state
        self._waiting.append(state)

    def cancel(self, request: Request, answer: int | None = None) -> None:
        """End the request's answers, or one of them, now: their pages are free. The next step reports it.

        It is no error if one has ended. Another thread must not call it during a step.
        """
        if (state := self._states.get(request)) is not None:
            self._end(state, "cancelled", state.open if answer is None else state.open & {answer})

    def close(self, error: BaseException | None = None) -> None:
        """End every request: it is cancelled, or has failed by ``error``."""
        self._lookahead = None
        for state in list(self._states.values()):
            self._end(state, "cancelled" if error is None else "error", state.open, error)

    def step(self) -> list[Token]:
        """Compute one step. Returns the new tokens.

        Errors of a request, or of the model, end the requests they belong to. An interruption ends all: every
        sequence is released. If it came in the middle of the pool's bookkeeping, a page may stay taken.
        """
        check_process()
        try:
            # In this order the first two tokens of an answer come from two steps, each as soon as it is
            # there.
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
        """Submit requests now, and iterate over their tokens as they come; an error of one is raised."""
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
        one is computed. It is queued once this one's tokens were read: before that it would find the pool's
        arrays in use, and MLX would copy them.
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
        """Begin the step after one that is being computed, if nothing has to come before.

        The answers of a prompt that is being fed belong in the next step, and a draft follows tokens that
        were read. A step that computes while it is built would delay this one's tokens.
        """
        if self._prefilling is not None or self._model.computes_at_once or step.batch.computes_at_once:
            return None
        if step.is_speculative or self._speculation.may_draft_next():
            return None
        return begin_lookahead(self._model, self._pool, step, self._running, rows=self._rows)

    def _feed_prompts(self) -> None:
        """Feed a chunk of the first prompt, and whole prompts behind it that fit in the same number of
        tokens.
        """
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
            if not self._running:  # nothing to wait for: something else uses the pool
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
        """Feed a chunk of a prompt, of ``room`` tokens at most. After the last one its answers begin."""
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
        """Wait until nothing reads the pool's arrays: MLX would copy them for the next write."""
        if self._lookahead is not None:
            mx.eval(self._lookahead.logits)

    def _take(self, answer: Answer, sampled: SampledToken | Exception, *, from_draft: bool = False) -> None:
        """Hand out the next token of an answer. After its last one the answer leaves."""
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
        """Remove an answer from the batch; its pages are free. Returns its cache, if the request keeps it,
        or an error.
        """
        self._running.remove(answer)
        sequence = answer.sequence
        state = answer.state
        keeps = state.request.keep_cache
        try:
            # mlx-lm's caches hold the last token too.
            if keeps and sequence.length < min(len(answer.tokens), sequence.max_tokens):
                feed_tokens(self._model, self._pool.batch([sequence]), [answer.tokens[-1:]])
            if not self._deterministic:  # a token at a time is not how chunks compute it
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
        if isinstance(error, StopIteration):  # an iterator's caller would take it for the end (PEP 479)
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
        if error is None and state is self._prefilling:  # who asks again continues from here
            state.share(last_page=not self._deterministic)
        state.release()
        if state is self._prefilling:
            self._prefilling = None
        elif state in self._waiting:
            self._waiting.remove(state)
            self._free_when_full = None  # another one is the first

"""Many requests at once: which of them are fed, in what order, and what is sampled of them."""

import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx

from kvant.cache import ModelCache
from kvant.cache.pool import Pool, PoolSequence
from kvant.engine.decoding import BatchDecoder, Step, kernel_failures, pick
from kvant.engine.drafts import DraftCounts
from kvant.engine.model_drafts import ModelDrafts, check_drafts
from kvant.engine.request import CHUNK, FinishReason, Request, Token, check_count
from kvant.engine.row_sampling import Picked
from kvant.engine.work import Answer, Work
from kvant.errors import ArgumentError, ContextError, QueueFullError
from kvant.models import LanguageModel
from kvant.threads import check_process

BURST = 2  # long chunks of prompts that are fed where nothing ran, before the answers that they begin go on


class Counts(NamedTuple):
    """What a scheduler has to do."""

    waiting: int  # requests that no page is reserved for yet
    prefilling: int  # answers whose prompt is being fed
    running: int  # answers that get a token every step
    free_pages: int  # that requests could have


class Scheduler:
    """Requests of one model and one pool. There is no thread in it: :meth:`step` computes.

    Requests are admitted first come, first served, one at a time: the next one when the last one's prompt was
    fed, its pages are free and the batch has room. Nothing passes it, so that none waits for ever. All its
    pages are reserved
    then: nothing is preempted and nothing runs out.

    In a step every answer that runs gets one token. One that has ended, or was cancelled, leaves at once, and
    its pages are free. Then one chunk of that prompt is fed, and whole short prompts behind it: 128 tokens
    together at most, or ``prefill_step_size`` where nothing ran; twice, before the answers that begin so go
    on. The last chunk of a prompt gives its answers their first tokens. Whole pages of prompts and answers
    are shared with later requests of the same salt.

    Where answers draft, a step feeds their drafts too, and of the others as many tokens that do not count. An
    answer gets as many tokens as were drafted rightly, and one more.

    Deterministic: the tokens of a request, and its logits on a CPU, do not depend on the other requests.
    Every step has ``max_batch`` rows then, chunks end at multiples of 128, and only pages that such chunks
    computed are shared.
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
        if deterministic and not pool.attends_apart:
            raise ValueError(
                f"deterministic is not possible with {model.config.model_type}: it reads the padded tokens "
                f"of all "
                "sequences at once, so that rounding goes with their lengths"
            )
        self._model, self._pool = model, pool
        self._prefill_step_size = min(prefill_step_size or pool.prefill_step_size, pool.prefill_step_size)
        self._max_batch, self._max_queue, self._deterministic = max_batch, max_queue, deterministic
        self._decoder = BatchDecoder(model, pool, rows=max_batch if deterministic else None)
        self._under_way: dict[Request, Work] = {}
        self._waiting: deque[Work] = deque()
        self._free_when_full: int | None = None  # the free pages when the first that waits did not fit
        self._prompt: Work | None = None  # is being fed
        self._running: list[Answer] = []  # those that call out last
        self._burst = 0  # prompt tokens that are fed before those that run go on
        self._queued: Step | None = None  # the next one of answers that run, where it could be begun
        self._ready: list[Token] = []
        self.steps = 0  # that gave running answers a token
        self.feeding_s = self.decoding_s = 0.0  # seconds that prompts and these steps took

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not (self._under_way or self._ready)

    @property
    def num_waiting(self) -> int:
        """Requests that no page is reserved for yet; any thread may ask."""
        return len(self._waiting)

    @property
    def counts(self) -> Counts:
        """What there is to do. Another thread must not ask during a step."""
        fed = () if self._prompt is None else self._prompt.open
        return Counts(len(self._waiting), len(fed), len(self._running), self._pool.num_free)

    @property
    def drafts(self) -> DraftCounts:
        """What drafts did for all answers, whose steps are counted one by one. Another thread must not
        ask.
        """
        return replace(self._decoder.counts)

    @property
    def held(self) -> list[tuple[Request, int, PoolSequence]]:
        """Every answer whose pages are reserved: its request, number and sequence. Another thread must not
        ask.
        """
        found = [(answer.work.request, answer.number, answer.sequence) for answer in self._running]
        if (work := self._prompt) is not None:
            found += [(work.request, number, each) for number, each in enumerate(work.sequences)]
        return found

    def check(self, request: Request) -> Work:
        """What the pool can serve, or an error; any thread may call it."""
        check_drafts(request.drafts, self._pool, deterministic=self._deterministic)
        if isinstance(request.drafts, ModelDrafts):
            raise ArgumentError(
                "draft_model", "is given for a single sequence; expected what beside makes of it"
            )
        return Work(request, self._model, self._pool, self._max_batch, is_exact=self._deterministic)

    def submit(self, request: Request | Work) -> None:
        """Take a request in."""
        work = self.check(request) if isinstance(request, Request) else request
        if work.request in self._under_way:
            raise ValueError("the request was submitted before and has not ended; expected another one")
        if self._max_queue is not None and (waiting := len(self._waiting)) >= self._max_queue:
            raise QueueFullError(
                f"{waiting} requests wait, which is all that may, and {len(self._running)} answers run; try "
                f"again later"
            )
        self._under_way[work.request] = work
        self._waiting.append(work)

    def cancel(self, request: Request, answer: int | None = None) -> None:
        """End its answers, or one of them, now: their pages are free. The next step tells.

        One that has ended is no error. Another thread must not call it during a step.
        """
        if (work := self._under_way.get(request)) is not None:
            self._end(work, "cancelled", work.open if answer is None else work.open & {answer})

    def close(self, error: BaseException | None = None) -> None:
        """End every request: it is cancelled, or has failed by ``error``."""
        self._queued = None
        for work in list(self._under_way.values()):
            self._end(work, "cancelled" if error is None else "error", work.open, error)

    def step(self) -> list[Token]:
        """Do one step. Returns the tokens that are new.

        Errors of a request, or of the model, end the requests they belong to. An interruption ends all: every
        sequence is released. Where it came in the middle of the pool's bookkeeping, a page may stay taken.
        """
        check_process()
        try:
            # In this order the first two tokens of an answer come from two steps, each as soon as it is
            # there.
            started = time.perf_counter()
            if not self._running:
                self._burst = BURST * max(CHUNK, self._prefill_step_size)
            elif self._prompt is None:
                self._burst = 0
            if not (self._running and self._burst):
                self._decode()
            decoded = time.perf_counter()
            if self._prompt is not None or self._waiting:
                self._feed_prompts()
            self.decoding_s += decoded - started
            self.feeding_s += time.perf_counter() - decoded
        except BaseException as error:
            self.close(error)
            raise
        ready, self._ready = self._ready, []
        return ready

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

    def _admit(self) -> None:
        """Reserve the pages of the first that waits, if it can run next."""
        if self._prompt is not None or not self._waiting or self._pool.num_free == self._free_when_full:
            return
        work = self._waiting[0]
        if len(self._running) + len(work.open) > self._max_batch:
            return
        try:
            if self._pool.disk is not None and self._queued is not None:
                mx.eval(self._queued.logits)  # or MLX would copy the arrays that it reads
            if work.fetch(self._pool):
                return  # more of it in the next step
            work.reserve(self._pool)
        except ContextError as error:
            if not self._running:  # there is nothing to wait for: the pool serves somebody else too
                self._end(work, "error", work.open, error)
            else:
                self._free_when_full = self._pool.num_free
        except Exception as error:
            self._end(work, "error", work.open, error)
        else:
            self._waiting.popleft()
            self._free_when_full, self._prompt = None, work

    def _feed_prompts(self) -> None:
        """Feed a chunk of the first prompt, and whole prompts behind it that fit in the same number of
        tokens.
        """
        most = room = min(self._burst, max(CHUNK, self._prefill_step_size)) or CHUNK
        self._admit()
        while (work := self._prompt) is not None and (room == most or work.left <= room):
            left = work.left
            self._decoder.paused()
            self._feed(work, room)
            room -= min(left, room)
            self._admit()
        left = self._burst - (most - room)
        self._burst = left if left >= CHUNK else 0

    def _feed(self, work: Work, room: int) -> None:
        """Feed a chunk of a prompt, of ``room`` tokens at most. After the last one its answers begin."""
        try:
            with kernel_failures(self._pool):
                if self._queued is not None:
                    mx.eval(self._queued.logits)  # or MLX would copy the arrays that it reads
                logits = work.feed(self._model, self._pool, min(room, self._prefill_step_size))
            if logits is None:
                return
            answers = work.begin_answers()
        except Exception as error:
            self._end(work, "error", work.open, error)
            return
        self._running = sorted([*self._running, *answers], key=lambda answer: answer.work.calls_out)
        self._prompt, work.sequences = None, []
        self._take(pick(mx.broadcast_to(logits, (len(answers), logits.shape[-1])), answers), answers)

    def _decode(self) -> None:
        """One token of every answer that runs.

        Where nothing has to see a token before the next one is sampled, the next step is built while this one
        is computed. It is queued when this one's tokens were read: before that it would find the pool's
        arrays in use, and MLX would copy them.
        """
        if not self._running:
            self._queued = None
            return
        answers = list(self._running) if self._queued is None else self._queued.answers
        try:
            with kernel_failures(self._pool):
                step, picked, following = self._computed()
        except Exception as error:
            for answer in answers:
                self._end(answer.work, "error", answer.work.open, error)
            return
        self.steps += 1
        self._queued = following
        if step.drafts is not None:
            for answer, own in zip(step.answers, self._decoder.commit(step, picked), strict=True):
                for each, is_drafted in own:
                    self._take([each], [answer], from_draft=is_drafted)
        else:
            self._take(pick(step.logits, step.answers) if picked is None else picked, step.answers)
        if not self._running:
            self._queued = None

    def _computed(self) -> tuple[Step, list[Picked | Exception] | None, Step | None]:
        """A step, committed unless it verifies drafts; the tokens sampled in it; the next step, if it was
        begun.
        """
        step, self._queued = self._queued, None
        if step is not None and step.error is not None:
            raise step.error
        drafting = [answer for answer in self._running if answer.tell_drafter()]
        if step is None and drafting:
            step = self._decoder.begin_drafted(self._running, drafting)
        if step is None:
            answers = list(self._running)
            step = self._decoder.begin(answers, mx.array([answer.tokens[-1] for answer in answers]))
        if step.sampled is not None and not step.is_ahead:
            mx.async_eval(step.sampled.arrays)
        following = picked = None
        if step.drafts is None:
            step.batch.commit(ids=[answer.tokens[-1:] for answer in step.answers])
            # The answers of a prompt that is being fed are to be in the next step; a draft follows what is
            # read. A step that computes while it is built would keep this one's tokens back.
            at_once = self._model.computes_at_once or step.batch.computes_at_once
            may_begin = self._prompt is None and not at_once
            if may_begin and not self._decoder.may_draft(drafting):
                try:
                    following = self._decoder.begin_after(step, self._running)
                except Exception as error:  # it is said when this step's tokens were handed out
                    following = Step(list(self._running), step.batch, step.logits, None, error=error)
        if step.sampled is None:
            mx.eval(step.logits)
        else:
            picked = step.sampled.read()
        if following is not None and following.sampled is not None:
            mx.async_eval(following.sampled.arrays)
        self._decoder.read(step, following, is_counted=bool(drafting))
        return step, picked, following

    def _take(
        self, picked: Sequence[Picked | Exception], answers: Sequence[Answer], *, from_draft: bool = False
    ) -> None:
        """Hand out the next token of each answer; after the last one it leaves."""
        for answer, each in zip(answers, picked, strict=True):
            work = answer.work
            if answer.number not in work.open:
                continue  # it ended: it was cancelled, or another answer of its request failed
            if isinstance(each, Exception):
                self._end(work, "error", work.open, each)
                continue
            answer.tokens.append(each.token)
            reason: FinishReason | None = None if answer.left else work.full
            if each.token in work.stop_tokens:
                reason = "stop"
            cache = error = None
            if reason is not None:
                cache, error = self._leave(answer)
                reason = reason if error is None else "error"
            token = Token(work.request, answer.number, *each, reason, work.cached, cache, error, from_draft)
            if len(answer.tokens) == len(work.ids) + 1:
                token.miss = work.miss
                token.prompt_logprobs = [picked[:3] for picked in work.read]
            self._hand_out(work, token)

    def _hand_out(self, work: Work, token: Token) -> None:
        self._ready.append(token)
        if token.finish_reason is not None:
            work.open.discard(token.answer)
            if not work.open:
                self._under_way.pop(token.request, None)

    def _leave(self, answer: Answer) -> tuple[ModelCache | None, Exception | None]:
        """Take an answer out of the batch; its pages are free. Returns its cache, where one is wanted, or
        an error.
        """
        self._running.remove(answer)
        sequence, work = answer.sequence, answer.work
        try:
            # mlx-lm's caches hold the last token too.
            if work.request.keep_cache and sequence.length < min(len(answer.tokens), sequence.max_tokens):
                self._decoder.feed(self._pool.batch([sequence]), [answer.tokens[-1:]])
            if not self._deterministic:  # a token at a time is not how chunks compute it
                sequence.share_prefix(last_page=True, asked=work.asked)
            if not work.request.keep_cache:
                return None, None
            given = None if work.cache is None else work.cache.max_seq_len
            made: ModelCache = self._pool.make_cache(max(given or self._pool.max_seq_len, work.reserved))
            made.sequence.load(sequence)
            return made, None
        except Exception as error:
            return None, error
        finally:
            answer.release()

    def _end(
        self, work: Work, reason: FinishReason, numbers: Collection[int], error: BaseException | None = None
    ) -> None:
        """End answers of a request before their time."""
        # whoever iterates an answer would take it for its end, as PEP 479 says
        if isinstance(error, StopIteration):
            error = RuntimeError("a sampler, logits processor or progress raised StopIteration")
        for number in sorted(numbers):
            cache = None
            for answer in [each for each in self._running if each.work is work and each.number == number]:
                if error is None:
                    cache, _ = self._leave(answer)
                else:
                    self._running.remove(answer)
                    answer.release()
            ended = Token(work.request, number, None, finish_reason=reason, cached_tokens=work.cached)
            self._hand_out(work, replace(ended, cache=cache, error=error))
        if not work.open:
            if error is None and work is self._prompt:  # who asks again goes on where this one was left
                work.share(last_page=not self._deterministic)
            work.release()
            if work is self._prompt:
                self._prompt = None
            elif work in self._waiting:
                self._waiting.remove(work)
                self._free_when_full = None  # another one is the first

"""Requests through a scheduler: each token of each answer with its piece of text, as it comes."""

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from kvant.engine.drafting.choice import DraftCounts
from kvant.engine.request import Request, Token
from kvant.engine.response import GenerationResponse
from kvant.engine.scheduler import Scheduler
from kvant.text.stream import TextStream
from kvant.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request, and what ends the text of its answers.

    Attributes:
        stop: strings; a text ends before the first of them.
        stop_sequences: token ids in a row; an answer ends with the first of them.
        following: called with an answer's tokens when the context is full. It returns what makes the request that goes
            on with it, which is called when a further token is asked for; None: there is none.
    """

    request: Request
    stop: Sequence[str] = ()
    stop_sequences: Sequence[Sequence[int]] = ()
    following: Callable[[list[int]], Callable[[], Request] | None] | None = None


class _Answer:
    """An answer under way."""

    def __init__(self, number: int, wanted: Wanted, tokenizer: Tokenizer) -> None:
        self.last: GenerationResponse | None = None  # where its text ended it; the scheduler has yet to say so
        self.after = 0  # tokens behind that, which came with it
        self.following: Callable[[], Request] | None = None  # what goes on with it after its last token
        self._number, self.wanted = number, wanted
        self._text = TextStream(tokenizer, wanted.stop)
        self._tokens: list[int] = []
        self._first_s = self._previous_s = 0.0
        self._fed = 0

    def take(self, token: Token, seconds: float, drafts: DraftCounts | None) -> GenerationResponse:
        """Its next token, so many seconds after the stream began, and what drafts did until then."""
        assert token.token is not None
        assert token.logprob is not None
        self._tokens.append(token.token)
        count = len(self._tokens)
        reason = token.finish_reason
        if self.wanted.stop_sequences and self._ends():
            reason = "stop"
        text = "" if reason == "stop" else self._text.add(token.token)
        self.following = None
        if reason == "context" and not self._text.stopped and self.wanted.following is not None:
            self.following = self.wanted.following(self._tokens)
            reason = reason if self.following is None else None
        if reason is not None and not self._text.stopped:
            text += self._text.finish()
        if self._text.stopped:
            reason = "stop"
        if count == 1:
            self._first_s = seconds
            self._fed = 0 if token.answer else len(self.wanted.request.prompt) - token.cached_tokens
        latency_s, self._previous_s = seconds - self._previous_s, seconds
        return GenerationResponse(
            text=text,
            token=token.token,
            logprobs=token.logprobs,
            from_draft=token.from_draft,
            prompt_tokens=self._fed,
            prompt_tps=self._fed / self._first_s,
            generation_tokens=count,
            generation_tps=(count - 1) / (seconds - self._first_s) if seconds > self._first_s else 0.0,
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=reason,
            latency_ms=latency_s * 1e3,
            drafts=drafts,
            number=self._number,
            answer=token.answer,
            logprob=token.logprob,
            since_start_ms=seconds * 1e3,
            cache=token.cache,
        )

    def _ends(self) -> bool:
        return any(self._tokens[-len(row) :] == list(row) for row in self.wanted.stop_sequences)

    def ended(self, token: Token) -> GenerationResponse:
        """Its last token, with the cache that came later."""
        assert self.last is not None
        if token.cache is not None:
            token.cache.trim(self.after)
        return replace(self.last, cache=token.cache)


def responses(
    scheduler: Scheduler, wanted: Sequence[Wanted], tokenizer: Tokenizer, started: float | None = None
) -> Generator[GenerationResponse, None, None]:
    """Answer requests, as many at once as the scheduler has room for. The next one is submitted when none waits.

    The first is submitted now, so that what is refused is refused now. A stream that is left before its end, or fails,
    leaves nothing under way.

    Args:
        started: the ``time.perf_counter()`` of the call; None: now.
    """
    stream = _Stream(scheduler, wanted, tokenizer, time.perf_counter() if started is None else started)
    stream.submit()
    return stream.responses()


class _Stream:
    """Requests, and the answers that are under way."""

    def __init__(self, scheduler: Scheduler, wanted: Sequence[Wanted], tokenizer: Tokenizer, started: float) -> None:
        self._scheduler, self._tokenizer, self._started = scheduler, tokenizer, started
        self._pending = deque(enumerate(wanted))
        self._answers: dict[tuple[Request, int], _Answer] = {}
        self._is_drafting = any(each.request.drafts is not None for each in wanted)

    def submit(self) -> None:
        while self._pending and not self._scheduler.num_waiting:
            number, each = self._pending.popleft()
            self._scheduler.submit(each.request)
            for answer in range(each.request.answers):
                self._answers[each.request, answer] = _Answer(number, each, self._tokenizer)

    def responses(self) -> Generator[GenerationResponse, None, None]:
        scheduler = self._scheduler
        try:
            while self._pending or not scheduler.idle:
                self.submit()
                tokens = scheduler.step()
                seconds = time.perf_counter() - self._started
                drafts = scheduler.drafts if self._is_drafting else None
                for token in tokens:
                    if token.error is not None:
                        raise token.error
                    place = token.request, token.answer
                    answer = self._answers[place] if token.finish_reason is None else self._answers.pop(place)
                    made = self._took(answer, token, seconds, drafts)
                    if made is not None:
                        yield made
                    if answer.following is not None:
                        self._go_on(answer.following, answer)
        finally:
            scheduler.close()

    def _took(
        self, answer: _Answer, token: Token, seconds: float, drafts: DraftCounts | None
    ) -> GenerationResponse | None:
        if answer.last is not None:  # it was cancelled below
            answer.after += token.token is not None
            return None if token.finish_reason is None else answer.ended(token)
        made = answer.take(token, seconds, drafts)
        if made.finish_reason is not None and token.finish_reason is None:
            answer.last = made
            self._scheduler.cancel(token.request, token.answer)
            return None
        return made

    def _go_on(self, following: Callable[[], Request], answer: _Answer) -> None:
        """Submit what follows an answer whose context is full."""
        request = following()
        self._scheduler.submit(request)
        self._answers[request, 0] = answer

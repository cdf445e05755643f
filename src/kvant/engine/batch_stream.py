"""Many requests through a scheduler: each token of each answer with its piece of text, as it comes."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from kvant.cache import ModelCache
from kvant.engine.drafting.choice import DraftCounts
from kvant.engine.request import FinishReason, Request, Token
from kvant.engine.scheduler import Scheduler
from kvant.text.stream import TextStream
from kvant.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request, and what ends the text of its answers.

    Attributes:
        stop: strings; a text ends before the first of them.
        stop_sequences: token ids in a row; an answer ends with the first of them.
    """

    request: Request
    stop: Sequence[str] = ()
    stop_sequences: Sequence[Sequence[int]] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """A token of an answer; where a name is one of :class:`kvant.GenerationResponse`, so is what it means.

    Attributes:
        number: of its request, from 0, in the order they were given.
        answer: which of the request's answers, from 0.
        logprob: of the token.
        prompt_tokens: tokens of the prompt that were fed; 0 for further answers to it, and those of a shared prefix
            do not count.
        prompt_tps: of them a second, until the first token was ready, waiting included.
        since_start_ms: milliseconds since the stream began.
        latency_ms: milliseconds since the answer's previous token; for the first, since the stream began.
        cache: of prompt and answer, with the last token, where the request wants one.
        from_draft: whether the token was drafted.
        drafts: what drafts did so far, for all answers; None: none of them drafts.
    """

    number: int
    answer: int
    text: str
    token: int
    logprob: float
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: FinishReason | None
    since_start_ms: float
    latency_ms: float
    cache: ModelCache | None
    from_draft: bool = False
    drafts: DraftCounts | None = None


class _Answer:
    """An answer under way."""

    def __init__(self, number: int, wanted: Wanted, tokenizer: Tokenizer) -> None:
        self.last: Piece | None = None  # where its text ended it; the scheduler has yet to say so
        self.after = 0  # tokens behind that, which came with it
        self._number, self._wanted = number, wanted
        self._text = TextStream(tokenizer, wanted.stop)
        self._tokens: list[int] = []
        self._first_s = self._previous_s = 0.0

    def take(self, token: Token, seconds: float, drafts: DraftCounts | None) -> Piece:
        """Its next token, so many seconds after the stream began, and what drafts did until then."""
        assert token.token is not None
        assert token.logprob is not None
        self._tokens.append(token.token)
        count = len(self._tokens)
        reason = token.finish_reason
        if any(self._tokens[-len(row) :] == list(row) for row in self._wanted.stop_sequences):
            reason = "stop"
        text = "" if reason == "stop" else self._text.add(token.token)
        if reason is not None and not self._text.stopped:
            text += self._text.finish()
        if self._text.stopped:
            reason = "stop"
        if count == 1:
            self._first_s = seconds
        latency_s, self._previous_s = seconds - self._previous_s, seconds
        fed = 0 if token.answer else len(self._wanted.request.prompt) - token.cached_tokens
        return Piece(
            number=self._number,
            answer=token.answer,
            text=text,
            token=token.token,
            logprob=token.logprob,
            prompt_tokens=fed,
            prompt_tps=fed / self._first_s,
            generation_tokens=count,
            generation_tps=(count - 1) / (seconds - self._first_s) if seconds > self._first_s else 0.0,
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=reason,
            since_start_ms=seconds * 1e3,
            latency_ms=latency_s * 1e3,
            cache=token.cache,
            from_draft=token.from_draft,
            drafts=drafts,
        )

    def ended(self, token: Token) -> Piece:
        """Its last token, with the cache that came later."""
        assert self.last is not None
        if token.cache is not None:
            token.cache.trim(self.after)
        return replace(self.last, cache=token.cache)


def stream_pieces(scheduler: Scheduler, wanted: Sequence[Wanted], tokenizer: Tokenizer) -> Iterator[Piece]:
    """Answer requests, as many at once as the scheduler has room for. The next one is submitted when none waits.

    A stream that is left before its end, or fails, leaves nothing under way.
    """
    started = time.perf_counter()
    pending = deque(enumerate(wanted))
    answers: dict[tuple[Request, int], _Answer] = {}
    is_drafting = any(each.request.drafts is not None for each in wanted)
    try:
        while pending or not scheduler.idle:
            while pending and not scheduler.num_waiting:
                number, each = pending.popleft()
                scheduler.submit(each.request)
                for answer in range(each.request.answers):
                    answers[each.request, answer] = _Answer(number, each, tokenizer)
            tokens = scheduler.step()
            seconds = time.perf_counter() - started
            drafts = scheduler.drafts if is_drafting else None
            for token in tokens:
                if token.error is not None:
                    raise token.error
                place = token.request, token.answer
                under_way = answers[place] if token.finish_reason is None else answers.pop(place)
                if under_way.last is not None:  # it was cancelled below
                    under_way.after += token.token is not None
                    if token.finish_reason is not None:
                        yield under_way.ended(token)
                    continue
                piece = under_way.take(token, seconds, drafts)
                if piece.finish_reason is None or token.finish_reason is not None:
                    yield piece
                else:
                    under_way.last = piece
                    scheduler.cancel(token.request, token.answer)
    finally:
        scheduler.close()

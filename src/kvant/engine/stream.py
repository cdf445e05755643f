"""Streaming of a scheduler's answers: each token with its piece of text."""

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from kvant.cache import ModelCache
from kvant.engine.drafts import DraftCounts
from kvant.engine.request import FinishReason, Request, Token
from kvant.engine.scheduler import Scheduler
from kvant.text.stream import TextPart, TextStream
from kvant.text.tokenizer import Tokenizer


@dataclass(slots=True)
class GenerationResponse:
    """One generated token, with mlx-lm's fields and those from ``latency_ms`` on.

    Attributes:
        text: the next piece of text; empty while a character or a possible stop string is incomplete.
        token: the token's id.
        logprobs: (vocab,) log-probabilities that the token was drawn from; None in a batch.
        from_draft: whether the token was drafted.
        prompt_tokens: number of fed prompt tokens; 0 for further answers to the same prompt.
        prompt_tps: prompt tokens per second until the first token was ready, including waiting.
        generation_tokens: number of tokens generated so far, including this one.
        generation_tps: tokens per second without the first token, which prompt_tps covers; 0.0 for the first.
        peak_memory: MLX's peak memory so far, in GB (1e9 bytes).
        finish_reason: None until the last response: "stop" (end-of-text token or stop string), "length"
            (max_tokens), "context" (the reserved context is full).
        latency_ms: milliseconds since the previous token was ready, including the caller's time in between;
            for the first token, since the call.
        drafts: counts for all answers so far; None without drafts.
        number: of the request in a batch, from 0.
        answer: which of the request's answers, from 0.
        logprob: of the token.
        since_start_ms: milliseconds since the call.
        cache: of prompt and answer, including the last token, if a batch keeps it.
    """

    text: str
    token: int
    logprobs: Any
    from_draft: bool
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: FinishReason | None
    latency_ms: float
    drafts: DraftCounts | None = None
    number: int = 0
    answer: int = 0
    logprob: float = 0.0
    since_start_ms: float = 0.0
    cache: ModelCache | None = None


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request, and further conditions that end its answers."""

    request: Request
    stop: Sequence[str] = ()  # strings; a text ends before the first one
    stop_sequences: Sequence[Sequence[int]] = ()  # sequences of token ids; an answer ends with the first one
    # Called with an answer's tokens when the context is full. Returns a factory for the continuation request,
    # called when the next token is needed, or None
    following: Callable[[list[int]], Callable[[], Request] | None] | None = None


class ResponseBuilder:
    """Builds the responses of an answer, token by token."""

    def __init__(self, number: int, requests: TextRequest, tokenizer: Tokenizer) -> None:
        # the last response if the text ended the answer, until the scheduler confirms the end
        self.last: GenerationResponse | None = None
        self.after = 0  # number of tokens after it from the same step
        self.following: Callable[[], Request] | None = None  # makes the request that continues it
        self._number = number
        self._request = requests
        self._text = TextStream(tokenizer, requests.stop)
        self._tokens: list[int] = []
        self._first_s = 0.0  # seconds until the first token
        self._previous_s = 0.0
        self._prompt_tokens = 0  # fed tokens of the prompt

    def take(self, token: Token, seconds: float, drafts: DraftCounts | None) -> GenerationResponse:
        """Add the next token, which was ready ``seconds`` after the stream began, with the drafts' counts."""
        assert token.token is not None and token.logprob is not None  # noqa: PT018
        self._tokens.append(token.token)
        text, reason = self._add(token.token, token.finish_reason)
        count = len(self._tokens)
        if count == 1:
            self._first_s = seconds
            prompt_tokens = len(self._request.request.prompt) - token.cached_tokens
            self._prompt_tokens = 0 if token.answer else prompt_tokens
        latency_s = seconds - self._previous_s
        self._previous_s = seconds
        return GenerationResponse(
            text=text,
            token=token.token,
            logprobs=token.logprobs,
            from_draft=token.from_draft,
            prompt_tokens=self._prompt_tokens,
            prompt_tps=self._prompt_tokens / self._first_s,
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

    def _add(self, token: int, reason: FinishReason | None) -> tuple[str, FinishReason | None]:
        """Return the next piece of text, and the reason if it ends here."""
        ends = self._request.stop_sequences
        if any(self._tokens[-len(end) :] == list(end) for end in ends):
            reason = "stop"
        parts = [] if reason == "stop" else self._text.add(token)
        self.following = None
        if reason == "context" and self._text.stop is None and self._request.following is not None:
            self.following = self._request.following(self._tokens)
            reason = reason if self.following is None else None
        if reason is not None:
            parts += self._text.finish()
        if self._text.stop is not None:
            reason = "stop"
        return "".join(piece.text for piece in parts if isinstance(piece, TextPart)), reason


def responses(
    scheduler: Scheduler, requests: Sequence[TextRequest], tokenizer: Tokenizer, started: float | None = None
) -> Generator[GenerationResponse, None, None]:
    """Answer requests, as many at once as the scheduler has room for.

    The first request is submitted and checked now, the next one whenever none waits. Closing the stream early
    ends all requests. ``started``: the ``time.perf_counter()`` of the call; None: now.
    """
    began = time.perf_counter() if started is None else started
    pending = deque(enumerate(requests))
    answers: dict[tuple[Request, int], ResponseBuilder] = {}
    is_drafting = any(each.request.drafts is not None for each in requests)

    def submit() -> None:
        while pending and not scheduler.num_waiting:
            number, each = pending.popleft()
            scheduler.submit(each.request)
            for answer in range(each.request.answers):
                answers[each.request, answer] = ResponseBuilder(number, each, tokenizer)

    def stream() -> Generator[GenerationResponse, None, None]:
        try:
            while pending or not scheduler.idle:
                submit()
                tokens = scheduler.step()
                seconds = time.perf_counter() - began
                drafts = scheduler.drafts if is_drafting else None
                for token in tokens:
                    if token.error is not None:
                        raise token.error
                    place = token.request, token.answer
                    is_last = token.finish_reason is not None
                    answer = answers.pop(place) if is_last else answers[place]
                    if answer.last is not None:  # it was cancelled below
                        answer.after += token.token is not None
                        if is_last:
                            if token.cache is not None:
                                token.cache.trim(answer.after)
                            yield replace(answer.last, cache=token.cache)
                        continue
                    made = answer.take(token, seconds, drafts)
                    if made.finish_reason is not None and not is_last:
                        answer.last = made
                        scheduler.cancel(*place)
                        continue
                    yield made
                    if answer.following is not None:  # its context is full
                        request = answer.following()
                        scheduler.submit(request)
                        answers[request, 0] = answer
        finally:
            scheduler.close()

    submit()
    return stream()

"""Submit a checked request to the engine and yield its events: pieces of text, tool calls, ends."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from kvant.engine.processors import Frequency, LogitsProcessor, Presence
from kvant.engine.request import Request, Token
from kvant.errors import ArgumentError, ContextError, EngineError, GrammarError, KvantError, QueueFullError
from kvant.server.body import refused
from kvant.server.compiling import grammar_of
from kvant.server.errors import ApiError
from kvant.server.generation import Begun, Call, End, EndReason, Event, Generation, Text, TokenLogprob
from kvant.server.service import Service
from kvant.server.turns import for_template, shown_tools, thinking_budget, with_system
from kvant.text.answer_parts import AnswerParts
from kvant.text.detokenizer import ByteDetokenizer
from kvant.text.prompt import encode_prompt, encode_rendered, render_chat
from kvant.text.stream import AnswerPart, CallPart, TextStream
from kvant.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # of an impossible token, as at OpenAI: JSON has no infinity
RETRY_AFTER_S = 1  # for the Retry-After header when the queue is full


@dataclass(frozen=True, slots=True)
class Prompt:
    """The token ids of a prompt, and their text if there is one."""

    text: str
    ids: list[int]


async def answer(service: Service, generation: Generation) -> AsyncGenerator[Event, None]:
    """Generate, and yield the events: :class:`Begun` first, and :class:`End` once for each answer.

    Closing the iterator, or cancelling its task, ends the generation.
    """
    prompt, request = await asyncio.to_thread(_prepare, service, generation)
    loop = asyncio.get_running_loop()
    tokens = asyncio.Queue[Token]()
    try:
        if (grammar := await grammar_of(service, generation, prompt.text)) is not None:
            request = replace(request, logits_processors=[*request.logits_processors, grammar])
        service.submit(request, lambda token: loop.call_soon_threadsafe(tokens.put_nowait, token))
    except (KvantError, ValueError) as error:
        raise failure(error, generation.field) from error
    try:
        async for event in _events(service, generation, prompt, request, tokens):
            yield event
    finally:
        service.engine.cancel(request)


def read_prompt(service: Service, generation: Generation) -> Prompt:
    """Return the prompt of a request. This blocks on the tokenizer's process."""
    try:
        if generation.messages is not None:
            variables = {**service.settings.template_variables, **generation.variables}
            variables["tools"] = shown_tools(service, generation, deferred=False) or None
            messages = with_system(
                for_template(generation.messages, service.tool_format), service.system_place
            )
            text = render_chat(service.tokenizer, messages, variables)
            service.check_length(text)
            return Prompt(text, encode_rendered(service.tokenizer, text))
        prompt = "" if generation.prompt is None else generation.prompt
        service.check_length(prompt)
        ids = encode_prompt(service.tokenizer, prompt, service.model.config.vocab_size)
        if isinstance(prompt, str):
            return Prompt(prompt, ids)
        return Prompt(service.tokenizer.decode(ids) if generation.echo else "", ids)
    except (KvantError, ValueError) as error:
        raise failure(error, generation.field) from error


def _prepare(service: Service, generation: Generation) -> tuple[Prompt, Request]:
    """Return the prompt and the engine's request."""
    prompt = read_prompt(service, generation)
    tokenizer = service.tokenizer
    vocab_size = service.model.config.vocab_size
    try:
        sampler, processors = generation.sampling.filled(service.sampling).build_for(tokenizer, vocab_size)
    except ArgumentError as error:
        raise refused(error) from error
    # OpenAI's penalties count the tokens of the answer.
    counted: list[LogitsProcessor] = [
        replace(each, first=len(prompt.ids)) if isinstance(each, Presence | Frequency) else each
        for each in processors
    ]
    if generation.thinking_budget is not None:
        counted.append(thinking_budget(tokenizer, prompt.text, len(prompt.ids), generation.thinking_budget))
    request = Request(
        prompt.ids,
        max_tokens=-1 if generation.max_tokens is None else generation.max_tokens,
        sampler=sampler,
        logits_processors=counted,
        stop_tokens={*generation.stop_tokens, *([] if generation.ignore_eos else tokenizer.eos_token_ids)},
        salt=generation.salt,
        top_logprobs=generation.top_logprobs,
        answers=generation.answers,
        drafts=service.drafts_of(generation.draft),
        prompt_logprobs=generation.echo and generation.logprobs,
    )
    return prompt, request


async def _events(
    service: Service, generation: Generation, prompt: Prompt, request: Request, tokens: "asyncio.Queue[Token]"
) -> AsyncGenerator[Event, None]:
    """Yield the events of a submitted request from its tokens."""
    tokenizer = service.tokenizer
    # Some tokenizers decode in a process of their own, which must not block the server's event loop.
    decodes_elsewhere = not isinstance(tokenizer.detokenizer, ByteDetokenizer)
    shown = shown_tools(service, generation)
    numbers = range(generation.answers)
    texts = {number: _text(service, generation, prompt, shown, number) for number in numbers}
    yield Begun(len(prompt.ids))
    has_begun = False
    while texts:
        token = await tokens.get()
        if (text := texts.get(token.answer)) is None:
            continue  # its answer ended before this token arrived
        if token.error is not None:
            if not isinstance(token.error, KvantError):
                raise token.error
            raise failure(token.error, generation.field) from token.error
        if token.token is None:
            raise ApiError("the server is shutting down", status=503)
        if not has_begun:
            has_begun = True
            for number, each in texts.items() if generation.echo and prompt.text else ():
                logprobs = await asyncio.to_thread(each.read, prompt, token.prompt_logprobs)
                yield Text(number, prompt.text, logprobs=logprobs)
        if generation.only_prompt:
            service.engine.cancel(request, token.answer)
            del texts[token.answer]
            yield End(token.answer, "length", 0, cached_tokens=token.cached_tokens)
            continue
        for event in await asyncio.to_thread(text.take, token) if decodes_elsewhere else text.take(token):
            yield event
        if token.finish_reason is None:
            if text.stop is None and (generation.parallel_tool_calls or not text.calls):
                continue
            service.engine.cancel(request, token.answer)
        del texts[token.answer]
        reason: EndReason = "tool_calls" if text.calls else "stop"
        if text.stop is None and token.finish_reason in ("length", "context"):
            reason = "length"
        yield End(token.answer, reason, text.tokens, text.thinking_tokens, text.stop, token.cached_tokens)


def _text(
    service: Service, generation: Generation, prompt: Prompt, shown: Sequence[dict[str, Any]], number: int
) -> "AnswerText":
    rendered = None if generation.messages is None else prompt.text
    parts = AnswerParts(
        service.tokenizer,
        rendered,
        shown,
        service.tool_format,
        only_calls=bool(generation.tools) and generation.tool_choice not in ("auto", "none"),
    )
    return AnswerText(number, service.tokenizer, parts, generation.stop, logprobs=generation.logprobs)


def busy(error: QueueFullError) -> ApiError:
    """Return the error for a client whose request has no place in the queue."""
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return ApiError(str(error), status=429, code="rate_limit_exceeded", headers=headers)


def failure(error: Exception, field: str) -> ApiError:
    """Convert an error that the client or the server's state has caused; ``field``: of the body."""
    said = str(error)
    match error:
        case ArgumentError():
            return refused(error)
        case QueueFullError():
            return busy(error)
        case EngineError():
            # only the log has the cause
            failed = "the engine failed; the server's log has the kind of the error"
            return ApiError(said if error.__cause__ is None else failed, status=503)
        case GrammarError():
            return ApiError(said)
        case ContextError():
            return ApiError(said, param=field, code="context_length_exceeded")
        case ValueError():
            return ApiError(said, param=field)
    return ApiError(said, status=500)


class AnswerText:
    """Converts the tokens of one answer to events: text and calls, with log-probabilities."""

    def __init__(
        self, number: int, tokenizer: Tokenizer, splitter: AnswerParts, stop: Sequence[str], *, logprobs: bool
    ) -> None:
        """``number`` is the answer's index in its request."""
        self.tokens = 0  # so far
        self.calls = 0
        self.thinking_tokens = 0  # up to the end of the thinking, if any
        self._number = number
        self._prompt = 0  # characters of the prompt if the text begins with it
        self._tokenizer = tokenizer
        self._text = TextStream(tokenizer, stop, splitter)
        self._logprobs = logprobs
        # Tokens whose text is not emitted yet: marks and withheld text come between a token and its text.
        self._pending: list[TokenLogprob] = []
        # Emitted bytes of the first pending token, which may end one character and begin the next.
        self._written = 0

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer."""
        return self._text.stop

    def take(self, token: Token) -> list[Text | Call]:
        """Return the events of the next token; the last token also releases withheld text."""
        assert token.token is not None
        self.tokens += 1
        pieces: list[AnswerPart] = []
        if token.finish_reason != "stop":  # an end-of-text token has no text
            if self._logprobs:
                assert token.logprob is not None
                entry = self._token_logprob(token.token, token.logprob, token.top_logprobs)
                self._pending.append(replace(entry, place=self._prompt + len(self._text.detokenizer.text)))
            pieces += self._text.add(token.token)
        if token.finish_reason is not None:
            pieces += self._text.finish()
        if self._text.is_thinking:
            self.thinking_tokens = self.tokens
        return [self._event(piece) for piece in pieces]

    def read(self, prompt: Prompt, others: Sequence[tuple[int, float, Any]]) -> list[TokenLogprob]:
        """Begin the text with a prompt. Return its tokens if log-probabilities are requested.

        Args:
            prompt: the beginning of the text.
            others: all tokens after the first, which has no log-probability: the token, its log-probability
                and the most probable tokens.
        """
        self._prompt = len(prompt.text)
        if not self._logprobs:
            return []
        detokenizer = self._tokenizer.detokenizer
        places = []
        for token in prompt.ids:
            places.append(len(detokenizer.text))
            detokenizer.add_token(token)
        detokenizer.finalize()
        # The decoded tokens may begin before the text, with a start token or a space before the first word.
        start = max(0, detokenizer.text.find(prompt.text))
        logprobs = [
            self._token_logprob(prompt.ids[0], None),
            *(self._token_logprob(*other) for other in others),
        ]
        placed = []
        for each, place in zip(logprobs, places, strict=True):
            in_text = min(max(0, place - start), self._prompt)
            placed.append(replace(each, place=in_text))
        return placed

    def _event(self, piece: AnswerPart) -> Text | Call:
        if isinstance(piece, CallPart):
            self._pending = []
            self._written = 0
            self.calls += 1
            return Call(self._number, self.calls - 1, piece.name, piece.arguments)
        logprobs = self._pending_of(piece.text) if self._pending else ()
        return Text(self._number, piece.text, piece.thinking, logprobs, self.tokens)

    def _pending_of(self, text: str) -> list[TokenLogprob]:
        """Return the pending tokens of a piece of text. Tokens before it were marks."""
        tokens = self._pending
        self._pending = []
        content = text.encode("utf-8", "replace")
        written = b"".join(token.bytes for token in tokens)
        places = [*accumulate((len(token.bytes) for token in tokens), initial=0)]
        first = self._written
        self._written = 0
        starts = [first, *(place for place in places if place > first)]
        at = next((place for place in starts if written.startswith(content, place)), -1)
        if at < 0:
            at = written.find(content, first)
        if at < 0:  # not the tokens' bytes, such as replacement characters
            return tokens
        last = at + len(content)
        spans = list(zip(tokens, places, places[1:], strict=False))
        rest = [(token, start) for token, start, end in spans if end > last]
        if rest:
            self._pending = [token for token, _ in rest]
            self._written = max(0, last - rest[0][1])
        return [token for token, start, end in spans if start < last and at < end <= last]

    def _token_logprob(
        self, token: int, logprob: float | None, top: Sequence[tuple[int, float]] = ()
    ) -> TokenLogprob:
        written = self._text.detokenizer.token_bytes(token)
        finite = None if logprob is None else max(logprob, LEAST_LOGPROB)
        return TokenLogprob(
            written.decode("utf-8", "replace"),
            finite,
            written,
            [self._token_logprob(*other) for other in top],
        )

"""The loop users call: prompt in, text out, every token timed."""

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Literal
from weakref import WeakKeyDictionary, ref

import mlx.core as mx

from kvant.cache import KVCache
from kvant.engine.decode import decode, trim_to
from kvant.engine.prefill import PromptProgress, prefill
from kvant.engine.sampling import LogitsProcessor, Sampler, greedy
from kvant.errors import ContextError
from kvant.models import Decoder
from kvant.text.prompt import encode_prompt
from kvant.text.stream import TextStream
from kvant.text.tokenizer import Tokenizer
from kvant.threads import check_process

FinishReason = Literal["stop", "length", "context"]
PREFILL_STEP_SIZE = 512


@dataclass(frozen=True, slots=True)
class GenerationResponse:
    """One generated token, with mlx-lm's fields and ``latency_ms``.

    Attributes:
        text: the next piece of text; empty while a character or a possible stop string is incomplete.
        token: the token's id.
        logprobs: (vocab,) log-probabilities the token was picked from.
        from_draft: always False; kvant has no draft models.
        prompt_tokens: tokens of the prompt that were fed.
        prompt_tps: prompt tokens per second, until the first token was ready.
        generation_tokens: tokens generated so far, this one included.
        generation_tps: tokens per second after the first, which prompt_tps tells of; 0.0 for the first.
        peak_memory: most memory MLX held so far, in GB (1e9 bytes).
        finish_reason: None until the last response: "stop" (end-of-text token or stop string), "length"
            (max_tokens), "context" (the reserved context is full).
        latency_ms: milliseconds since the previous token was ready, what the caller did in between included; for the
            first token, since the call.
    """

    text: str
    token: int
    logprobs: mx.array
    from_draft: bool
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: FinishReason | None
    latency_ms: float


def stream_generate(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int] | mx.array,
    *,
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    prompt_cache: Sequence[KVCache] | None = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    stop: str | Sequence[str] | None = None,
    prompt_progress_callback: PromptProgress | None = None,
) -> Iterator[GenerationResponse]:
    """Generate text token by token.

    Everything is checked, and the cache reserved, when this is called; tokens are computed as the result is iterated.

    Args:
        model, tokenizer: from :func:`kvant.load`.
        prompt: text, encoded as it is (a beginning-of-text token only where the tokenizer adds one and the text lacks
            it), or token ids. Messages go through ``tokenizer.apply_chat_template`` first.
        max_tokens: generate at most this many; -1: until the context is full.
        sampler: from :func:`kvant.engine.sampling.make_sampler`, or any function of log-probabilities (1, vocab) to
            a token (1,), such as mlx-lm's; default: greedy.
        logits_processors: functions of (tokens so far, logits), such as those of
            :func:`kvant.engine.sampling.make_logits_processors` or mlx-lm's.
        prompt_cache: from ``model.make_cache``; the prompt continues what it holds. Afterwards it holds the prompt
            and every generated token but the last. It serves one run at a time: a run left suspended on it is ended.
            Default: an 8-bit cache of prompt + max_tokens, at most the model's context.
        prefill_step_size: prompt tokens fed at a time.
        stop: a string or strings that end the text, which does not include them.
        prompt_progress_callback: called with (prompt tokens fed, prompt tokens in all).

    Yields:
        One :class:`GenerationResponse` a token; the last has a ``finish_reason``.

    Raises:
        ContextError: the prompt does not fit the reserved context.
        RuntimeError: another thread uses the cache, now or when a token is asked for; or this process was forked from
            one that had loaded a model.
        PromptError: an empty prompt, or ids the model does not know.
        ValueError: any other argument out of range. Nothing has been fed then.
    """
    started = time.perf_counter()
    ids = encode_prompt(tokenizer, prompt, model.config.vocab_size)
    cache = prompt_cache
    if cache is None:
        context = model.config.max_position_embeddings
        if len(ids) > context:
            raise ContextError(f"the prompt has {len(ids)} tokens; the model's context is {context}")
        _check_count("max_tokens", max_tokens, or_minus_one=True)
        cache = model.make_cache(context if max_tokens == -1 else min(len(ids) + max_tokens, context))
    return stream_tokens(
        model,
        tokenizer,
        ids,
        cache,
        max_tokens=max_tokens,
        sampler=sampler,
        logits_processors=logits_processors,
        prefill_step_size=prefill_step_size,
        stop=stop,
        progress=prompt_progress_callback,
        started=started,
    )


def stream_tokens(
    model: Decoder,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    cache: Sequence[KVCache],
    *,
    history: Sequence[int] = (),
    max_tokens: int,
    sampler: Sampler | None,
    logits_processors: Sequence[LogitsProcessor] | None,
    prefill_step_size: int,
    stop: str | Sequence[str] | None,
    progress: PromptProgress | None,
    started: float | None = None,
) -> Generator[GenerationResponse, None, None]:
    """:func:`stream_generate` from token ids into a given cache; ``history`` is what it holds, for the processors."""
    started = time.perf_counter() if started is None else started
    _check_count("max_tokens", max_tokens, or_minus_one=True)
    _check_count("prefill_step_size", prefill_step_size)
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    if not all(isinstance(text, str) and text for text in stops):
        raise ValueError(f"stop is {stop!r}; expected a string or strings, none empty")
    _check_layers(model, cache)
    turn = cache[0].turn
    with turn:
        end_run(cache)
        room = _room(model, cache, len(ids))
        _runs[cache[0]] = current = _Run()
    limit = room + 1  # what is sampled when the last token that fits has been fed
    if max_tokens != -1:
        limit = min(limit, max_tokens)
    cached = cache[0].offset

    def run() -> Generator[GenerationResponse, None, None]:
        steps = None
        try:
            logits = prefill(model, ids, cache, step_size=prefill_step_size, progress=progress)
            steps = decode(
                model,
                logits,
                [*history, *ids],
                cache,
                max_tokens=limit,
                sampler=sampler or greedy,
                logits_processors=logits_processors or (),
            )
            yield from respond(steps)
        except BaseException:
            if steps is None:  # interrupted: a cache with a part of the prompt would be of no use
                trim_to(cache, cached)
            raise
        finally:
            if steps is not None:
                steps.close()

    def respond(steps: Generator[tuple[int, mx.array], None, None]) -> Iterator[GenerationResponse]:
        text = TextStream(tokenizer, stops)
        first_ready = previous = started
        for count, (token, logprobs) in enumerate(steps, start=1):
            ready = time.perf_counter()
            first_ready = ready if count == 1 else first_ready
            reason: FinishReason | None = None
            if token in tokenizer.eos_token_ids:
                piece, reason = text.finish(), "stop"
            else:
                piece = text.add(token)
                if count == limit and not text.stopped:
                    piece, reason = piece + text.finish(), "length" if count == max_tokens else "context"
                if text.stopped:
                    reason = "stop"
            if reason:
                steps.close()  # before the last response: whoever has it may go on with the cache
            yield GenerationResponse(
                text=piece,
                token=token,
                logprobs=logprobs,
                from_draft=False,
                prompt_tokens=len(ids),
                prompt_tps=len(ids) / (first_ready - started),
                generation_tokens=count,
                generation_tps=(count - 1) / (ready - first_ready) if count > 1 else 0.0,
                peak_memory=mx.get_peak_memory() / 1e9,
                finish_reason=reason,
                latency_ms=(ready - previous) * 1e3,
            )
            previous = ready

    def take_turns() -> Generator[GenerationResponse, None, None]:
        try:
            while True:
                check_process()
                with turn:
                    if current.ended_by not in (None, get_ident()):
                        raise RuntimeError("the run was ended: another thread began one on its cache")
                    response = next(generator, None)
                if response is None:
                    return
                yield response
        finally:
            if current.ended_by is None:
                with turn:
                    generator.close()

    generator = run()
    current.generator = ref(generator)
    return take_turns()


@dataclass(slots=True)
class _Run:
    """A run that may hold a row ahead in a cache, and the thread that ended it for the sake of another run."""

    generator: ref[Generator[GenerationResponse, None, None]] | None = None
    ended_by: int | None = None


# A cache serves one run at a time: the next one ends it.
_runs: WeakKeyDictionary[KVCache, _Run] = WeakKeyDictionary()


def end_run(cache: Sequence[KVCache]) -> None:
    """End the run that was left suspended on this cache, if any, so that the cache holds what that run yielded.

    Raises:
        RuntimeError: another thread uses the cache.
    """
    if not cache or not isinstance(cache[0], KVCache):
        return
    with cache[0].turn:
        if (last := _runs.pop(cache[0], None)) is None:
            return
        last.ended_by = get_ident()
        if last.generator is not None and (generator := last.generator()) is not None:
            generator.close()


def generate(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int] | mx.array,
    *,
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    prompt_cache: Sequence[KVCache] | None = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    stop: str | Sequence[str] | None = None,
    prompt_progress_callback: PromptProgress | None = None,
    verbose: bool = False,
) -> str:
    """Generate text and return it whole; arguments and errors as in :func:`stream_generate`.

    Args:
        verbose: print the text as it comes and statistics after it.
    """
    pieces = []
    last = None
    for response in stream_generate(
        model,
        tokenizer,
        prompt,
        max_tokens=max_tokens,
        sampler=sampler,
        logits_processors=logits_processors,
        prompt_cache=prompt_cache,
        prefill_step_size=prefill_step_size,
        stop=stop,
        prompt_progress_callback=prompt_progress_callback,
    ):
        if verbose:
            print(response.text, end="", flush=True)
        pieces.append(response.text)
        last = response
    if verbose and last is not None:
        print()
        print(f"Prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.3f} tokens-per-sec")
        print(f"Generation: {last.generation_tokens} tokens, {last.generation_tps:.3f} tokens-per-sec")
        print(f"Peak memory: {last.peak_memory:.3f} GB")
    return "".join(pieces)


def _check_count(name: str, value: int, *, or_minus_one: bool = False) -> None:
    if or_minus_one and value == -1:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        also = ", or -1 for as many as the context holds" if or_minus_one else ""
        raise ValueError(f"{name} is {value!r}; expected at least 1{also}")


def _check_layers(model: Decoder, cache: Sequence[KVCache]) -> None:
    config = model.config
    if len(cache) != len(model.layers) or len({id(layer) for layer in cache}) != len(cache):
        raise ValueError(f"prompt_cache has {len(cache)} layers; expected {len(model.layers)}, none twice")
    for layer in cache:
        if not isinstance(layer, KVCache):
            raise ValueError(f"prompt_cache holds a {type(layer).__name__}; expected what model.make_cache returns")
        layer.check_shape(1, config.num_key_value_heads, config.head_dim)


def _room(model: Decoder, cache: Sequence[KVCache], prompt_tokens: int) -> int:
    """The tokens that fit after the prompt, or an error that says why the cache cannot take it."""
    config = model.config
    used = cache[0].offset
    limits = [layer.max_seq_len for layer in cache if layer.max_seq_len is not None]
    limit = min([*limits, config.max_position_embeddings])
    if used + prompt_tokens > limit:
        held = f", {used} of them used" if used else ""
        kind = "reserved" if limits and limit == min(limits) else "the model's context"
        verb = "are reserved" if kind == "reserved" else f"are {kind}"
        raise ContextError(f"the prompt has {prompt_tokens} tokens; {limit} {verb}{held}")
    return limit - used - prompt_tokens

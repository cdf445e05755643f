"""The loop users call: prompt in, text out, every token timed."""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import mlx.core as mx

from kvant.cache import KVCache
from kvant.engine.decode import decode, trim_to
from kvant.engine.detokenize import TextStream
from kvant.engine.prefill import PromptProgress, prefill
from kvant.engine.prompt import encode_prompt
from kvant.engine.sampling import LogitsProcessor, Sampler, greedy
from kvant.errors import ContextError
from kvant.models import Decoder

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

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
        generation_tps: tokens per second after the first; 0.0 for the first.
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
    tokenizer: "TokenizerWrapper",
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
        sampler: log-probabilities (1, vocab) -> token (1,), such as mlx-lm's ``make_sampler``; default: greedy.
        logits_processors: functions of (tokens so far, logits), such as mlx-lm's ``make_logits_processors``.
        prompt_cache: from ``model.make_cache``; the prompt continues what it holds. Afterwards it holds the prompt
            and every generated token but the last. Default: an 8-bit cache of prompt + max_tokens, at most the
            model's context.
        prefill_step_size: prompt tokens fed at a time.
        stop: a string or strings that end the text, which does not include them.
        prompt_progress_callback: called with (prompt tokens fed, prompt tokens in all).

    Yields:
        One :class:`GenerationResponse` a token; the last has a ``finish_reason``.

    Raises:
        ContextError: the prompt does not fit the reserved context.
        PromptError: an empty prompt, or ids the model does not know.
        ValueError: any other argument out of range. Nothing has been fed then.
    """
    started = time.perf_counter()
    if max_tokens != -1 and (isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1):
        raise ValueError(f"max_tokens is {max_tokens!r}; expected at least 1, or -1 for as many as the context holds")
    if isinstance(prefill_step_size, bool) or not isinstance(prefill_step_size, int) or prefill_step_size < 1:
        raise ValueError(f"prefill_step_size is {prefill_step_size!r}; expected at least 1")
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    if not all(isinstance(text, str) and text for text in stops):
        raise ValueError(f"stop is {stop!r}; expected a string or strings, none empty")
    ids = encode_prompt(tokenizer, prompt, model.config.vocab_size)
    cache = _reserve(model, len(ids), max_tokens) if prompt_cache is None else prompt_cache
    _check_room(len(ids), cache)
    text = TextStream(tokenizer, stops)

    def run() -> Iterator[GenerationResponse]:
        cached = cache[0].offset
        try:
            logits = prefill(model, ids, cache, step_size=prefill_step_size, progress=prompt_progress_callback)
        except BaseException:  # interrupted: a cache with a part of the prompt would be of no use
            trim_to(cache, cached)
            raise
        limit = sys.maxsize if max_tokens == -1 else max_tokens
        steps = decode(
            model,
            logits,
            ids,
            cache,
            max_tokens=limit,
            sampler=sampler or greedy,
            logits_processors=logits_processors or (),
        )
        first_ready = previous = started
        # The room left after the prompt, plus the token sampled when it is full.
        room = None if cache[0].max_seq_len is None else cache[0].max_seq_len - cache[0].offset + 1
        for count, (token, logprobs) in enumerate(steps, start=1):
            ready = time.perf_counter()
            first_ready = ready if count == 1 else first_ready
            ends_text = token in tokenizer.eos_token_ids
            piece = "" if ends_text else text.add(token)
            reason: FinishReason | None = None
            if ends_text or text.stopped:
                reason = "stop"
            elif count == limit:
                reason = "length"
            elif count == room:
                reason = "context"
            yield GenerationResponse(
                text=piece + text.finish() if reason else piece,
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
            if reason:
                steps.close()
                return

    return run()


def generate(
    model: Decoder,
    tokenizer: "TokenizerWrapper",
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
        verbose: print the text as it comes and statistics after it, as mlx-lm does.
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


def _reserve(model: Decoder, prompt_tokens: int, max_tokens: int) -> Sequence[KVCache]:
    context = model.config.max_position_embeddings
    if prompt_tokens > context:
        raise ContextError(f"the prompt has {prompt_tokens} tokens; the model's context is {context}")
    return model.make_cache(context if max_tokens == -1 else min(prompt_tokens + max_tokens, context))


def _check_room(prompt_tokens: int, cache: Sequence[KVCache]) -> None:
    if not cache:
        raise ValueError("prompt_cache is empty; expected one cache a layer")
    limit, used = cache[0].max_seq_len, cache[0].offset
    if limit is not None and used + prompt_tokens > limit:
        held = f", {used} of them used" if used else ""
        raise ContextError(f"the prompt has {prompt_tokens} tokens; {limit} are reserved{held}")

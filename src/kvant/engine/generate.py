"""The functions that users call: prompt in, text out, every token timed."""

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from kvant.cache import KVCache, ModelCache
from kvant.engine.cache_scheduler import CacheScheduler
from kvant.engine.model_drafts import asked_drafts
from kvant.engine.processors import LogitsProcessor
from kvant.engine.request import (
    PREFILL_STEP_SIZE,
    PromptProgress,
    Request,
    cache_options,
    check_stops,
    reservation,
)
from kvant.engine.sampler import Sampler
from kvant.engine.stream import GenerationResponse, TextRequest, responses
from kvant.errors import ArgumentError
from kvant.models import LanguageModel
from kvant.text.prompt import encode_prompt
from kvant.text.tokenizer import Tokenizer


def stream_generate(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int] | mx.array,
    max_tokens: int = 256,
    draft_model: LanguageModel | None = None,
    stream: None = None,
    *,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    max_kv_size: int | None = None,
    prompt_cache: Sequence[KVCache] | None = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    kv_bits: int | None = None,
    kv_group_size: int | None = None,
    quantized_kv_start: int | None = None,
    stop: str | Sequence[str] | None = None,
    prompt_progress_callback: PromptProgress | None = None,
    input_embeddings: mx.array | None = None,
    num_draft_tokens: int | None = None,
    draft: str = "none",
) -> Iterator[GenerationResponse]:
    """Generate text token by token. The arguments are mlx-lm's, ``stop`` and ``draft``.

    The call checks everything and reserves the cache; iterating over the result computes the tokens.

    Args:
        model, tokenizer: from :func:`kvant.load`.
        prompt: text, encoded as it is (with a beginning-of-text token only if the tokenizer adds one and the
            text lacks it), or token ids. Messages go through ``tokenizer.apply_chat_template`` first.
        max_tokens: generate at most this many; -1: until the context is full.
        draft_model, num_draft_tokens: a smaller model with the same tokenizer, and how many tokens it drafts
            per step, 1 to 7, default 3. It has its own cache with the model's format and reservation.
        stream: must be None.
        input_embeddings: (T, hidden), used instead of the embeddings of the prompt's T ids if the model
            supports it. The prompt may then be empty: logits processors see id 0 for each.
        sampler: from :func:`kvant.sample_utils.make_sampler`, or any function from log-probabilities
            (1, vocab) to a token (1,), such as mlx-lm's; default: greedy.
        logits_processors: functions of (tokens so far, logits), such as those of
            :func:`kvant.sample_utils.make_logits_processors` or mlx-lm's.
        max_kv_size: reserve at most this many tokens. If prompt + max_tokens exceed it, mlx-lm overwrites the
            oldest tokens; here the text ends with the ``finish_reason`` "context".
        prompt_cache: from ``model.make_cache``; the prompt continues its tokens. Afterwards it has the prompt
            and, if there is room, every generated token, as in mlx-lm; before the end all but the last. It
            serves one generation at a time: an older suspended one raises a RuntimeError when resumed.
            Default: a cache reserved for prompt + max_tokens, at most the model's context.
        prefill_step_size: prompt tokens fed at a time.
        kv_bits, kv_group_size: of the reserved cache; default: 8 bits in groups of 32. 0 bits: no
            quantization, which is mlx-lm's default. With a ``prompt_cache``, these and max_kv_size must be
            its own.
        quantized_kv_start: 0 or None. A cache is quantized from the first token.
        stop: one or several strings that end the text, which does not include them.
        prompt_progress_callback: called with (prompt tokens fed, prompt tokens in all).
        draft: "prompt": verify several tokens per step where text repeats. The text is the same except for
            rounding, and faster if drafts pay. "none": one token per step, unless there is a draft model.

    Yields:
        One :class:`GenerationResponse` per token; the last one has a ``finish_reason``.

    Raises:
        ContextError: the prompt does not fit the reserved context.
        RuntimeError: another thread uses the cache, now or later, or this process was forked from one that
            had loaded a model.
        ModelError: the draft model has another tokenizer.
        PromptError: the prompt is empty or has unknown ids.
        ValueError: any other argument is out of range. Nothing has been fed then.
    """
    started = time.perf_counter()
    if stream is not None:
        raise ArgumentError(
            "stream", f"is a {type(stream).__name__}; expected None: MLX's default stream computes"
        )
    options = cache_options(max_kv_size, kv_bits, kv_group_size)
    if quantized_kv_start and kv_bits != 0:
        said = f"is {quantized_kv_start!r}; a cache is quantized from the first token: expected 0"
        raise ArgumentError("quantized_kv_start", said)
    stops = check_stops(stop)
    drafts = asked_drafts(draft, draft_model, num_draft_tokens, model, tokenizer)
    if input_embeddings is not None and not isinstance(prompt, str) and not len(prompt):
        prompt = [0] * len(input_embeddings)
    ids = encode_prompt(tokenizer, prompt, model.config.vocab_size)
    if input_embeddings is not None:
        _check_embeddings(input_embeddings, len(ids), model, drafting=drafts is not None)
    if prompt_cache is None:
        cache = model.reserve_cache(reservation(model, len(ids), max_tokens, max_kv_size), options)
    else:
        cache = model.check_cache(prompt_cache)
        check_confirmed(cache, kv_bits, kv_group_size, max_kv_size)
    scheduler = CacheScheduler(model, cache, prefill_step_size=prefill_step_size)
    request = Request(
        scheduler.ids + ids,
        max_tokens,
        sampler,
        tuple(logits_processors or ()),
        tokenizer.eos_token_ids,
        drafts=None if drafts is None else drafts.for_pool(cache.pool),
        embeddings=input_embeddings,
        progress=prompt_progress_callback,
        keep_logprobs=True,
    )
    answer = responses(scheduler, [TextRequest(request, stops)], tokenizer, started)
    return answer if prompt_cache is None else _then_keep_last(scheduler, answer)


def check_confirmed(
    cache: ModelCache, kv_bits: int | None, kv_group_size: int | None, max_kv_size: int | None
) -> None:
    """Raise an ArgumentError for an argument that differs from the caller's cache; None is ignored."""
    facts = [("max_kv_size", max_kv_size, cache.max_seq_len)]
    every_bits = {bits for each in cache.pool.formats for bits in each.bits} or {0}
    facts += [("kv_bits", kv_bits, bits) for bits in every_bits]
    for each in cache.pool.formats:
        # A bridged layer whose widths the group does not divide has a smaller group.
        group = math.gcd(kv_group_size or 0, each.head_dim, each.value_head_dim)
        if each.kv_bits and each.kv_group_size != group:
            facts.append(("kv_group_size", kv_group_size, each.kv_group_size))
    for name, value, actual in facts:
        if value not in (None, actual):
            raise ArgumentError(name, f"is {value}; {actual} is that of the", "prompt_cache")


def _check_embeddings(embeddings: object, num_ids: int, model: LanguageModel, *, drafting: bool) -> None:
    """Raise an ArgumentError unless these can replace the embeddings of ``num_ids`` ids."""
    if model.embedding_size is None:
        reason = f"this {model.config.model_type} takes only ids"
        raise ArgumentError("input_embeddings", f"is given; expected None: {reason}")
    if drafting:
        raise ArgumentError("input_embeddings", "is given; expected None: drafts need ids")
    expected = (num_ids, model.embedding_size)
    actual = embeddings.shape if isinstance(embeddings, mx.array) else type(embeddings).__name__
    if actual != expected:
        problem = f"is {actual}; expected {expected} for the prompt's {num_ids} tokens"
        raise ArgumentError("input_embeddings", problem)


def _then_keep_last(
    scheduler: CacheScheduler, answer: Iterator[GenerationResponse]
) -> Iterator[GenerationResponse]:
    yield from answer
    scheduler.keep_last()


def generate(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int] | mx.array,
    verbose: bool = False,
    **options: Any,
) -> str:
    """Generate text and return it whole.

    Args:
        model, tokenizer, prompt, options: as in :func:`stream_generate`, which also describes the errors.
        verbose: print the text as it is generated, then statistics.
    """
    pieces = []
    last = None
    for response in stream_generate(model, tokenizer, prompt, **options):
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

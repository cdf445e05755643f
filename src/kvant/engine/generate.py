"""The loop users call: prompt in, text out, every token timed."""

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

    Everything is checked, and the cache reserved, when this is called; tokens are computed as the result is
    iterated.

    Args:
        model, tokenizer: from :func:`kvant.load`.
        prompt: text, encoded as it is (a beginning-of-text token only where the tokenizer adds one and the
            text lacks it), or token ids. Messages go through ``tokenizer.apply_chat_template`` first.
        max_tokens: generate at most this many; -1: until the context is full.
        draft_model, num_draft_tokens: a smaller model with the same tokenizer, which drafts at most 1 to 7
            tokens a step, default 3. It has a cache of its own, with the format and reservation of the
            model's.
        stream: refused.
        input_embeddings: (T, hidden) in place of the embeddings of the prompt's T ids, where the model takes
            them. The prompt may be empty then: logits processors see id 0 for each.
        sampler: from :func:`kvant.sample_utils.make_sampler`, or any function of log-probabilities (1, vocab)
            to a token (1,), such as mlx-lm's; default: greedy.
        logits_processors: functions of (tokens so far, logits), such as those of
            :func:`kvant.sample_utils.make_logits_processors` or mlx-lm's.
        max_kv_size: reserve at most so many tokens, where that is less than prompt + max_tokens. mlx-lm
            overwrites the oldest tokens then; here the text ends, with the ``finish_reason`` "context".
        prompt_cache: from ``model.make_cache``; the prompt continues what it holds. Afterwards it holds the
            prompt and every generated token, where there is room, as in mlx-lm; before the end all but the
            last. It serves one run at a time: a run left suspended on it raises a RuntimeError when it is
            asked for more.
            Default: one that is reserved for prompt + max_tokens, at most the model's context.
        prefill_step_size: prompt tokens fed at a time.
        kv_bits, kv_group_size: of the cache that is reserved; default: 8 bits in groups of 32. 0 bits: no
            quantization, which is mlx-lm's default. With a ``prompt_cache`` they can only confirm what it
            has, as max_kv_size can.
        quantized_kv_start: 0 or None. A cache is quantized from the first token.
        stop: a string or strings that end the text, which does not include them.
        prompt_progress_callback: called with (prompt tokens fed, prompt tokens in all).
        draft: "prompt": where text repeats, verify several tokens a step. It is the same text but for
            rounding, and quicker where that pays. "none": one token a step, unless there is a draft model.

    Yields:
        One :class:`GenerationResponse` a token; the last has a ``finish_reason``.

    Raises:
        ContextError: the prompt does not fit the reserved context.
        RuntimeError: another thread uses the cache, now or when a token is asked for; or this process was
            forked from one that had loaded a model.
        ModelError: a draft model with another tokenizer.
        PromptError: an empty prompt, or ids the model does not know.
        ValueError: any other argument out of range. Nothing has been fed then.
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
    return answer if prompt_cache is None else _kept(scheduler, answer)


def check_confirmed(
    cache: ModelCache, kv_bits: int | None, kv_group_size: int | None, max_kv_size: int | None
) -> None:
    """Refuse what a cache of the caller's is not; None: nothing is said of it."""
    said = [("max_kv_size", max_kv_size, cache.max_seq_len)]
    said += [
        ("kv_bits", kv_bits, own) for own in {own for each in cache.pool.formats for own in each.bits} or {0}
    ]
    for own in cache.pool.formats:
        # A bridged layer whose widths the group does not divide has a smaller one.
        if own.kv_bits and own.kv_group_size != math.gcd(
            kv_group_size or 0, own.head_dim, own.value_head_dim
        ):
            said.append(("kv_group_size", kv_group_size, own.kv_group_size))
    for name, given, held in said:
        if given not in (None, held):
            raise ArgumentError(name, f"is {given}; {held} is that of the", "prompt_cache")


def _check_embeddings(embeddings: object, num_ids: int, model: LanguageModel, *, drafting: bool) -> None:
    """Refuse what cannot replace the embeddings of so many ids."""
    if model.embedding_size is None:
        reason = f"this {model.config.model_type} takes ids alone"
        raise ArgumentError("input_embeddings", f"is given; expected None: {reason}")
    if drafting:
        raise ArgumentError("input_embeddings", "is given; expected None: drafts need ids")
    expected = (num_ids, model.embedding_size)
    given = embeddings.shape if isinstance(embeddings, mx.array) else type(embeddings).__name__
    if given != expected:
        said = f"is {given}; expected {expected} for the prompt's {num_ids} tokens"
        raise ArgumentError("input_embeddings", said)


def _kept(scheduler: CacheScheduler, answer: Iterator[GenerationResponse]) -> Iterator[GenerationResponse]:
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
        model, tokenizer, prompt, options: as :func:`stream_generate` has them; errors too.
        verbose: print the text as it comes and statistics after it.
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

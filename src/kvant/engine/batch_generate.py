"""Many prompts at once through one reserved pool: mlx-lm's ``batch_generate``."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from kvant.cache import KVCache, ModelCache
from kvant.engine.drafts import DraftCounts
from kvant.engine.model_drafts import PooledDrafts, asked_drafts, check_drafts
from kvant.engine.processors import LogitsProcessor
from kvant.engine.request import (
    CHUNK,
    PREFILL_STEP_SIZE,
    Request,
    cache_options,
    check_count,
    check_stops,
    pool_reservation,
    reservation,
)
from kvant.engine.sampler import Sampler, for_a_run, for_answer, greedy
from kvant.engine.scheduler import Scheduler
from kvant.engine.stream import GenerationResponse, TextRequest, responses
from kvant.errors import ArgumentError, ContextError, PromptError
from kvant.models import LanguageModel
from kvant.sizes import format_bytes
from kvant.text.prompt import encode_prompt
from kvant.text.tokenizer import Tokenizer

MOST_ROWS = 1024  # of a deterministic step, which always has completion_batch_size rows


@dataclass(kw_only=True, slots=True)
class BatchStats:
    """Statistics of a batch, with mlx-lm's fields, ``reserved_bytes`` and ``drafts``."""

    prompt_tokens: int = 0  # fed prompt tokens; a shared prefix is fed once
    prompt_time: float = 0.0  # seconds for feeding prompts
    generation_tokens: int = 0  # including end-of-text tokens
    # each step gives every running sequence one token and its accepted drafts
    generation_steps: int = 0
    decode_time: float = 0.0  # seconds for these steps
    wall_time: float = 0.0  # seconds in all
    peak_memory: float = 0.0  # MLX's peak so far, in GB (1e9 bytes)
    reserved_bytes: int = 0  # of the pool and a draft model's pool
    drafts: DraftCounts | None = None  # None without drafts

    @property
    def prompt_tps(self) -> float:
        """Return prompt tokens per second of feeding."""
        return self.prompt_tokens / self.prompt_time if self.prompt_time else 0.0

    @property
    def decode_tps(self) -> float:
        """Return generated tokens per second of decoding steps."""
        return self.generation_tokens / self.decode_time if self.decode_time else 0.0

    @property
    def generation_time(self) -> float:
        """Return the seconds without feeding prompts."""
        return max(0.0, self.wall_time - self.prompt_time)

    @property
    def generation_tps(self) -> float:
        """Return generated tokens per second, without the time for feeding prompts."""
        return self.generation_tokens / self.generation_time if self.generation_time else 0.0

    @property
    def overhead_time(self) -> float:
        """Return the seconds without feeding and decoding steps."""
        return max(0.0, self.wall_time - self.prompt_time - self.decode_time)


@dataclass(slots=True)
class BatchResponse:
    """The answers, in the order of the prompts. The fields are mlx-lm's; None: not requested."""

    texts: list[str]  # without stop strings and end-of-text tokens
    stats: BatchStats
    caches: list[ModelCache | None] | None  # of prompt and answer, each independent: cache.save(path) works
    token_ids: list[list[int]] | None = None  # of the answers, without end-of-text tokens
    logprobs: list[list[float]] | None = None  # of these tokens


def batch_generate(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int] | mx.array],
    prompt_caches: Sequence[Sequence[KVCache] | None] | None = None,
    max_tokens: int | Sequence[int] = 128,
    verbose: bool = False,
    return_prompt_caches: bool = False,
    return_token_ids: bool = False,
    return_logprobs: bool = False,
    *,
    stop_tokens: Sequence[Sequence[int]] | None = None,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    completion_batch_size: int = 32,
    prefill_batch_size: int = 8,
    prefill_step_size: int | None = None,
    max_kv_size: int | None = None,
    stream: None = None,
    samplers: Sequence[Sampler | None] | None = None,
    stop: str | Sequence[str] | None = None,
    kv_bits: int | None = None,
    kv_group_size: int | None = None,
    deterministic: bool = False,
    draft: str = "none",
    draft_model: LanguageModel | None = None,
    num_draft_tokens: int | None = None,
) -> BatchResponse:
    """Answer many prompts at once. The arguments up to ``stream`` are mlx-lm's, including BatchGenerator's.

    One pool is reserved before the first token, for all tokens of the prompts that run at once. It never
    grows.

    Args:
        model, tokenizer: from :func:`kvant.load`.
        prompts: each as in :func:`kvant.stream_generate`: token ids, as in mlx-lm, or text.
        prompt_caches: for each prompt a cache that it continues, or None. They are copied and not changed.
        max_tokens: maximum length of each answer; one int for all or one per prompt.
        verbose: print the reservation, progress and statistics.
        return_prompt_caches, return_token_ids, return_logprobs: see :class:`BatchResponse`.
        stop_tokens: sequences of token ids, each of which ends an answer, instead of the tokenizer's
            end-of-text tokens.
        sampler: for all prompts. With a seed, prompt i draws with seed + i.
        completion_batch_size: maximum number of prompts that run at once; up to 1,024 if deterministic.
        prefill_batch_size: completion_batch_size is at least this, as in mlx-lm. One prompt is fed at a time.
        prefill_step_size: maximum number of prompt tokens fed at a time; default: 512. While an answer runs,
            and if deterministic, at most 128.
        stream: must be None.
        samplers: one for each prompt, or None for ``sampler``. Each draws with its own seed.
        logits_processors, max_kv_size, stop, kv_bits, kv_group_size: as in :func:`kvant.stream_generate`, for
            all.
        deterministic: make a prompt's answer independent of the others, on a CPU to the last bit. It takes
            longer.
        draft, draft_model, num_draft_tokens: as in :func:`kvant.stream_generate`; every sequence drafts for
            itself. A draft model needs a second pool of as many sequences.

    Raises:
        ContextError: a prompt does not fit the context or max_kv_size, or the pool does not fit this machine.
        PromptError: a prompt is empty or has unknown ids.
        ValueError: any other argument is out of range. Nothing has been computed then.
    """
    if stream is not None:
        raise ArgumentError(
            "stream", f"is a {type(stream).__name__}; expected None: MLX's default stream computes"
        )
    per_prompt = {"prompt_caches": prompt_caches, "max_tokens": max_tokens, "samplers": samplers}
    for name, values in per_prompt.items():
        if isinstance(values, Sequence) and len(values) != len(prompts):
            raise ArgumentError(
                name, f"has {len(values)} entries; expected {len(prompts)}, one for each prompt"
            )
    ends = [[token] for token in tokenizer.eos_token_ids] if stop_tokens is None else stop_tokens
    for row in ends:
        if not isinstance(row, Sequence) or not row or any(type(token) is not int for token in row):
            raise ArgumentError(
                "stop_tokens", f"has {row!r:.80}; expected rows of token ids, such as [[2], [13, 13]]"
            )
    check_count("completion_batch_size", completion_batch_size)
    check_count("prefill_batch_size", prefill_batch_size)
    step_size = prefill_step_size
    if step_size is None:
        step_size = CHUNK if deterministic else PREFILL_STEP_SIZE
    check_count("prefill_step_size", step_size)
    if deterministic and step_size < CHUNK:
        raise ArgumentError(
            "prefill_step_size", f"is {step_size}; expected {CHUNK} or more with", "deterministic"
        )
    at_once = max(completion_batch_size, prefill_batch_size)
    if deterministic and at_once > MOST_ROWS:
        name = "completion_batch_size" if at_once == completion_batch_size else "prefill_batch_size"
        raise ArgumentError(name, f"is {at_once}; expected at most {MOST_ROWS} with", "deterministic")
    drafts = asked_drafts(draft, draft_model, num_draft_tokens, model, tokenizer)
    options = cache_options(max_kv_size, kv_bits, kv_group_size)
    stops = check_stops(stop)
    shared = for_a_run(sampler or greedy)
    requests: list[TextRequest] = []
    needs: list[int] = []
    for number, prompt in enumerate(prompts):
        limit = max_tokens[number] if isinstance(max_tokens, Sequence) else max_tokens
        cache = None if prompt_caches is None else prompt_caches[number]
        own_sampler = None if samplers is None else samplers[number]
        try:
            ids = encode_prompt(tokenizer, prompt, model.config.vocab_size)
            cached = 0 if cache is None else model.check_cache(cache).offset
            check_count("max_tokens", limit)
            needs.append(reservation(model, cached + len(ids), limit, max_kv_size))
        except (ContextError, PromptError) as error:
            raise type(error)(f"prompts[{number}]: {error}") from error
        request = Request(
            ids,
            max_tokens=limit,
            sampler=for_answer(shared, number) if own_sampler is None else own_sampler,
            logits_processors=tuple(logits_processors or ()),
            stop_tokens={end[0] for end in ends if len(end) == 1},
            cache=cache,
            keep_cache=return_prompt_caches,
        )
        requests.append(TextRequest(request, stops, [end for end in ends if len(end) > 1]))
    stats = BatchStats()
    pieces: list[list[GenerationResponse]] = [[] for _ in requests]

    def say(text: str, end: str = "\n") -> None:
        if verbose:
            print(f"[batch_generate] {text}", end=end)

    if requests:
        # Deterministic steps have the same number of rows for any number of prompts.
        rows = at_once if deterministic else min(at_once, len(needs))
        size = pool_reservation(needs, at_once)
        pool = model.make_pool(
            size, sequences=rows, max_seq_len=max(needs), prefill_step_size=step_size, options=options
        )
        check_drafts(drafts, pool, deterministic=deterministic)
        stats.reserved_bytes = pool.nbytes
        pool_drafts = None if drafts is None else drafts.for_pool(pool)
        stats.reserved_bytes += pool_drafts.pool.nbytes if isinstance(pool_drafts, PooledDrafts) else 0
        requests = [replace(each, request=replace(each.request, drafts=pool_drafts)) for each in requests]
        say(f"Reserved: {format_bytes(stats.reserved_bytes)} for {pool.max_sequences} sequences at once")
        scheduler = Scheduler(model, pool, max_batch=pool.max_sequences, deterministic=deterministic)
        finished = 0
        started = time.perf_counter()
        for piece in responses(scheduler, requests, tokenizer):
            pieces[piece.number].append(piece)
            if piece.finish_reason is not None:
                finished += 1
                say(
                    f"Finished processing {finished}/{len(requests)}",
                    "\n" if finished == len(requests) else " ...\r",
                )
        stats.wall_time = time.perf_counter() - started
        stats.prompt_tokens = sum(each[0].prompt_tokens for each in pieces)
        stats.generation_tokens = sum(map(len, pieces))
        stats.prompt_time = scheduler.feeding_s
        stats.decode_time = scheduler.decoding_s
        stats.generation_steps = scheduler.steps
        stats.peak_memory = mx.get_peak_memory() / 1e9
        stats.drafts = None if drafts is None else scheduler.drafts
    say(f"Prompt: {stats.prompt_tokens} tokens, {stats.prompt_tps:.3f} tokens-per-sec")
    say(f"Generation: {stats.generation_tokens} tokens, {stats.generation_tps:.3f} tokens-per-sec")
    if stats.drafts is not None:
        say(stats.drafts.describe().capitalize())
    say(f"Peak memory: {stats.peak_memory:.3f} GB")
    # mlx-lm does not count the token that ends a text
    counted = [[piece for piece in each if piece.finish_reason != "stop"] for each in pieces]
    return BatchResponse(
        texts=["".join(piece.text for piece in each) for each in pieces],
        stats=stats,
        caches=[each[-1].cache for each in pieces] if return_prompt_caches else None,
        token_ids=[[piece.token for piece in each] for each in counted] if return_token_ids else None,
        logprobs=[[piece.logprob for piece in each] for each in counted] if return_logprobs else None,
    )

"""Several continuations of one prompt, which is read once."""

import time
from collections.abc import Iterator, Sequence

import mlx.core as mx

from kvant.cache import KVCache
from kvant.engine.draw import Sampler, for_answer
from kvant.engine.generate import responses
from kvant.engine.limits import check_count, check_stops, reservation
from kvant.engine.processors import LogitsProcessor
from kvant.engine.response import GenerationResponse
from kvant.engine.run import PREFILL_STEP_SIZE, PromptProgress, Run
from kvant.models import LanguageModel
from kvant.text.prompt import encode_prompt
from kvant.text.tokenizer import Tokenizer


def stream_choices(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int] | mx.array,
    n: int,
    *,
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    prompt_cache: Sequence[KVCache] | None = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    stop: str | Sequence[str] | None = None,
    prompt_progress_callback: PromptProgress | None = None,
) -> Iterator[tuple[int, GenerationResponse]]:
    """Continue a prompt ``n`` times, one continuation after another.

    After each the cache goes back to the prompt's end. A cache with windows or states that cannot is forked first: two
    caches are held then, whatever ``n`` is. Afterwards the cache holds the prompt and the last continuation.

    Args:
        n: how many, at least 1.
        sampler: as in :func:`kvant.stream_generate`, which gives what the first continuation is. Each further one has
            the next seed. A sampler without a seed is used for all: greedy ones give the same text again.

    Other arguments and errors are those of :func:`kvant.stream_generate`.

    Yields:
        The number of the continuation, from 0, and its response. Only the first one's has ``prompt_tokens``.
    """
    started = time.perf_counter()
    check_count("n", n)
    stops = check_stops(stop)
    ids = encode_prompt(tokenizer, prompt, model.config.vocab_size)
    given = prompt_cache
    if given is None:
        given = model.make_cache(reservation(model, len(ids), max_tokens))
    cache = model.check_cache(given, batch=1)

    def run(number: int, cache: Sequence[KVCache], ids: Sequence[int], logits: mx.array | None) -> Run:
        return Run(
            model,
            ids,
            cache,
            max_tokens=max_tokens,
            sampler=None if sampler is None else for_answer(sampler, number),
            logits_processors=logits_processors or (),
            stop_tokens=tokenizer.eos_token_ids,
            prefill_step_size=prefill_step_size,
            progress=prompt_progress_callback,
            logits=logits,
        )

    first = run(0, cache, ids, None)

    def continuations() -> Iterator[tuple[int, GenerationResponse]]:
        begun = started
        logits = first.read_prompt()
        end = cache.offset
        for number in range(n):
            is_last = number == n - 1
            own = cache if is_last or cache.goes_back else cache.fork()
            try:
                each = first if number == 0 and own is cache else run(number, own, [], logits)
                for response in responses(each, tokenizer, stops, begun, 0 if number else len(ids)):
                    yield number, response
            finally:
                if own is not cache:
                    own.release()
            if not is_last:
                cache.trim_to(end)
            begun = time.perf_counter()

    return continuations()

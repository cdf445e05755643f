"""A scheduler's requests and tokens, and the size of reservations."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import mlx.core as mx

from kvant.cache import KVCache, ModelCache
from kvant.cache.kv_format import KVFormat
from kvant.cache.options import CacheOptions
from kvant.cache.pages import PAGE_SIZE, pages_for
from kvant.engine.drafts import Drafts
from kvant.engine.processors import LogitsProcessor
from kvant.engine.sampler import Sampler
from kvant.errors import ContextError
from kvant.models import LanguageModel
from kvant.models.language_model import context_limit

FinishReason = Literal["stop", "length", "context", "cancelled", "error"]
PromptProgress = Callable[[int, int], None]
# Prompt tokens fed between two decoding steps: at 64 a prefill loses a quarter of its speed (measured).
CHUNK = 128
# Default number of prompt tokens per chunk, which bounds the memory of activations.
PREFILL_STEP_SIZE = 512


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """One prompt, and the options of its answers.

    Plain data. The object is also the handle: use it to cancel, and to match tokens to requests.
    """

    prompt: Sequence[int] | mx.array  # token ids, at least one
    max_tokens: int = 256  # maximum length of each answer; -1: until the context is full
    sampler: Sampler | None = None  # draws at each position like kvant.stream_generate; None: greedy
    # called with all tokens so far, of the cache, the prompt and the answer, and with logits (1, vocab). May
    # include a Grammar, which each answer follows from its beginning
    logits_processors: Sequence[LogitsProcessor] = ()
    stop_tokens: Collection[int] = ()  # token ids that end an answer, which includes them
    salt: bytes = b""  # prefixes are shared only between requests with the same salt
    top_logprobs: int = 0  # how many of the most probable tokens to return with each token
    # number of answers; the prompt is fed once. Answer i draws with seed + i
    answers: int = 1
    # of one sequence, from model.make_cache; the prompt continues its tokens. It is only read, and must not
    # be used otherwise before the first token
    cache: Sequence[KVCache] | None = None
    # return each answer's cache with its last token. It has prompt and answer, and is reserved for as many
    # tokens as ``cache`` or, without one, a sequence of the pool, or for more if they need it
    keep_cache: bool = False
    # the source of drafts; each answer drafts for itself. The tokens are the same, except for rounding
    drafts: Drafts | None = None
    # first tokens of the answer, if the prompt ends with them; a grammar continues after them
    begun: Sequence[int] = ()
    # called with (prompt tokens fed, prompt tokens to feed), first with 0; shared tokens are not counted
    progress: PromptProgress | None = None
    keep_logprobs: bool = False  # return the log-probabilities of the whole vocabulary with each token
    # return the prompt's log-probabilities, with ``top_logprobs`` others at each place, with an answer's
    # first token. The prompt then shares no prefix of earlier requests
    prompt_logprobs: bool = False
    embeddings: mx.array | None = None  # (T, hidden), used instead of those of the prompt's last T ids


@dataclass(slots=True)
class Token:
    """A token of one answer, or its end."""

    request: Request
    answer: int  # the number of the answer, from 0
    token: int | None  # its id; None if an answer is cancelled or fails
    logprob: float | None = None  # in the sampler's input
    top_logprobs: Sequence[tuple[int, float]] = ()  # most probable first
    logprobs: mx.array | None = None  # (vocab,), if the request keeps them
    # None: the answer continues. "stop": the token is one of ``stop_tokens``; "length": ``max_tokens`` is
    # reached; "context": the context or the reservation is full; "cancelled"; "error"
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0  # prompt tokens that other requests had fed
    cache: ModelCache | None = None  # with the last token, if the request keeps it
    error: BaseException | None = None  # why an answer failed
    from_draft: bool = False  # whether the token was drafted
    embedding: mx.array | None = None  # (D,) float32: the vector of a text, instead of a token
    # id, log-probability and most probable tokens of each token of the prompt except the first
    prompt_logprobs: Sequence[tuple[int, float, Sequence[tuple[int, float]]]] = ()


def check_count(name: str, value: int, *, or_minus_one: bool = False) -> None:
    """Raise a ValueError unless the argument is at least 1, or -1 where that is allowed."""
    if or_minus_one and value == -1:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        also = ", or -1 for as many as the context holds" if or_minus_one else ""
        raise ValueError(f"{name} is {value!r}; expected at least 1{also}")


def check_stops(stop: str | Sequence[str] | None) -> list[str]:
    """Return stop strings as a list; raise a ValueError if one is not a string or empty."""
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    if not all(isinstance(text, str) and text for text in stops):
        raise ValueError(f"stop is {stop!r}; expected a string or strings, none empty")
    return stops


def reservation(
    model: LanguageModel, prompt_tokens: int, max_tokens: int, max_kv_size: int | None = None
) -> int:
    """Return the tokens to reserve for prompt and answer, at most the context and ``max_kv_size``."""
    for whose, limit in (
        ("the model's context", model.config.max_position_embeddings),
        ("max_kv_size", max_kv_size),
    ):
        if limit is not None and prompt_tokens > limit:
            raise ContextError(f"the prompt has {prompt_tokens} tokens; {whose} is {limit}")
    check_count("max_tokens", max_tokens, or_minus_one=True)
    limits = [] if max_tokens == -1 else [prompt_tokens + max_tokens]
    limits += [] if max_kv_size is None else [max_kv_size]
    needed = context_limit(model, min(limits, default=None))
    if needed is None:
        raise ValueError(
            "max_tokens is -1, and the model has no context limit; expected a number or a prompt_cache"
        )
    return needed


def pool_reservation(needs: Sequence[int], at_once: int) -> int:
    """Return the tokens, in whole pages, of a pool in which any ``at_once`` of these sequences can run."""
    return PAGE_SIZE * sum(sorted(map(pages_for, needs), reverse=True)[:at_once])


def limit_in_words(model: LanguageModel, limit: int) -> str:
    """Describe a limit of :func:`kvant.models.language_model.context_limit` in words."""
    whose = "the model's context" if limit == model.config.max_position_embeddings else "reserved"
    return f"{limit} are {whose}"


def cache_options(
    max_kv_size: int | None,
    kv_bits: int | None,
    kv_group_size: int | None,
    kv_format: KVFormat | str | Path | None = None,
    kv_tail: bool | None = None,
) -> CacheOptions:
    """Check mlx-lm's keywords for a cache to reserve, and return its options."""
    if max_kv_size is not None:
        check_count("max_kv_size", max_kv_size)
    return CacheOptions.from_keywords(
        kv_bits=kv_bits, kv_group_size=kv_group_size, kv_format=kv_format, kv_tail=kv_tail
    )

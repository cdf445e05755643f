"""What a scheduler is asked for, what is reserved for it, and what it hands out."""

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
# prompt tokens between two tokens of others: a quarter of a prefill's speed is lost at 64 (measured)
CHUNK = 128
# prompt tokens a chunk, where nobody says how many: it bounds the memory of activations
PREFILL_STEP_SIZE = 512


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """One prompt, and what is wanted of its answers. It is plain data; whoever submits it keeps it as its
    name.
    """

    prompt: Sequence[int] | mx.array  # token ids, at least one
    max_tokens: int = 256  # of each answer at most; -1: until the context is full
    sampler: Sampler | None = None  # draws at each position as kvant.stream_generate does; None: greedy
    # called with all tokens so far, of the cache, the prompt and the answer, and with logits (1, vocab). A
    # Grammar is one too: each answer follows it from its beginning
    logits_processors: Sequence[LogitsProcessor] = ()
    stop_tokens: Collection[int] = ()  # token ids that end an answer, which includes them
    salt: bytes = b""  # prefixes are shared only between requests with the same one
    top_logprobs: int = 0  # how many of the most probable tokens are told with each token
    # the prompt is fed once for all. Answer i has the seed + i, the first that of a single one
    answers: int = 1
    # of one sequence, from model.make_cache; the prompt continues what it holds. It is only read, and must
    # not be used otherwise before the first token
    cache: Sequence[KVCache] | None = None
    # an answer's last token brings a cache of its own with prompt and answer, reserved for as many tokens as
    # ``cache``, or what they need; without one, for as many as a sequence of the pool can have
    keep_cache: bool = False
    # each answer drafts for itself, from these. The tokens are the same, but for rounding
    drafts: Drafts | None = None
    # first tokens of the answer, if the prompt ends with them: a grammar goes on after them
    begun: Sequence[int] = ()
    # called with (prompt tokens fed, prompt tokens in all), first with 0; those shared with others do not
    # count
    progress: PromptProgress | None = None
    keep_logprobs: bool = False  # each token brings the log-probabilities of the whole vocabulary
    # an answer's first token brings the prompt's, with as many others at each place as of its own. Nothing of
    # the prompt is taken from earlier requests then
    prompt_logprobs: bool = False
    embeddings: mx.array | None = None  # (T, hidden) in place of the embeddings of the prompt's last T ids


@dataclass(slots=True)
class Token:
    """A token of one answer, or its end."""

    request: Request  # what it answers
    answer: int  # the number of the answer, from 0
    token: int | None  # its id; None where an answer ends without one: cancelled or failed
    logprob: float | None = None  # of those that the sampler was given
    top_logprobs: Sequence[tuple[int, float]] = ()  # of the most probable tokens, the most probable first
    logprobs: mx.array | None = None  # (vocab,), where they are kept
    # None: there are more. "stop": the token is one of ``stop_tokens``; "length": ``max_tokens``; "context":
    # that, or the reservation, is full; "cancelled"; "error"
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0  # tokens of the prompt that other requests had fed
    cache: ModelCache | None = None  # with the last token, where it was wanted
    error: BaseException | None = None  # why an answer failed
    from_draft: bool = False  # the token was drafted
    embedding: mx.array | None = None  # (D,) float32: the vector of a text, in place of a token
    # id, log-probability and most probable tokens of each token of the prompt but the first
    prompt_logprobs: Sequence[tuple[int, float, Sequence[tuple[int, float]]]] = ()


def check_count(name: str, value: int, *, or_minus_one: bool = False) -> None:
    """Raise a ValueError unless the argument is at least 1, or -1 where that is allowed."""
    if or_minus_one and value == -1:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        also = ", or -1 for as many as the context holds" if or_minus_one else ""
        raise ValueError(f"{name} is {value!r}; expected at least 1{also}")


def check_stops(stop: str | Sequence[str] | None) -> list[str]:
    """Stop strings as a list; a ValueError where one is none."""
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    if not all(isinstance(text, str) and text for text in stops):
        raise ValueError(f"stop is {stop!r}; expected a string or strings, none empty")
    return stops


def reservation(
    model: LanguageModel, prompt_tokens: int, max_tokens: int, max_kv_size: int | None = None
) -> int:
    """Tokens to reserve a cache for: prompt and answer, at most the context, and at most ``max_kv_size``."""
    for whose, limit in (
        ("the model's context", model.config.max_position_embeddings),
        ("max_kv_size", max_kv_size),
    ):
        if limit is not None and prompt_tokens > limit:
            raise ContextError(f"the prompt has {prompt_tokens} tokens; {whose} is {limit}")
    check_count("max_tokens", max_tokens, or_minus_one=True)
    wanted = [] if max_tokens == -1 else [prompt_tokens + max_tokens]
    needed = context_limit(
        model, min([*wanted, *([] if max_kv_size is None else [max_kv_size])], default=None)
    )
    if needed is None:
        raise ValueError(
            "max_tokens is -1, and the model has no context limit; expected a number or a prompt_cache"
        )
    return needed


def pool_reservation(needs: Sequence[int], at_once: int) -> int:
    """Tokens, in whole pages, to reserve a pool for of which any ``at_once`` of these sequences run
    together.
    """
    return PAGE_SIZE * sum(sorted(map(pages_for, needs), reverse=True)[:at_once])


def limit_in_words(model: LanguageModel, limit: int) -> str:
    """A limit of :func:`kvant.models.language_model.context_limit`; nobody can reserve more than the
    context.
    """
    whose = "the model's context" if limit == model.config.max_position_embeddings else "reserved"
    return f"{limit} are {whose}"


def cache_options(
    max_kv_size: int | None,
    kv_bits: int | None,
    kv_group_size: int | None,
    kv_format: KVFormat | str | Path | None = None,
    kv_tail: bool | None = None,
) -> CacheOptions:
    """Check mlx-lm's keywords of a cache that is to be reserved, and return how it stores tokens."""
    if max_kv_size is not None:
        check_count("max_kv_size", max_kv_size)
    return CacheOptions.from_keywords(
        kv_bits=kv_bits, kv_group_size=kv_group_size, kv_format=kv_format, kv_tail=kv_tail
    )

"""What a scheduler is asked for, what is reserved for it, and what it hands out."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Unpack

import mlx.core as mx

from kvant.cache import KVCache, ModelCache
from kvant.cache.options import CacheFields, CacheOptions
from kvant.cache.pages import PAGE_SIZE, pages_for
from kvant.engine.drafts import Drafts
from kvant.engine.processors import LogitsProcessor
from kvant.engine.sampler import Sampler
from kvant.errors import ArgumentError, ContextError
from kvant.models import LanguageModel
from kvant.models.language_model import context_limit

FinishReason = Literal["stop", "length", "context", "cancelled", "error"]
PromptProgress = Callable[[int, int], None]
CHUNK = 128  # prompt tokens between two tokens of others: a quarter of a prefill's speed is lost at 64 (measured)
PREFILL_STEP_SIZE = 512  # prompt tokens a chunk, where nobody says how many: it bounds the memory of activations


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """One prompt, and what is wanted of its answers. It is plain data; whoever submits it keeps it as its name.

    Attributes:
        prompt: token ids, at least one.
        max_tokens: of each answer at most; -1: until the context is full.
        sampler: of :func:`kvant.sample_utils.make_sampler`, or (1, vocab) log-probabilities -> (1,). The draw at a
            position is the one that :func:`kvant.stream_generate` makes there. None: greedy.
        logits_processors: called with all tokens so far, of the cache, the prompt and the answer, and with logits
            (1, vocab). A :class:`kvant.text.grammar.Grammar` is one too: each answer follows it from its beginning.
        stop_tokens: token ids that end an answer, which includes them.
        salt: prefixes are shared only between requests with the same salt.
        top_logprobs: how many of the most probable tokens are told with each token.
        answers: the prompt is fed once for so many. Answer i has the seed + i, and the first is that of a single one.
        cache: of one sequence, from ``model.make_cache``. The prompt continues what it holds. It is only read, and must
            not be used otherwise before the first token.
        keep_cache: the last token of an answer brings a cache of its own with the prompt and the answer. It is reserved
            for as many tokens as ``cache``, or more where prompt and answer need more; without one, for as many as a
            sequence of the pool can have.
        drafts: each answer drafts for itself, from these; None: none does. The tokens are the same, but for rounding.
        begun: the first tokens of the answer, if the prompt ends with them: a grammar goes on after them.
        progress: called with (prompt tokens fed, prompt tokens in all), first with 0; those shared with others do not
            count.
        keep_logprobs: each token brings the log-probabilities of the whole vocabulary.
        prompt_logprobs: an answer's first token brings the prompt's, with as many others at each place as of its own.
            Nothing of the prompt is taken from earlier requests then.
    """

    prompt: Sequence[int] | mx.array
    max_tokens: int = 256
    sampler: Sampler | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    stop_tokens: Collection[int] = ()
    salt: bytes = b""
    top_logprobs: int = 0
    answers: int = 1
    cache: Sequence[KVCache] | None = None
    keep_cache: bool = False
    drafts: Drafts | None = None
    begun: Sequence[int] = ()
    progress: PromptProgress | None = None
    keep_logprobs: bool = False
    prompt_logprobs: bool = False


@dataclass(slots=True)
class Token:
    """A token of one answer, or its end.

    Attributes:
        request: what it answers.
        answer: the number of the answer, from 0.
        token: its id; None where an answer ends without one: cancelled or failed.
        logprob: its log-probability, of those the sampler was given.
        top_logprobs: (id, log-probability) of the most probable tokens, the most probable first.
        logprobs: (vocab,), where they are kept.
        finish_reason: None: there are more. "stop": the token is one of ``stop_tokens``; "length": ``max_tokens``;
            "context": the context or the reservation is full; "cancelled"; "error".
        cached_tokens: tokens of the prompt that other requests had fed.
        cache: with the last token, where it was wanted.
        error: why an answer failed.
        from_draft: the token was drafted.
        miss: with an answer's first token, why no more of the prompt was shared: "new", nothing was stored behind what
            was; "differs", other tokens were; "unkept", the same were, but no states that go on there, or only a part
            of a page; "", none was looked for.
        prompt_logprobs: id, log-probability and most probable tokens of each token of the prompt but the first.
    """

    request: Request
    answer: int
    token: int | None
    logprob: float | None = None
    top_logprobs: Sequence[tuple[int, float]] = ()
    logprobs: mx.array | None = None
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    cache: ModelCache | None = None
    error: BaseException | None = None
    from_draft: bool = False
    miss: str = ""
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


def reservation(model: LanguageModel, prompt_tokens: int, max_tokens: int, max_kv_size: int | None = None) -> int:
    """The tokens that a cache is reserved for where the caller has none: prompt and answer, at most the context.

    ``max_kv_size``: at most so many, too.
    """
    context = model.config.max_position_embeddings
    if context is not None and prompt_tokens > context:
        raise ContextError(f"the prompt has {prompt_tokens} tokens; the model's context is {context}")
    if max_kv_size is not None and prompt_tokens > max_kv_size:
        raise ContextError(f"the prompt has {prompt_tokens} tokens; max_kv_size is {max_kv_size}")
    check_count("max_tokens", max_tokens, or_minus_one=True)
    wanted = [] if max_tokens == -1 else [prompt_tokens + max_tokens]
    needed = context_limit(model, min([*wanted, *([] if max_kv_size is None else [max_kv_size])], default=None))
    if needed is None:
        raise ValueError("max_tokens is -1, and the model has no context limit; expected a number or a prompt_cache")
    return needed


def pool_reservation(needs: Sequence[int], at_once: int) -> int:
    """The tokens that a pool is reserved for where any ``at_once`` of these sequences run together.

    ``needs``: tokens of each. They take whole pages.
    """
    longest = sorted(map(pages_for, needs), reverse=True)[:at_once]
    return PAGE_SIZE * sum(longest)


def limit_in_words(model: LanguageModel, limit: int) -> str:
    """A limit of :func:`kvant.models.language_model.context_limit`; nobody can reserve more than the context."""
    whose = "the model's context" if limit == model.config.max_position_embeddings else "reserved"
    return f"{limit} are {whose}"


def cache_options(max_kv_size: int | None, **stored: Unpack[CacheFields]) -> CacheOptions:
    """How a cache that is reserved stores tokens; None: the caller says nothing."""
    if max_kv_size is not None:
        check_count("max_kv_size", max_kv_size)
    return CacheOptions.of(**stored)


def check_given(cache: ModelCache, kv_bits: int | None, kv_group_size: int | None, max_kv_size: int | None) -> None:
    """Refuse what a cache of the caller's is not; None: nothing is said of it."""
    if max_kv_size not in (None, cache.max_seq_len):
        raise ArgumentError("max_kv_size", f"is {max_kv_size}; {cache.max_seq_len} is that of the", "prompt_cache")
    for bits in {bits for own in cache.formats for bits in own.bits.values()} or {0}:
        if kv_bits not in (None, bits):
            raise ArgumentError("kv_bits", f"is {kv_bits}; {bits} is that of the", "prompt_cache")
    for own in cache.formats:
        # A bridged layer whose widths the group does not divide has a smaller one.
        group = math.gcd(kv_group_size or 0, own.head_dim, own.value_head_dim)
        if kv_group_size is not None and own.kv_bits and own.kv_group_size != group:
            raise ArgumentError(
                "kv_group_size", f"is {kv_group_size}; {own.kv_group_size} is that of the", "prompt_cache"
            )

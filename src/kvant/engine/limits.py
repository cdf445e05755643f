"""What a caller says of a request's cache and stops, and how many tokens it may have by that."""

import math
from collections.abc import Sequence

from kvant.cache import ModelCache
from kvant.cache.options import DEFAULT_KV_BITS, DEFAULT_KV_GROUP_SIZE, CacheOptions
from kvant.cache.pages import PAGE_SIZE, pages_for
from kvant.errors import ArgumentError, ContextError
from kvant.models import LanguageModel
from kvant.models.language_model import context_limit


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


def cache_options(kv_bits: int | None, kv_group_size: int | None, max_kv_size: int | None) -> CacheOptions:
    """How a cache that is reserved stores tokens; None: the caller says nothing."""
    if max_kv_size is not None:
        check_count("max_kv_size", max_kv_size)
    return CacheOptions(
        DEFAULT_KV_BITS if kv_bits is None else kv_bits,
        DEFAULT_KV_GROUP_SIZE if kv_group_size is None else kv_group_size,
    )


def check_given(cache: ModelCache, kv_bits: int | None, kv_group_size: int | None, max_kv_size: int | None) -> None:
    """Refuse what a cache of the caller's is not; None: nothing is said of it."""
    if max_kv_size not in (None, cache.max_seq_len):
        raise ArgumentError("max_kv_size", f"is {max_kv_size}; {cache.max_seq_len} is that of the", "prompt_cache")
    for bits in {own.kv_bits for own in cache.formats} or {0}:
        if kv_bits not in (None, bits):
            raise ArgumentError("kv_bits", f"is {kv_bits}; {bits} is that of the", "prompt_cache")
    for own in cache.formats:
        # A bridged layer whose widths the group does not divide has a smaller one.
        group = math.gcd(kv_group_size or 0, own.head_dim, own.value_head_dim)
        if kv_group_size is not None and own.kv_bits and own.kv_group_size != group:
            raise ArgumentError(
                "kv_group_size", f"is {kv_group_size}; {own.kv_group_size} is that of the", "prompt_cache"
            )

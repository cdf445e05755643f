"""mlx-lm's functions of a prompt cache, for kvant's models and caches."""

from collections.abc import Sequence
from typing import Any

from kvant.cache import ModelCache
from kvant.engine.keywords import DEFAULT_KV_BITS, DEFAULT_KV_GROUP_SIZE, check_format
from kvant.models.reservation import DEFAULT_RESERVATION


def make_prompt_cache(
    model: Any,
    max_kv_size: int | None = None,
    *,
    kv_bits: int | None = None,
    kv_group_size: int | None = None,
    batch: int = 1,
) -> Any:
    """A prompt cache that is reserved now and never grows, of a model of :func:`kvant.load` or of mlx-lm's own.

    Args:
        model: of ``kvant.load``: the result is its :class:`kvant.cache.ModelCache`. Of ``mlx_lm.load``: a list for
            mlx-lm's own loops, see :func:`kvant.bridge.make_prompt_cache`.
        max_kv_size: tokens it can hold; None: at most 4,096, and at most the context of a model of ``kvant.load``.
        kv_bits: 8, 4, or 0 for no quantization; None: 8.
        kv_group_size: elements that share a scale; None: 32.
        batch: sequences side by side.

    Raises:
        ContextError: more than this machine's memory; nothing was allocated.
        ValueError: an argument out of range, or a model with a kind of cache that kvant has nothing for.
    """
    check_format(kv_bits, kv_group_size, max_kv_size)
    kv_bits = DEFAULT_KV_BITS if kv_bits is None else kv_bits
    kv_group_size = DEFAULT_KV_GROUP_SIZE if kv_group_size is None else kv_group_size
    if hasattr(model, "check_cache"):
        return model.make_cache(max_kv_size, batch=batch, quant_bit=kv_bits, quant_group=kv_group_size)
    from kvant import bridge  # not for a model of kvant's own: it imports mlx-lm

    size = DEFAULT_RESERVATION if max_kv_size is None else max_kv_size
    return bridge.make_prompt_cache(model, size, kv_bits=kv_bits, kv_group_size=kv_group_size, batch=batch)


def can_trim_prompt_cache(cache: Sequence[Any]) -> bool:
    """Whether :func:`trim_prompt_cache` can forget tokens: not where a layer keeps a state."""
    return all(layer.is_trimmable() for layer in cache)


def trim_prompt_cache(cache: Sequence[Any], num_tokens: int) -> int:
    """Forget the last tokens.

    Returns:
        how many were forgotten: 0 where :func:`can_trim_prompt_cache` says no.

    Raises:
        ValueError: a number below 0, or more than windows can go back.
    """
    if not cache or not can_trim_prompt_cache(cache):
        return 0
    if isinstance(cache, ModelCache):
        return cache.trim(num_tokens)
    return max(int(layer.trim(num_tokens)) for layer in cache)

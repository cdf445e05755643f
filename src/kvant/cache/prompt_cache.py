"""mlx-lm's functions of a prompt cache, for a :class:`ModelCache` and for lists of layers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvant.cache.model import ModelCache


def save_prompt_cache(file_name: str | Path, cache: Sequence[Any], metadata: Mapping[str, str] | None = None) -> None:
    """Save what a cache holds.

    Args:
        file_name: see :meth:`ModelCache.save`.
        cache: of a model of ``kvant.load``: saved by :meth:`ModelCache.save`. Or a list of layers that a model of
            mlx-lm's own was given: saved by mlx-lm.
        metadata: text by its name.

    Raises:
        SnapshotError: it cannot be written; what was there still is.
        ValueError: metadata that is no text.
    """
    if isinstance(cache, ModelCache):
        cache.save(file_name, metadata)
        return
    from mlx_lm.models.cache import save_prompt_cache  # there already: the list is for its models

    save_prompt_cache(str(file_name), list(cache), dict(metadata or {}))


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

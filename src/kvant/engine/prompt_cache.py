"""mlx-lm's functions of a prompt cache, for kvant's models and mlx-lm's, and for their caches."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvant.cache import ModelCache
from kvant.cache.kv_format import KVFormat
from kvant.cache.prompt_file import PromptCacheFile
from kvant.engine.request import cache_options, check_count
from kvant.models.caches import DEFAULT_RESERVATION
from kvant.threads import check_process


def make_prompt_cache(
    model: Any,
    max_kv_size: int | None = None,
    *,
    kv_bits: int | None = None,
    kv_group_size: int | None = None,
    kv_format: KVFormat | str | Path | None = None,
    kv_tail: bool | None = None,
) -> Any:
    """A prompt cache that is reserved now and never grows, of a model of :func:`kvant.load` or of mlx-lm's
    own.

    Args:
        model: of ``kvant.load``: the result is its :class:`kvant.cache.ModelCache`. Of ``mlx_lm.load``: a
            list for mlx-lm's own loops, see :mod:`kvant.bridge.prompt_cache`.
        max_kv_size: tokens it can hold; None: at most 4,096, and at most the context of a model of
            ``kvant.load``.
        kv_bits: 8, 4, or 0 for no quantization; None: 8.
        kv_group_size: elements that share a scale; None: 32.
        kv_format: a format of each layer, or its file, that ``kvant report --tune`` wrote; None: all have the
            same. Of a model of mlx-lm's own nobody can tell whether it is for that one.
        kv_tail: whether the first and the last tokens are stored exactly as well; None: at 4 bits.

    Raises:
        ContextError: more than this machine's memory; nothing was allocated.
        ValueError: an argument out of range, or a model with a kind of cache that kvant has nothing for.
    """
    options = cache_options(max_kv_size, kv_bits, kv_group_size, kv_format, kv_tail)
    if hasattr(model, "check_cache"):
        return model.reserve_cache(max_kv_size, options)
    from kvant.bridge import prompt_cache  # not for a model of kvant's own: it imports mlx-lm

    return prompt_cache.make_prompt_cache(model, max_kv_size or DEFAULT_RESERVATION, options)


def save_prompt_cache(
    file_name: str | Path, cache: Sequence[Any], metadata: Mapping[str, str] | None = None
) -> None:
    """Save what a cache holds.

    Args:
        file_name: see :meth:`kvant.cache.ModelCache.save`.
        cache: of ``model.make_cache``. A list for mlx-lm's own loops is not saved.
        metadata: text by its name.

    Raises:
        SnapshotError: it cannot be written; what was there still is.
        ValueError: another cache, or metadata that is no text.
    """
    cache = _read(cache)
    if not isinstance(cache, ModelCache):
        raise ValueError(f"the cache is a {type(cache).__name__}; expected that of a model of kvant.load")
    cache.save(file_name, metadata)


def load_prompt_cache(
    file_name: str | Path, return_metadata: bool = False, *, max_kv_size: int | None = None
) -> Any:
    """The prompt cache of a file. The first model that uses it reads it, and is compared with it.

    Args:
        file_name: a file of :func:`save_prompt_cache`, which has to be there until a model has used the
            result.
        return_metadata: also return what it was saved with, a dict of str to str.
        max_kv_size: tokens to reserve; None: as many as were reserved when it was saved.

    Returns:
        a :class:`kvant.cache.prompt_file.PromptCacheFile` for ``prompt_cache``. With ``return_metadata`` a
        tuple of it and the metadata.

    Raises:
        SnapshotError: a file that is no such cache, as mlx-lm's are; one of a newer version; one that was
            altered.
        ValueError: ``max_kv_size`` is no positive int.
    """
    check_process()
    if max_kv_size is not None:
        check_count("max_kv_size", max_kv_size)
    saved = PromptCacheFile(Path(file_name), max_kv_size)
    return (saved, dict(saved.header.metadata)) if return_metadata else saved


def can_trim_prompt_cache(cache: Sequence[Any]) -> bool:
    """Whether :func:`trim_prompt_cache` can forget tokens: not where a layer keeps a state."""
    return all(layer.is_trimmable() for layer in _read(cache))


def trim_prompt_cache(cache: Sequence[Any], num_tokens: int) -> int:
    """Forget the last tokens.

    Returns:
        how many were forgotten: 0 where :func:`can_trim_prompt_cache` says no.

    Raises:
        ValueError: a number below 0, or more than windows can go back.
    """
    cache = _read(cache)
    if not cache or not can_trim_prompt_cache(cache):
        return 0
    if isinstance(cache, ModelCache):
        return cache.trim(num_tokens)
    return max(int(layer.trim(num_tokens)) for layer in cache)


def _read(cache: Sequence[Any]) -> Sequence[Any]:
    """The cache itself, of one that a model read from a file."""
    return cache.cache if isinstance(cache, PromptCacheFile) else cache

"""mlx-lm's prompt cache functions, for the models and caches of kvant and mlx-lm."""

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
    """Make a prompt cache, which is reserved now and never grows.

    Args:
        model: of ``kvant.load``, for its :class:`kvant.cache.ModelCache`, or of ``mlx_lm.load``, for a list
            for mlx-lm's own loops (see :mod:`kvant.bridge.prompt_cache`).
        max_kv_size: maximum number of tokens; None: at most 4,096, and at most the context of a model of
            ``kvant.load``.
        kv_bits: 8, 4, or 0 for no quantization; None: 8.
        kv_group_size: elements that share a scale; None: 32.
        kv_format: a format, or its file, that ``kvant report --tune`` wrote; None: all layers are alike. For
            a model of mlx-lm's own it cannot be checked that the format is for this model.
        kv_tail: whether to also store the first and the last tokens exactly; None: at 4 bits.

    Raises:
        ContextError: the cache exceeds this machine's memory; nothing was allocated.
        ValueError: an argument is out of range, or the model has an unsupported kind of cache.
    """
    options = cache_options(max_kv_size, kv_bits, kv_group_size, kv_format, kv_tail)
    if hasattr(model, "check_cache"):
        return model.reserve_cache(max_kv_size, options)
    from kvant.bridge import prompt_cache  # here, because it imports mlx-lm

    return prompt_cache.make_prompt_cache(model, max_kv_size or DEFAULT_RESERVATION, options)


def save_prompt_cache(
    file_name: str | Path, cache: Sequence[Any], metadata: Mapping[str, str] | None = None
) -> None:
    """Save a cache's tokens.

    Args:
        file_name: see :meth:`kvant.cache.ModelCache.save`.
        cache: of ``model.make_cache``. A list for mlx-lm's own loops cannot be saved.
        metadata: text by name.

    Raises:
        SnapshotError: it cannot be written; an old file is unchanged.
        ValueError: it is another kind of cache, or metadata is not text.
    """
    cache = _read(cache)
    if not isinstance(cache, ModelCache):
        raise ValueError(f"the cache is a {type(cache).__name__}; expected that of a model of kvant.load")
    cache.save(file_name, metadata)


def load_prompt_cache(
    file_name: str | Path, return_metadata: bool = False, *, max_kv_size: int | None = None
) -> Any:
    """Return the prompt cache in a file. The first model that uses it reads and checks the file.

    Args:
        file_name: a file of :func:`save_prompt_cache`, which must exist until a model has used the result.
        return_metadata: also return the metadata it was saved with, a dict of str to str.
        max_kv_size: tokens to reserve; None: as many as were reserved when it was saved.

    Returns:
        a :class:`kvant.cache.prompt_file.PromptCacheFile` for ``prompt_cache``; with ``return_metadata`` a
        tuple of it and the metadata.

    Raises:
        SnapshotError: the file is no such cache (mlx-lm's are not), is of another version, or was altered.
        ValueError: ``max_kv_size`` is not a positive int.
    """
    check_process()
    if max_kv_size is not None:
        check_count("max_kv_size", max_kv_size)
    saved = PromptCacheFile(Path(file_name), max_kv_size)
    return (saved, dict(saved.header.metadata)) if return_metadata else saved


def can_trim_prompt_cache(cache: Sequence[Any]) -> bool:
    """Return whether :func:`trim_prompt_cache` can forget tokens; it cannot if a layer has a state."""
    return all(layer.is_trimmable() for layer in _read(cache))


def trim_prompt_cache(cache: Sequence[Any], num_tokens: int) -> int:
    """Forget the last tokens.

    Returns:
        how many were forgotten; 0 if :func:`can_trim_prompt_cache` returns False.

    Raises:
        ValueError: the number is below 0, or more than windows can go back.
    """
    cache = _read(cache)
    if not cache or not can_trim_prompt_cache(cache):
        return 0
    if isinstance(cache, ModelCache):
        return cache.trim(num_tokens)
    return max(int(layer.trim(num_tokens)) for layer in cache)


def _read(cache: Sequence[Any]) -> Sequence[Any]:
    """Return the cache itself if a model read it from a file."""
    return cache.cache if isinstance(cache, PromptCacheFile) else cache

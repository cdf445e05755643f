"""mlx-lm's functions of a prompt cache, for kvant's models and mlx-lm's, and for their caches."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvant.cache import ModelCache, snapshot
from kvant.cache.snapshot_header import is_snapshot
from kvant.engine.keywords import DEFAULT_KV_BITS, DEFAULT_KV_GROUP_SIZE, check_format
from kvant.engine.limits import check_count
from kvant.errors import SnapshotError, one_line
from kvant.models.reservation import DEFAULT_RESERVATION
from kvant.threads import check_process


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


def save_prompt_cache(file_name: str | Path, cache: Sequence[Any], metadata: Mapping[str, str] | None = None) -> None:
    """Save what a cache holds.

    Args:
        file_name: see :meth:`kvant.cache.ModelCache.save`.
        cache: a :class:`kvant.cache.ModelCache`, which saves itself. Or a list for mlx-lm's own loops, as mlx-lm's
            function of this name saves it.
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


def load_prompt_cache(file_name: str | Path, return_metadata: bool = False, *, max_kv_size: int | None = None) -> Any:
    """The prompt cache of a file, without its model: what ``ModelCache.save`` wrote, or mlx-lm's ``save_prompt_cache``.

    The first model of ``kvant.load`` that uses it is compared with it. mlx-lm's own models compare sizes only.

    Args:
        file_name: the file.
        return_metadata: also return what it was saved with, a dict of str to str.
        max_kv_size: tokens to reserve; None: as many as were reserved when it was saved.

    Returns:
        a :class:`kvant.cache.ModelCache`; a list where a list for mlx-lm's own loops was saved. With
        ``return_metadata`` a tuple of it and the metadata.

    Raises:
        SnapshotError: a file that is no prompt cache of kvant's, is truncated, or, where ``ModelCache.save`` wrote it,
            altered; one of a newer version; more than this machine's memory or less than its tokens need.
        ValueError: ``max_kv_size`` is no positive int.
    """
    from kvant.bridge.mlx_lm_file import MlxLmFile, make_model_cache  # not at every start

    check_process()
    if max_kv_size is not None:
        check_count("max_kv_size", max_kv_size)
    path = Path(file_name)
    try:
        with snapshot.open_tensors(path) as (file, found):
            if not is_snapshot(found.metadata):
                saved = MlxLmFile(path, file, found)
                return (saved.load(max_kv_size), saved.metadata) if return_metadata else saved.load(max_kv_size)
        header = snapshot.read_header(path)
        cache = make_model_cache(header, max_kv_size or header.reservation)
    except (OSError, ValueError, RecursionError) as error:
        raise SnapshotError(f"{path}: {one_line(error)}") from error
    sequences = cache.layers[0].sequences
    sequences.unchecked = path
    metadata = snapshot.restore(path, cache.layers)
    return (cache, metadata) if return_metadata else cache


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

"""A prompt cache that is in a file, until a model takes it."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvant.cache.model import KVCache, ModelCache
from kvant.cache.options import CacheOptions
from kvant.cache.snapshot import read_header
from kvant.errors import ContextError, SnapshotError

ReserveCache = Callable[[int | None, CacheOptions], ModelCache]  # of a model


class PromptCacheFile(Sequence[KVCache]):
    """A file of :meth:`ModelCache.save`, whose cache the first model makes that uses it."""

    def __init__(self, path: Path, max_seq_len: int | None = None) -> None:
        """``max_seq_len``: the reservation; None: as it was."""
        self.header = read_header(path)  # what the file says of itself
        self._path = path
        self._max_seq_len: int | None = max_seq_len or self.header.reservation
        self._cache: ModelCache | None = None

    @property
    def cache(self) -> ModelCache:
        """The cache; a ValueError before a model used it."""
        if self._cache is None:
            raise ValueError(f"{self._path} has not been read: a model that uses it reads it")
        return self._cache

    def loaded(self, reserve_cache: ReserveCache) -> ModelCache:
        """Return the cache in the file's format, of a model's ``reserve_cache``, with its tokens."""
        if self._cache is not None:
            return self._cache
        layers = [layer for layer in self.header.layers if layer.has_tokens]
        kv_bits = max((max(layer.bits) for layer in layers), default=0)
        try:
            options = CacheOptions(
                kv_bits,
                # a bridged layer's group may be a part of the one asked for
                math.lcm(*(layer.kv_group_size for layer in layers)) if kv_bits else None,
                bias_split=any(layer.split_pairs is not None for layer in layers),
                # versions that rotated no keys wrote such files too
                rotates=any("rotate" in layer.transform_name for layer in layers),
                # and versions that rotated no values
                rotates_values=any("rotate-values" in layer.transform_name for layer in layers),
            )
            made = reserve_cache(self._max_seq_len, options)
        except ContextError:
            raise
        except ValueError as error:
            raise SnapshotError(f"{self._path}: of another model: {error}") from error
        made.load(self._path)
        self._cache = made
        return made

    def __getitem__(self, index: Any) -> Any:
        return self.cache[index]

    def __len__(self) -> int:
        return len(self.header.layers if self._cache is None else self._cache)

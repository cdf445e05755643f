"""A prompt cache in a file that is read when a model first uses it."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvant.cache.model import KVCache, ModelCache
from kvant.cache.options import CacheOptions
from kvant.cache.snapshot import read_header
from kvant.errors import ContextError, SnapshotError

ReserveCache = Callable[[int | None, CacheOptions], ModelCache]  # a model's method


class PromptCacheFile(Sequence[KVCache]):
    """A file of :meth:`ModelCache.save`, from which the first model that uses it makes the cache."""

    def __init__(self, path: Path, max_seq_len: int | None = None) -> None:
        """``max_seq_len``: the reservation in tokens; None: as saved."""
        self.header = read_header(path)
        self._path = path
        self._max_seq_len: int | None = max_seq_len or self.header.reservation
        self._cache: ModelCache | None = None

    @property
    def cache(self) -> ModelCache:
        """Return the cache; raise a ValueError if no model has used it yet."""
        if self._cache is None:
            raise ValueError(f"{self._path} has not been read: pass it to a model first")
        return self._cache

    def loaded(self, reserve_cache: ReserveCache) -> ModelCache:
        """Return the cache with its tokens, made by a model's ``reserve_cache`` in the file's format."""
        if self._cache is not None:
            return self._cache
        layers = [layer for layer in self.header.layers if layer.has_tokens]
        kv_bits = max((max(layer.bits) for layer in layers), default=0)
        try:
            options = CacheOptions(
                kv_bits,
                # a bridged layer's group may be smaller than the chosen one
                math.lcm(*(layer.kv_group_size for layer in layers)) if kv_bits else None,
                bias_split=any(layer.split_pairs is not None for layer in layers),
                # older versions rotated no keys
                rotates=any("rotate" in layer.transform_name for layer in layers),
                # or no values
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

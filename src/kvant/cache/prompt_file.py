"""A prompt cache that is in a file, until a model takes it."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvant.cache.model import KVCache, ModelCache
from kvant.cache.snapshot import read_header
from kvant.errors import ContextError, SnapshotError


class PromptCacheFile(Sequence[KVCache]):
    """A file of :meth:`ModelCache.save`, whose cache the first model makes that uses it.

    Attributes:
        header: what the file says of itself.
    """

    def __init__(self, path: Path, max_seq_len: int | None = None) -> None:
        """``max_seq_len``: the reservation; None: as it was."""
        self.header = read_header(path)
        self._path, self._max_seq_len = path, max_seq_len or self.header.reservation
        self._cache: ModelCache | None = None

    @property
    def cache(self) -> ModelCache:
        """The cache; a ValueError before a model used it."""
        if self._cache is None:
            raise ValueError(f"{self._path} has not been read: a model that uses it reads it")
        return self._cache

    def taken(self, make_cache: Callable[..., ModelCache]) -> ModelCache:
        """The cache, which a model's ``make_cache`` makes in the file's format, with its tokens."""
        if self._cache is None:
            layers = [layer for layer in self.header.layers if layer.has_tokens]
            options: dict[str, Any] = {"kv_bits": max((layer.kv_bits for layer in layers), default=0)}
            if options["kv_bits"]:  # a bridged layer's group may be a part of the one asked for
                options["kv_group_size"] = math.lcm(*(layer.kv_group_size for layer in layers))
            try:
                made = make_cache(
                    self._max_seq_len,
                    bias_split=any(layer.split_pairs is not None for layer in layers),
                    **options,
                )
            except ContextError:
                raise
            except ValueError as error:
                raise SnapshotError(f"{self._path}: of another model: {error}") from error
            made.load(self._path)
            self._cache = made
        return self._cache

    def __getitem__(self, index: Any) -> Any:
        return self.cache[index]

    def __len__(self) -> int:
        return len(self.header.layers) if self._cache is None else len(self._cache)

"""A prompt cache that is in a file, until a model takes it."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvant.cache.model import KVCache, ModelCache
from kvant.cache.options import CacheOptions
from kvant.cache.snapshot import read_header
from kvant.errors import ContextError, SnapshotError
from kvant.operators.stored_tokens import fitted_tokens

ReserveCache = Callable[[int | None, CacheOptions], ModelCache]  # of a model
UNKNOWN_ID = 0  # of a token whose id the file does not say


class PromptCacheFile(Sequence[KVCache]):
    """A file of :meth:`ModelCache.save`, whose cache the first model makes that uses it."""

    def __init__(self, path: Path, max_seq_len: int | None = None) -> None:
        """``max_seq_len``: the reservation; None: as it was."""
        self.header = read_header(path)  # what the file says of itself
        self._path = path
        self._max_seq_len: int | None = max_seq_len or self.header.reservation
        self._cache: ModelCache | None = None
        self._layers: Sequence[Any] = self.header.layers

    @property
    def cache(self) -> ModelCache:
        """The cache; a ValueError before a model used it."""
        if self._cache is None:
            raise ValueError(f"{self._path} has not been read: a model that uses it reads it")
        return self._cache

    def loaded(self, reserve_cache: ReserveCache) -> ModelCache:
        """Return the cache in the file's format, of a model's ``reserve_cache``, with its tokens."""
        if self._cache is None:
            self._cache = self._read(reserve_cache)
        return self._cache

    def _read(self, reserve_cache: ReserveCache) -> ModelCache:
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
        return made

    def __getitem__(self, index: Any) -> Any:
        return self.cache[index]

    def __len__(self) -> int:
        return len(self._layers if self._cache is None else self._cache)


class PlainCacheFile(PromptCacheFile):
    """mlx-lm's file. A model's cache takes the keys and values of plain caches, without quantization.

    Until then it is a sequence of mlx-lm's caches. The file has no token ids: logits processors see 0 in
    their place.
    """

    def __init__(self, path: Path, layers: Sequence[Any], max_seq_len: int | None = None) -> None:
        """``layers``: mlx-lm's caches."""
        self._path, self._max_seq_len, self._cache = path, max_seq_len, None
        self._layers = list(layers)

    def _read(self, reserve_cache: ReserveCache) -> ModelCache:
        if kinds := {type(layer).__name__ for layer in self._layers} - {"KVCache"}:
            raise SnapshotError(
                f"{self._path}: caches of {', '.join(sorted(kinds))}; expected mlx-lm's KVCache alone"
            )
        made = reserve_cache(self._max_seq_len, CacheOptions(0, bias_split=False))
        if len(made.pool.layers) != len(self._layers) or made.pool.states:
            raise SnapshotError(
                f"{self._path}: of another model: it has {len(self._layers)} caches; expected {len(made)}"
            )
        length = max((layer.offset for layer in self._layers), default=0)
        with made.sequence.filling(dict.fromkeys(made.pool.layers, 0), [UNKNOWN_ID] * length):
            for number, (layer, own) in enumerate(zip(made.pool.layers, self._layers, strict=True)):
                keys, values, kept = own.keys[..., :length, :], own.values[..., :length, :], layer.format
                shapes = [
                    (1, kept.num_kv_heads, length, width) for width in (kept.head_dim, kept.value_head_dim)
                ]
                given = [keys.shape, values.shape]
                if own.offset != length or given != shapes:
                    raise SnapshotError(
                        f"{self._path}: layer {number} has keys and values of {given}; expected {shapes}"
                    )
                keys = layer.transform.keys(keys)
                stored = fitted_tokens(keys, values, layer.arrays, **kept.operands, unbatched=True)
                made.sequence.put(layer, stored, length)
        self._layers = []
        return made

    def __getitem__(self, index: Any) -> Any:
        return self._layers[index] if self._cache is None else self._cache[index]

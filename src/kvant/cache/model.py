"""The cache of a conversation: one sequence of a single pool, presented as mlx-lm's list of layers."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self

import mlx.core as mx

from kvant.cache import snapshot
from kvant.cache.disk import DiskCache
from kvant.cache.layer_format import LayerFormat
from kvant.cache.layer_group import LayerGroup, PoolLayer
from kvant.cache.pool import Pool
from kvant.cache.pool_batch import PoolLayerView
from kvant.cache.pool_sequence import PoolSequence
from kvant.threads import ComputeLock, check_process


class NotSaved:
    """A value that mlx-lm's ``save_prompt_cache`` finds in a kvant cache and rejects with this message."""

    def __str__(self) -> str:
        return "kvant's cache is saved by kvant.save_prompt_cache"


@dataclass(eq=False)
class CachePart:
    """A part of a :class:`ModelCache`. All parts share their tokens, so one trim of each counts once."""

    cache: "ModelCache"
    layer: Any = None  # identifies the part

    @property
    def offset(self) -> int:
        """Return the number of tokens, which is the position of the next one."""
        return self.cache.offset

    def trim(self, num_tokens: int) -> int:
        """Forget the last tokens of all parts; mlx-lm calls it for each layer."""
        return self.cache.trim_layer(id(self.layer), num_tokens)

    def is_trimmable(self) -> bool:
        """Return whether the last token can be forgotten."""
        return self.cache.can_trim_to(max(0, self.offset - 1))


class KVCache(PoolLayerView, CachePart):
    """A layer of a :class:`ModelCache`."""

    layer: PoolLayer

    def __init__(self, cache: "ModelCache", group: LayerGroup, layer: PoolLayer) -> None:
        PoolLayerView.__init__(self, cache.batch, group, layer)
        self.cache = cache

    @property
    def nbytes(self) -> int:
        """Return its bytes, including bias tables."""
        return self.layer.nbytes

    @property
    def state(self) -> list[object]:
        """Return the arrays that mlx-lm evaluates."""
        return [NotSaved(), *self.layer.arrays, *self.layer.exact_arrays]

    def __deepcopy__(self, memo: dict[int, Any]) -> "KVCache":
        """Return the same layer of a copy of the cache."""
        number = self.cache.pool.places.index((self.group, self.layer))
        copied = copy.deepcopy(self.cache, memo)
        return KVCache(copied, *copied.pool.places[number])


class StateView(CachePart):
    """The states of linear and convolution layers in a cache."""

    @property
    def nbytes(self) -> int:
        """Return the current bytes of the states."""
        return self.cache.nbytes - self.cache.keys_values

    @property
    def state(self) -> list[mx.array]:
        """Return the arrays that mlx-lm evaluates."""
        return self.cache.states


class ModelCache(Sequence[Any]):
    """The cache of a conversation, for all layers of a model. ``model.make_cache()`` makes it.

    It is a sequence of its layers, as mlx-lm expects of a ``prompt_cache``, followed by one view of all
    states. All have the same length. To compute with it, use ``cache.batch``, the steps of its sequence, or
    ``cache.pool``.
    """

    pool: Pool

    def __init__(self, pool: Pool) -> None:
        """Open the sequence of a single pool."""
        self.pool = pool
        self.sequence: PoolSequence = pool.sequence(pool.max_seq_len)
        self.batch = pool.batch([self.sequence])
        self._trimmed: tuple[int, int, int, set[int]] | None = None

    @classmethod
    def of(cls, layers: Sequence[Any]) -> "ModelCache":
        """Return the cache itself, or the cache that a list of all its layers belongs to."""
        if isinstance(layers, ModelCache):
            return layers
        for layer in layers:
            if not isinstance(layer, KVCache):
                raise ValueError(
                    f"the cache holds a {type(layer).__name__}; expected the result of model.make_cache"
                )
        cache: ModelCache | None = layers[0].cache if layers else None
        if cache is None or [layer.layer for layer in layers] != list(cache.pool.layers):
            raise ValueError(f"a list of {len(layers)} layers; expected all layers of one cache, in order")
        return cache

    def __iter__(self) -> Iterator[Any]:
        # Made on demand: references to them would form a cycle that only the garbage collector frees.
        layers = (KVCache(self, group, layer) for group, layer in self.pool.places)
        return chain(layers, [StateView(self)] if self.pool.states else [])

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __len__(self) -> int:
        return len(self.pool.places) + bool(self.pool.states)

    @property
    def lock(self) -> ComputeLock:
        """Return the lock that a thread must acquire to compute through the cache."""
        return self.pool.lock

    @property
    def max_seq_len(self) -> int:
        """Return the number of tokens reserved in each layer."""
        return self.pool.max_seq_len

    @property
    def formats(self) -> list[LayerFormat]:
        """Return the format of each layer."""
        return self.pool.formats

    @property
    def offset(self) -> int:
        """Return the number of tokens, which is the position of the next one."""
        return self.sequence.length

    @property
    def ids(self) -> list[int]:
        """Return the ids of its tokens."""
        return self.sequence.ids

    @property
    def nbytes(self) -> int:
        """Return the current bytes of all layers, states and checkpoints."""
        return self.keys_values + sum(
            array.nbytes for array in [*self.states, *self.sequence.checkpoints.arrays]
        )

    @property
    def keys_values(self) -> int:
        """Return the bytes of keys and values, which never change."""
        return sum(layer.nbytes for layer in self.pool.layers)

    def describe(self) -> list[str]:
        """Return a line for each kind of layer of a bridged model; empty for others."""
        return []

    @property
    def states(self) -> list[mx.array]:
        """Return the current arrays of all states."""
        return [array for arrays in self.sequence.states for array in arrays if array is not None]

    @property
    def arrays(self) -> list[mx.array]:
        """Return all arrays of its layers and states."""
        layers = self.pool.layers
        hidden = [] if self.sequence.hidden is None else [self.sequence.hidden[0]]
        rows = (array for layer in layers for array in (*layer.arrays, *layer.exact_arrays))
        return [*rows, *self.states, *hidden]

    def use_disk(self, disk: DiskCache) -> None:
        """Read prompt prefixes from a disk cache, and write them there; see :meth:`Pool.use_disk`."""
        self.pool.use_disk(disk)

    def commit(self, num_tokens: int | None = None) -> None:
        """Commit the tokens of the step that a model began, or the first ``num_tokens`` of them."""
        self.batch.commit(num_tokens)

    def trim(self, num_tokens: int) -> int:
        """Forget the last ``num_tokens`` tokens, at most all; see :meth:`PoolSequence.trim`."""
        return self.sequence.trim(num_tokens)

    def trim_layer(self, layer: int, num_tokens: int) -> int:
        """Trim for one layer; the same call for each other layer returns the same and trims nothing more."""
        if self._trimmed is not None:
            number, forgotten, length, layers = self._trimmed
            unchanged = self.offset == length and self.batch.step is None
            if number == num_tokens and unchanged and layer not in layers:
                layers.add(layer)
                return forgotten
        forgotten = self.trim(num_tokens)
        self._trimmed = (num_tokens, forgotten, self.offset, {layer})
        return forgotten

    def trim_to(self, num_tokens: int) -> None:
        """Forget all tokens after the first ``num_tokens``."""
        self.sequence.trim_to(num_tokens)

    def can_trim_to(self, num_tokens: int) -> bool:
        """Return whether it can go back to exactly its first ``num_tokens`` tokens."""
        return self.sequence.can_trim_to(num_tokens)

    def keep_common(self, ids: Sequence[int]) -> int:
        """Go back to the common prefix with these tokens; see :meth:`PoolSequence.keep_common`."""
        return self.sequence.keep_common(ids)

    def reset(self) -> None:
        """Forget every token; the memory stays reserved."""
        self.trim(self.offset)

    def release(self) -> None:
        """Free the memory. The cache cannot be used afterwards."""
        with self.lock:
            self.batch.end_step()
            self.sequence.close()
            self.pool.release()

    def fork(self) -> Self:
        """Return an independent cache with the same tokens and the same reservation.

        Raises:
            RuntimeError: another thread uses the cache, or it was released.
            SnapshotError: it is divided over ranks.
        """
        with self.lock:
            self._check_whole()
            made: Self = self.pool.make_cache(self.max_seq_len)
            made.sequence.load(self.sequence)
            return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.fork()

    def save(self, path: str | Path, metadata: Mapping[str, str] | None = None) -> None:
        """Save the committed tokens as a safetensors file that only its owner can read.

        docs/python.md describes the file. Only rows in use are stored.

        Args:
            path: in an existing folder; a file there is replaced.
            metadata: :meth:`load` will return it.

        Raises:
            SnapshotError: it cannot be written, or the cache is divided over ranks; ``path`` is unchanged.
            RuntimeError: another thread uses the cache, or it was released.
            ValueError: metadata is not text.
        """
        with self.lock:
            self._check_whole()
            snapshot.save(Path(path), self.sequence, metadata=metadata or {})

    def load(self, path: str | Path) -> dict[str, str]:
        """Replace the cache's tokens by those of a snapshot.

        The reservation stays. Layers are read one at a time, so there is no second copy.

        Returns:
            the metadata it was saved with.

        Raises:
            SnapshotError: the file is no snapshot, is truncated or altered, or is of another model, format or
                version; the message names the difference, and the cache is empty. Or the cache is divided
                over ranks.
            RuntimeError: another thread uses the cache, or it was released.
        """
        with self.lock:
            self._check_whole()
            self.reset()
            return snapshot.restore(Path(path), self.sequence)

    def _check_whole(self) -> None:
        """Raise unless it has all rows; write deferred tokens."""
        check_process()
        self.pool.check_whole()
        self.sequence.check_open()
        with self.pool.handing_out():
            self.batch.deferred.write()

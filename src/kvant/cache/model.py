"""The cache of a conversation: one sequence of a single pool, as mlx-lm's list of layers."""

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
    """What mlx-lm's ``save_prompt_cache`` finds in a cache of kvant's, and refuses by these words."""

    def __str__(self) -> str:
        return "kvant's cache is saved by kvant.save_prompt_cache"


@dataclass(eq=False)
class CachePart:
    """A part of a :class:`ModelCache`. All parts have the same tokens: a trim of each in turn counts once."""

    cache: "ModelCache"
    layer: Any = None  # which tells it from the others

    @property
    def offset(self) -> int:
        """Tokens so far; the position of the next one."""
        return self.cache.offset

    def trim(self, num_tokens: int) -> int:
        """Forget the last tokens of all parts, as mlx-lm does layer by layer."""
        return self.cache.trim_layer(id(self.layer), num_tokens)

    def is_trimmable(self) -> bool:
        """Whether the last token can be forgotten."""
        return self.cache.can_trim_to(max(0, self.offset - 1))


class KVCache(PoolLayerView, CachePart):
    """A layer of a :class:`ModelCache`."""

    layer: PoolLayer

    def __init__(self, cache: "ModelCache", group: LayerGroup, layer: PoolLayer) -> None:
        PoolLayerView.__init__(self, cache.batch, group, layer)
        self.cache = cache

    @property
    def nbytes(self) -> int:
        """Bytes it holds, with its bias tables."""
        return self.layer.nbytes

    @property
    def state(self) -> list[object]:
        """For mlx-lm, which evaluates it."""
        return [NotSaved(), *self.layer.arrays, *self.layer.exact_arrays]

    def __deepcopy__(self, memo: dict[int, Any]) -> "KVCache":
        """The same layer of a copy of the cache."""
        number = self.cache.pool.places.index((self.group, self.layer))
        copied = copy.deepcopy(self.cache, memo)
        return KVCache(copied, *copied.pool.places[number])


class StateView(CachePart):
    """The states of a cache, of linear and convolution layers."""

    @property
    def nbytes(self) -> int:
        """Bytes of the states now."""
        return self.cache.nbytes - self.cache.keys_values

    @property
    def state(self) -> list[mx.array]:
        """For mlx-lm, which evaluates it."""
        return self.cache.states


class ModelCache(Sequence[Any]):
    """The cache of a conversation, for all layers of a model. ``model.make_cache()`` makes it.

    It is a sequence of its layers, as mlx-lm expects of a ``prompt_cache``, followed by one view of all
    states. All have the same length. What computes takes ``cache.batch``, the steps of its sequence, or
    ``cache.pool``.
    """

    pool: Pool

    def __init__(self, pool: Pool) -> None:
        """Open the sequence of a single pool that was made for it."""
        self.pool = pool
        self.sequence: PoolSequence = pool.sequence(pool.max_seq_len)
        self.batch = pool.batch([self.sequence])
        self._trimmed: tuple[int, int, int, set[int]] | None = None

    @classmethod
    def of(cls, layers: Sequence[Any]) -> "ModelCache":
        """The cache itself, or that of a list of all its layers."""
        if isinstance(layers, ModelCache):
            return layers
        for layer in layers:
            if not isinstance(layer, KVCache):
                raise ValueError(
                    f"the cache holds a {type(layer).__name__}; expected what model.make_cache returns"
                )
        cache: ModelCache | None = layers[0].cache if layers else None
        if cache is None or [layer.layer for layer in layers] != list(cache.pool.layers):
            raise ValueError(f"a list of {len(layers)} layers; expected all layers of one cache, in order")
        return cache

    def __iter__(self) -> Iterator[Any]:
        # Made when they are asked for: a cache that held them would be freed by the garbage collector alone.
        layers = (KVCache(self, group, layer) for group, layer in self.pool.places)
        return chain(layers, [StateView(self)] if self.pool.states else [])

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __len__(self) -> int:
        return len(self.pool.places) + bool(self.pool.states)

    @property
    def lock(self) -> ComputeLock:
        """The lock that a thread holds while it computes through the cache."""
        return self.pool.lock

    @property
    def max_seq_len(self) -> int:
        """Tokens that are reserved, in each layer."""
        return self.pool.max_seq_len

    @property
    def formats(self) -> list[LayerFormat]:
        """How each layer stores its tokens."""
        return self.pool.formats

    @property
    def offset(self) -> int:
        """Tokens so far; the position of the next one."""
        return self.sequence.length

    @property
    def ids(self) -> list[int]:
        """Ids of its tokens."""
        return self.sequence.ids

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, of the states now, and of checkpoints."""
        return self.keys_values + sum(
            array.nbytes for array in [*self.states, *self.sequence.checkpoints.arrays]
        )

    @property
    def keys_values(self) -> int:
        """Of these, those of keys and values, which never change: all but the states of linear layers."""
        return sum(layer.nbytes for layer in self.pool.layers)

    def describe(self) -> list[str]:
        """What its layers are, a line for each kind, where mlx-lm's model says it."""
        return []

    @property
    def states(self) -> list[mx.array]:
        """The arrays of all states now."""
        return [array for arrays in self.sequence.states for array in arrays if array is not None]

    @property
    def arrays(self) -> list[mx.array]:
        """Every array of its layers."""
        layers = self.pool.layers
        return [*(array for own in layers for array in (*own.arrays, *own.exact_arrays)), *self.states]

    def use_disk(self, disk: DiskCache) -> None:
        """Read beginnings of prompts from a disk cache, and write them there; see :meth:`Pool.use_disk`."""
        self.pool.use_disk(disk)

    def commit(self, num_tokens: int | None = None) -> None:
        """Count the tokens of the step that a model began, or the first ``num_tokens`` of them."""
        self.batch.commit(num_tokens)

    def trim(self, num_tokens: int) -> int:
        """Forget the last tokens, or all there are; see :meth:`PoolSequence.trim`."""
        return self.sequence.trim(num_tokens)

    def trim_layer(self, layer: int, num_tokens: int) -> int:
        """Trim for one of the layers: those that follow with the same number get the same answer."""
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
        """Forget what it has past its first ``num_tokens`` tokens."""
        self.sequence.trim_to(num_tokens)

    def can_trim_to(self, num_tokens: int) -> bool:
        """Whether it can go back to its first ``num_tokens`` tokens, exactly."""
        return self.sequence.can_trim_to(num_tokens)

    def keep_common(self, ids: Sequence[int]) -> int:
        """Go back to what it has in common with these tokens; see :meth:`PoolSequence.keep_common`."""
        return self.sequence.keep_common(ids)

    def reset(self) -> None:
        """Forget every token; the memory stays reserved."""
        self.trim(self.offset)

    def release(self) -> None:
        """Give the memory back. The cache cannot be used after it."""
        with self.lock:
            self.batch.end_step()
            self.sequence.close()
            self.pool.release()

    def fork(self) -> Self:
        """A cache of its own with the same tokens and the same reservation; what one appends the other never
        sees.

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
        """Save the committed tokens: one safetensors file, for its owner only, in place of what is at
        ``path``.

        docs/python.md says what it holds. Only rows in use are stored.

        Args:
            path: its folder is there. What is there is a file, or nothing.
            metadata: what :meth:`load` is to return.

        Raises:
            SnapshotError: it cannot be written, or is divided over ranks; what was at ``path`` still is.
            RuntimeError: another thread uses the cache, or it was released.
            ValueError: metadata that is no text.
        """
        with self.lock:
            self._check_whole()
            snapshot.save(Path(path), self.sequence, metadata=metadata or {})

    def load(self, path: str | Path) -> dict[str, str]:
        """Take the tokens of a snapshot, in place of those that the cache has.

        The reservation stays as it is. No second copy is held: a layer is read at a time.

        Returns:
            the metadata it was saved with.

        Raises:
            SnapshotError: a file that is no snapshot, is truncated or altered, or is of another model, format
                or version. The message names what differs. The cache is empty then. Or it is divided over
                ranks.
            RuntimeError: another thread uses the cache, or it was released.
        """
        with self.lock:
            self._check_whole()
            self.reset()
            return snapshot.restore(Path(path), self.sequence)

    def _check_whole(self) -> None:
        """Raise unless it has all rows; write what was deferred."""
        check_process()
        self.pool.check_whole()
        self.sequence.check_open()
        with self.pool.handing_out():
            self.batch.deferred.write()

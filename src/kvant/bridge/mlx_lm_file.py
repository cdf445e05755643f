"""What mlx-lm's ``save_prompt_cache`` wrote of kvant's caches.

mlx-lm saves the ``state`` of each cache, a tree of arrays and text, and the name of its class. The names of tensors are
places in that tree, such as "3.1". kvant's layers say in a text of their own what they are (:attr:`KVCache.state`).
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx

from kvant.cache import KVCache, ModelCache, without_model
from kvant.cache.layer_format import DTYPES, LayerFormat, Stored
from kvant.cache.sequences import TrimLimit
from kvant.cache.snapshot import as_array, check_fits, fill, read_exactly
from kvant.cache.snapshot_header import SnapshotHeader, parse
from kvant.files import unique_keys
from kvant.tensor_header import MAX_HEADER_BYTES, TensorHeader


@dataclass(frozen=True, slots=True)
class _Saved:
    """A cache of the file.

    Attributes:
        name: its class.
        header: what a layer of kvant's says of itself; None: it is mlx-lm's.
        shared: it is of a model's cache, which counts for all.
        places: of its arrays, in order; None: an array that a state does not have yet.
        parts: of a list of caches.
    """

    name: str
    header: SnapshotHeader | None = None
    shared: bool = False
    places: tuple[str | None, ...] = ()
    parts: "tuple[_Saved, ...]" = ()


class MlxLmFile:
    """An open file, whose text has been read.

    Attributes:
        metadata: the caller's.
    """

    def __init__(self, path: Path, file: BinaryIO, found: TensorHeader) -> None:
        """``file`` and ``found``: of :func:`kvant.cache.snapshot.open_tensors`.

        Raises:
            ValueError: no file of a prompt cache, or of none of kvant's.
        """
        self._path, self._file, self._found = path, file, found
        text = found.metadata
        self.metadata = {key[2:]: value for key, value in text.items() if key.startswith("0.")}
        numbers = range(sum(key.startswith("2.") for key in text))
        scalars = [(text.get(f"2.{i}.0"), text.get(f"2.{i}.1")) for i in numbers]
        self._scalars = {place: kind for place, kind in scalars if place and kind}
        classes = {key[2:]: value for key, value in text.items() if key.startswith("1.")}
        if not classes or list(classes) != [str(i) for i in range(len(classes))]:
            names = sorted(classes, key=int) if all(key.isdecimal() for key in classes) else []
            if not names or names != [str(i) for i in range(len(names))]:
                raise ValueError("neither a snapshot of a cache nor a file of mlx-lm's save_prompt_cache")
            classes = {name: classes[name] for name in names}
        self._saved = [self._read(place, name) for place, name in classes.items()]

    def load(self, max_seq_len: int | None) -> Any:
        """The prompt cache: a model's cache, or a list where it was saved as one.

        Args:
            max_seq_len: the reservation; None: as it was.

        Raises:
            ValueError: layers that are not of one cache, arrays that are not as they say, or no room.
        """
        every = [leaf for saved in self._saved for leaf in (saved.parts or (saved,))]
        own = [leaf for leaf in every if leaf.header is not None]
        if not own:
            raise ValueError("it holds no cache of kvant's; mlx_lm.models.cache.load_prompt_cache reads it")
        if len({leaf.shared for leaf in own}) > 1:
            raise ValueError("its layers are of several caches")
        return self._model_cache(every, max_seq_len) if own[0].shared else self._list(max_seq_len)

    def _model_cache(self, every: Sequence[_Saved], max_seq_len: int | None) -> ModelCache:
        first = next(leaf.header for leaf in every if leaf.header is not None)
        ids: list[str | None] = []
        places: list[str | None] = []
        formats: list[LayerFormat] = []
        for leaf in every:
            own = list(leaf.places)
            if leaf.header is None:
                if leaf.name == "ArraysCache":
                    formats.append(self._state(leaf))
                    places += own
                continue
            same = replace(leaf.header, layers=first.layers, has_ids=first.has_ids)
            if same != first:
                raise ValueError("its layers are of several caches")
            formats += leaf.header.layers
            if leaf.header.has_ids:
                ids, own = own[: len(first.lengths)], own[len(first.lengths) :]
            places += own
        header = replace(first, layers=tuple(formats), has_ids=bool(ids))
        made = make_model_cache(header, max_seq_len or header.reservation)
        sequences = made.layers[0].sequences
        sequences.unchecked = self._path
        check_fits(header, made.layers)
        sequences.take_batch(len(header.lengths))
        restored = fill(header, made.layers, _Places(self, [*ids, *places]))
        sequences.restore(header.lengths, header.written, restored)
        made.identity = header.identity
        return made

    def _list(self, max_seq_len: int | None) -> list[Any]:
        """Caches that count for themselves, as :func:`kvant.bridge.make_prompt_cache` makes them."""
        from mlx_lm.models.cache import ArraysCache, CacheList
        from mlx_lm.models.cache import KVCache as MlxLmKVCache

        from kvant.bridge import hook
        from kvant.bridge.without_model import make_layer

        layers: list[KVCache] = []
        limits: set[TrimLimit] = set()

        def one(saved: _Saved) -> Any:
            if saved.parts:
                return CacheList(*map(one, saved.parts))
            if saved.name == "ArraysCache":
                limits.add(TrimLimit(0, 0))
                cache = ArraysCache(len(saved.places))
                cache.cache[:] = [
                    None if place is None else self.take(place, self.stored(place)) for place in saved.places
                ]
                return cache
            header = saved.header
            if header is None:
                return MlxLmKVCache()
            reserved = max_seq_len or header.reservation
            if reserved is None:
                raise ValueError("reservation is None; expected a number of tokens")
            layer = make_layer(header.layers[0], reserved, len(header.lengths))
            check_fits(header, [layer])
            fill(header, [layer], _Places(self, saved.places))
            layer.sequences.restore(header.lengths, header.written, [])
            layers.append(layer)
            return layer

        entries = list(map(one, self._saved))
        limits |= {limit for layer in layers for limit in layer.limits}
        for layer in layers:
            layer.sequences.limits = frozenset(limits)
        hook.install()
        return entries

    def take(self, place: str, stored: Stored) -> mx.array:
        """An array, or a ValueError where it has another dtype or shape."""
        if self.stored(place) != stored:
            raise ValueError(f"tensor {place} is {self.stored(place)}; expected {stored}")
        tensor = self._found.tensors[place]
        self._file.seek(len(self._found.data) + tensor.first)
        return as_array(read_exactly(self._file, tensor.last - tensor.first), stored)

    def stored(self, place: str) -> Stored:
        """The dtype and shape of an array."""
        tensor = self._found.tensors.get(place)
        if tensor is None or tensor.dtype not in DTYPES:
            raise ValueError(f"tensor {place} is missing, or of a dtype that no cache has")
        return tensor.dtype, tensor.shape

    def _read(self, place: str, name: str) -> _Saved:
        """The cache of a class at a place."""
        if name == "CacheList":
            numbers = self._children(place)
            names = [self._text(f"{place}.{i}.1") for i in numbers]
            if not names or "CacheList" in names:
                raise ValueError(f"the caches at {place} are no list of caches")
            parts = [self._read(f"{place}.{i}.0", name) for i, name in zip(numbers, names, strict=True)]
            return _Saved(name, parts=tuple(parts))
        kind = self._scalars.get(f"{place}.0")
        if name == "ArraysCache":
            if any(self._scalars.get(f"{place}.{i}") != "none" for i in (1, 2)):
                raise ValueError(f"the state at {place} has padding or lengths, which kvant's do not have")
            inner = [f"{place}.0.{i}" for i in self._children(f"{place}.0")]
            return _Saved(name, places=tuple(None if self._scalars.get(p) == "none" else p for p in inner))
        if name == "KVCache" and kind == "none":  # one that the model does not use
            return _Saved(name)
        if kind != "string":
            raise ValueError(
                f"the {name[:80]} at {place} is not kvant's; mlx_lm.models.cache.load_prompt_cache reads it"
            )
        raw = json.loads(self._text(f"{place}.0"), object_pairs_hook=unique_keys)
        if not isinstance(raw, dict) or not all(isinstance(value, str) for value in raw.values()):
            raise ValueError(f"the layer at {place} says nothing of itself")
        shared = raw.pop("shared", "") == str(True)
        header = parse(raw)
        if len(header.layers) != 1:
            raise ValueError(f"the layer at {place} says that it is {len(header.layers)} layers")
        places = tuple(f"{place}.{i}" for i in self._children(place) if i)
        return _Saved(name, header, shared, places)

    def _state(self, saved: _Saved) -> LayerFormat:
        return LayerFormat(
            "state", state=tuple(None if place is None else self.stored(place) for place in saved.places)
        )

    def _children(self, place: str) -> range:
        """The numbers of the parts of what is at a place."""
        start = f"{place}."
        found = {key[len(start) :].split(".")[0] for key in self._found.tensors if key.startswith(start)}
        if found != {str(i) for i in range(len(found))}:
            raise ValueError(f"the parts at {place} are not numbered")
        return range(len(found))

    def _text(self, place: str) -> str:
        if self._scalars.get(place) != "string":
            raise ValueError(f"there is no text at {place}")
        dtype, shape = self.stored(place)
        if dtype != "I32" or len(shape) != 1 or shape[0] > MAX_HEADER_BYTES:
            raise ValueError(f"the text at {place} is none")
        codes: Any = self.take(place, (dtype, shape)).tolist()
        return "".join(map(chr, codes))


class _Places:
    """The arrays at given places, one after the other."""

    def __init__(self, file: MlxLmFile, places: Sequence[str | None]) -> None:
        self._file = file
        self._left: Iterator[str] = iter([place for place in places if place is not None])

    def take(self, stored: Stored) -> mx.array:
        """The next array."""
        place = next(self._left, None)
        if place is None:
            raise ValueError("an array is missing")
        return self._file.take(place, stored)


def make_model_cache(header: SnapshotHeader, max_seq_len: int | None) -> ModelCache:
    """An empty cache for a snapshot, without a model.

    Raises:
        ValueError: layers that no cache has, or more than this machine's memory.
    """
    if header.layout:
        from kvant.bridge.without_model import make_cache  # not for a decoder's: it imports mlx-lm

        return make_cache(header, max_seq_len)
    return without_model.make_cache(header, max_seq_len)

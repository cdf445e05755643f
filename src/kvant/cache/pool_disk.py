"""A pool's files in a disk cache: stored pages and states, under the digests of their texts."""

import hashlib
import json
from collections.abc import Callable, Sequence
from importlib.metadata import version
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import mlx.core as mx

from kvant.cache.disk import DiskCache
from kvant.cache.exact_tail import TailCopy
from kvant.cache.layer_format import (
    Arrays,
    Stored,
    array_bytes,
    as_array,
    parse_stored,
    stored_bytes,
    stored_of,
)
from kvant.cache.layer_group import LayerGroup
from kvant.cache.pages import PAGE_SIZE
from kvant.errors import SnapshotError
from kvant.tensor_header import make_header, read_header

if TYPE_CHECKING:
    from kvant.cache.pool import Pool

VERSION = 2  # version 1 had another file format
END = 255  # the kind of a file with states and tail, not a layer group's page
Parsed = TypeVar("Parsed")


class PageGoneError(Exception):
    """A page or states that were in the disk cache are missing or invalid."""


class PoolDisk:
    """The files of one model and format in a disk cache, which may also have others."""

    def __init__(self, disk: DiskCache, pool: "Pool", *, is_exact: bool) -> None:
        """``is_exact``: read only files of deterministic schedulers with this MLX on this kind of device."""
        pool.check_whole()
        if pool.identity is None:
            raise ValueError(
                "the model was not loaded from a folder: its files could not be told from another's"
            )
        self.disk = disk
        self._groups = pool.groups
        self._tail_formats = [] if pool.tails is None else [layer.format for layer in pool.tails.layers]
        self._row_bytes = {group: sum(map(stored_bytes, _rows(group, 1))) for group in pool.groups}
        self._states = pool.states
        computed = [version("mlx"), str(mx.default_device())] if is_exact else []
        facts = [
            VERSION,
            pool.identity.model,
            pool.layout,
            [layer.format.as_json() for layer in pool.layers],
            computed,
        ]
        self._key = hashlib.sha256(json.dumps(facts).encode()).digest()

    def has(self, group: LayerGroup, digest: bytes) -> bool:
        """Return whether the page of a layer group at the end of a text exists."""
        return self._file(self._groups.index(group), digest) in self.disk

    def has_end(self, digest: bytes) -> bool:
        """Return whether the states after a text exist."""
        return self._file(END, digest) in self.disk

    def put_page(self, group: LayerGroup, digest: bytes, page: int, rows: int) -> None:
        """Write the first rows of a page; a partial page only if there are states, to continue from."""
        if rows == PAGE_SIZE or self._states:
            size = rows * self._row_bytes[group]
            name = self._file(self._groups.index(group), digest)
            self.disk.put(name, size, lambda: packed(group.page_rows(page, rows)))

    def put_end(self, digest: bytes, states: Sequence[Arrays], tail: TailCopy | None) -> None:
        """Write the states and the exact tail at the end of a text."""
        arrays = [array for state in states for array in state]
        if tail is not None:
            arrays += [mx.array([tail.sinks, tail.start, tail.length], mx.int64), *tail.rows]
        size = sum(array.nbytes for array in arrays if array is not None)
        self.disk.put(self._file(END, digest), size, lambda: packed(arrays))

    def end(self, digest: bytes, length: int) -> tuple[list[Arrays] | None, TailCopy | None]:
        """Return the states after a text of ``length`` tokens and its exact tail, or None for either.

        Raises:
            PageGoneError: the layers have states, and the file is missing or invalid.
        """
        count = sum(len(state.shapes) for state in self._states)
        tail_count = 1 + len(self._tail_formats) if self._tail_formats else 0

        def parse(data: bytes) -> tuple[list[Arrays] | None, TailCopy | None]:
            arrays = unpacked(data, count + tail_count)
            rest = iter(arrays[:count])
            states = [[*islice(rest, len(state.shapes))] for state in self._states]
            for state, values in zip(self._states, states, strict=True):
                state.check(values)
            tail = self._tail(arrays[count], arrays[count + 1 :], length) if tail_count else None
            return states or None, tail

        try:
            return self._get(END, digest, parse)
        except PageGoneError:
            if self._states:
                raise
            return None, None

    def _tail(self, facts: mx.array | None, rows: Arrays, length: int) -> TailCopy:
        """Return the tail in a file; raise a ValueError unless it is one of ``length`` tokens."""
        if facts is None or facts.dtype != mx.int64 or facts.shape != (3,):
            raise ValueError("a tail without its three numbers")
        sinks, start, count = (int(number) for number in memoryview(facts))  # type: ignore[arg-type]
        if count != length:
            raise ValueError(f"a tail of {count} tokens; expected {length}")
        return TailCopy.checked(sinks, start, length, rows, self._tail_formats)

    def page(self, group: LayerGroup, digest: bytes, rows: int) -> list[mx.array]:
        """Return the rows of a page, for :meth:`LayerGroup.put_page`; raise :class:`PageGoneError`."""
        expected = _rows(group, rows)

        def parse(data: bytes) -> list[mx.array]:
            arrays = unpacked(data, len(expected))
            if list(stored_of(arrays)) != expected:
                raise ValueError(f"arrays of {stored_of(arrays)}; expected {expected}")
            return [array for array in arrays if array is not None]

        return self._get(self._groups.index(group), digest, parse)

    def remove(self, group: LayerGroup, digest: bytes) -> None:
        """Remove a page's file, if there is one."""
        self.disk.remove(self._file(self._groups.index(group), digest))

    def used(self, page_hashes: Sequence[bytes]) -> None:
        """Note that the text with these page digests was used; its last pages will go before its first."""
        kinds = (*range(len(self._groups)), END)
        self.disk.used([self._file(kind, digest) for digest in page_hashes for kind in kinds])

    def _file(self, kind: int, digest: bytes) -> str:
        """Return the name of the file for a layer group's page or the end of a text."""
        return hashlib.blake2b(self._key + digest + bytes([kind]), digest_size=32).hexdigest()

    def _get(self, kind: int, digest: bytes, parse: Callable[[bytes], Parsed]) -> Parsed:
        """Parse a file; remove an invalid one, and raise a :class:`PageGoneError`."""
        name = self._file(kind, digest)
        data = self.disk.get(name)
        try:
            if data is not None:
                return parse(data)
        except (ValueError, RecursionError, SnapshotError):
            self.disk.remove(name)
        raise PageGoneError(f"{name} is not in the disk cache")


def _rows(group: LayerGroup, rows: int) -> list[Stored]:
    """Return the dtypes and shapes of a group's arrays with this many rows."""
    return [each for layer in group.layers for each in layer.format.arrays(rows).values()]


def packed(arrays: Sequence[mx.array | None]) -> bytes:
    """Return arrays as a safetensors file, each under its number; None is left out."""
    mx.eval([array for array in arrays if array is not None])
    tensors = {str(i): stored for i, stored in enumerate(stored_of(arrays)) if stored is not None}
    contents = [array_bytes(array) for array in arrays if array is not None]
    return b"".join([make_header(tensors, {"arrays": str(len(arrays))}), *contents])


def unpacked(data: bytes, count: int) -> Arrays:
    """Return the arrays of :func:`packed`; raise a ValueError unless there are ``count``."""
    header = read_header(Path(), BytesIO(data), len(data), SnapshotError)
    contents = memoryview(data)[len(header.data) :]
    names = [str(number) for number in range(count)]
    if header.metadata != {"arrays": str(count)} or not header.tensors.keys() <= set(names):
        raise ValueError(f"a file of other arrays; expected {count} of them")
    arrays: Arrays = [None] * count
    for name, tensor in header.tensors.items():
        stored = parse_stored([tensor.dtype, [*tensor.shape]])
        assert stored is not None
        arrays[int(name)] = as_array(bytearray(contents[tensor.first : tensor.last]), stored)
    return arrays

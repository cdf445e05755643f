"""What a pool has in a disk cache: pages and states under the digests of their texts, in the form it
stores them.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from itertools import islice
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

if TYPE_CHECKING:
    from kvant.cache.pool import Pool

VERSION = 1
STATES, TAIL = 255, 254  # kinds of files that are no layer group's pages
Parsed = TypeVar("Parsed")


class PageGoneError(Exception):
    """A page, or states, that were in the disk cache are not there now, or are wrong."""


class PoolDisk:
    """Files of one model and format in a disk cache, which may have others' too."""

    def __init__(self, disk: DiskCache, pool: "Pool", *, is_exact: bool) -> None:
        """``is_exact``: read only what chunks of 128 tokens computed here, for deterministic schedulers."""
        pool.check_whole()
        if pool.identity is None:
            raise ValueError(
                "the model was not loaded from a folder: nobody could tell its files from another's"
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

    def has(self, group: LayerGroup | None, digest: bytes) -> bool:
        """Whether the page of some layers at the end of a text is there; None: the states after it."""
        return self._name(group, digest) in self.disk

    def put_page(self, group: LayerGroup, digest: bytes, page: int, rows: int) -> None:
        """Write a page of so many rows; fewer than 128 only if there are states, which go on there."""
        if rows == PAGE_SIZE or self._states:
            size = rows * self._row_bytes[group]
            self.disk.put(self._name(group, digest), size, lambda: packed(group.page_rows(page, rows)))

    def put_states(self, digest: bytes, states: Sequence[Arrays]) -> None:
        """Have the states after a text written."""
        arrays = [array for state in states for array in state]
        size = sum(array.nbytes for array in arrays if array is not None)
        self.disk.put(self._name(None, digest), size, lambda: packed(arrays))

    def put_tail(self, digest: bytes, tail: TailCopy) -> None:
        """Have the exact tail at the end of a text written."""
        size = sum(array.nbytes for array in tail.rows)
        facts = mx.array([tail.sinks, tail.start, tail.length], mx.int64)
        self.disk.put(self._file(TAIL, digest), size, lambda: packed([facts, *tail.rows]))

    def tail(self, digest: bytes, length: int) -> TailCopy | None:
        """Return the exact tail at the end of a text of so many tokens; None: it is not there."""
        name = self._file(TAIL, digest)
        data = self.disk.get(name)
        if data is None:
            return None
        try:
            return self._parsed_tail(data, length)
        except (ValueError, RecursionError):
            self.disk.remove(name)
            return None

    def _parsed_tail(self, data: bytes, length: int) -> TailCopy:
        """Return the tail in a file; a ValueError unless it is one of so many tokens."""
        facts, *rows = unpacked(data)
        if facts is None or facts.dtype != mx.int64 or facts.shape != (3,):
            raise ValueError("a tail without its three numbers")
        sinks, start, given = (int(number) for number in memoryview(facts))  # type: ignore[arg-type]
        if given != length:
            raise ValueError(f"a tail of {given} tokens; expected {length}")
        return TailCopy.checked(sinks, start, length, rows, self._tail_formats)

    def page(self, group: LayerGroup, digest: bytes, rows: int) -> list[mx.array]:
        """Return the rows of a page, for :meth:`LayerGroup.put_page`; raise :class:`PageGoneError`."""
        return self._get(group, digest, partial(unpacked, expected=_rows(group, rows)))  # type: ignore[arg-type]

    def states(self, digest: bytes) -> list[Arrays]:
        """Return the states after a text; raise :class:`PageGoneError` if they are not there."""

        def parse(data: bytes) -> list[Arrays]:
            rest = iter(unpacked(data))
            found = [[*islice(rest, len(state.shapes))] for state in self._states]
            for state, own in zip(self._states, found, strict=True):
                state.check(own)
            return found

        return self._get(None, digest, parse)

    def remove(self, group: LayerGroup, digest: bytes) -> None:
        """Remove a page's file, if there is one."""
        self.disk.remove(self._name(group, digest))

    def used(self, page_hashes: Sequence[bytes]) -> None:
        """Note that a text was used, whose pages' digests these are. Its last pages go before its first."""
        kinds = (*range(len(self._groups)), STATES, TAIL)
        self.disk.used([self._file(kind, digest) for digest in page_hashes for kind in kinds])

    def _name(self, group: LayerGroup | None, digest: bytes) -> str:
        return self._file(STATES if group is None else self._groups.index(group), digest)

    def _file(self, kind: int, digest: bytes) -> str:
        """Return the name of a file: of a layer group's page, of states or of a tail."""
        return hashlib.blake2b(self._key + digest + bytes([kind]), digest_size=32).hexdigest()

    def _get(self, group: LayerGroup | None, digest: bytes, parse: Callable[[bytes], Parsed]) -> Parsed:
        """Return what a file has; remove one of something else."""
        name = self._name(group, digest)
        data = self.disk.get(name)
        try:
            if data is not None:
                return parse(data)
        except (ValueError, RecursionError):
            self.disk.remove(name)
        raise PageGoneError(f"{name} is not in the disk cache")


def _rows(group: LayerGroup, rows: int) -> list[Stored]:
    """What the arrays of so many rows are."""
    return [each for layer in group.layers for each in layer.format.arrays(rows).values()]


def packed(arrays: Sequence[mx.array | None]) -> bytes:
    """Arrays as bytes: what they are as JSON, behind its length, and what is in them."""
    mx.eval([array for array in arrays if array is not None])
    stored = json.dumps(stored_of(arrays))
    contents = [array_bytes(array) for array in arrays if array is not None]
    return b"".join([len(stored).to_bytes(4, "little"), stored.encode(), *contents])


def unpacked(data: bytes, expected: Sequence[Stored] | None = None) -> Arrays:
    """Return the arrays of :func:`packed`; a ValueError unless they are the ``expected`` ones."""
    place = 4 + int.from_bytes(data[:4], "little")
    raw = json.loads(data[4:place])
    if not isinstance(raw, list):
        raise ValueError(f"a JSON {type(raw).__name__}; expected a list")
    every, arrays = [parse_stored(each) for each in raw], []
    if expected is not None and every != expected:
        raise ValueError(f"arrays of {every}; expected {expected}")
    for stored in every:
        size = 0 if stored is None else stored_bytes(stored)
        if size > len(data) - place:
            raise ValueError("its arrays have more bytes than there are")
        arrays.append(None if stored is None else as_array(bytearray(data[place : place + size]), stored))
        place += size
    return arrays

"""A cache's tokens as a file: saved whole or not at all, and restored into a cache of the same format.

docs/python.md describes the file. A layer is copied at a time, so nothing is held twice.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import mlx.core as mx

from kvant.atomic import atomic_file
from kvant.cache.layer_format import Stored, array_bytes, as_array, difference, stored_bytes
from kvant.cache.paged_layers import PoolLayer
from kvant.cache.pool_sequence import PoolSequence
from kvant.cache.snapshot_header import RopeFacts, SnapshotHeader, describe, parse
from kvant.errors import SnapshotError, one_line
from kvant.files import open_regular
from kvant.tensor_header import MAX_HEADER_BYTES, TensorHeader
from kvant.tensor_header import read_header as read_tensor_header

DIGEST_BYTES = 32


def save(path: Path, sequence: PoolSequence, *, metadata: Mapping[str, str]) -> None:
    """Write what a sequence holds, a step that is not committed left out; see :meth:`kvant.cache.ModelCache.save`."""
    if not all(isinstance(text, str) for pair in metadata.items() for text in pair):
        raise ValueError("metadata has a key or a value that is no text; expected a dict of str to str")
    header = describe(sequence, metadata)
    data = _encode(header)
    if len(data) > MAX_HEADER_BYTES:
        raise SnapshotError(f"{path}: its header would have {len(data)} bytes; at most {MAX_HEADER_BYTES} are read")
    try:
        with atomic_file(path) as file:
            whole = hashlib.sha256()
            for part in (data, hashlib.sha256(data).digest(), *_contents(header, sequence)):
                file.write(part)
                whole.update(part)
            file.write(whole.digest())
    except (OSError, ValueError) as error:
        raise SnapshotError(f"{path}: cannot be written: {one_line(error)}") from error


def read_header(path: Path) -> SnapshotHeader:
    """What a snapshot says of itself; its header is whole, the rest has not been looked at."""
    with _open(path) as (_, header, _):
        return header


def restore(path: Path, sequence: PoolSequence) -> dict[str, str]:
    """Put a snapshot's tokens into an empty sequence. Returns the metadata it was saved with."""
    with _open(path) as (file, header, whole):
        try:
            _check_fits(header, sequence)
            ids = _fill(header, sequence, _Reader(file, whole))
            if file.read(DIGEST_BYTES + 1) != whole.digest():
                raise ValueError("altered: its SHA-256 is another")
        except (OSError, ValueError) as error:
            sequence.empty()
            raise SnapshotError(f"{path}: {one_line(error)}") from error
        except BaseException:
            sequence.empty()
            raise
    if sequence.pool.identity is None:
        sequence.pool.identity = header.identity
    sequence.restore(header.length, ids)
    return dict(header.metadata)


def _check_fits(header: SnapshotHeader, sequence: PoolSequence) -> None:
    """Refuse a snapshot that a sequence cannot take."""
    own = describe(sequence, {})
    _check_model(header, own)
    for number, (given, expected) in enumerate(zip(header.layers, own.layers, strict=True)):
        differs = difference(given, expected, header.reservation, own.reservation)
        if differs:
            raise ValueError(f"of another format: {differs}, in layer {number}")
    if header.length > own.reservation:
        raise ValueError(f"lengths has {header.length} tokens; the cache has {own.reservation} reserved")


def _check_model(given: SnapshotHeader, own: SnapshotHeader) -> None:
    """Refuse another model's. What one of them does not know is not compared."""
    if given.identity is not None and own.identity is not None:
        for what in ("model", "tokenizer"):
            one, other = getattr(given.identity, what), getattr(own.identity, what)
            if one != other:
                raise ValueError(f"of another model: the {what}'s digest is {one}; expected {other}")
    if len(given.layers) != len(own.layers):
        raise ValueError(f"of another model: it has {len(given.layers)} layers; expected {len(own.layers)}")
    if given.layout != own.layout:
        pairs = enumerate(zip(given.layout, own.layout, strict=False))
        start = max(0, next((i for i, (a, b) in pairs if a != b), 0) - 20)
        one, other = (layout[start : start + 80] for layout in (given.layout, own.layout))
        raise ValueError(f"of another model: its layout has {one!r}; expected {other!r}")
    if given.rope is not None and own.rope is not None and given.rope != own.rope:
        raise ValueError(f"of another model: {_rope_difference(given.rope, own.rope)}")


def _rope_difference(given: RopeFacts, own: RopeFacts) -> str:
    if len(given.frequencies) != len(own.frequencies):
        return f"RoPE has {len(given.frequencies)} frequencies; expected {len(own.frequencies)}"
    for pair, (one, other) in enumerate(zip(given.frequencies, own.frequencies, strict=True)):
        if one != other:
            return f"RoPE's frequency of pair {pair} is {one!r}; expected {other!r}"
    return f"RoPE's factor is {given.factor!r}; expected {own.factor!r}"


def _encode(header: SnapshotHeader) -> bytes:
    """The bytes before the first tensor."""
    entries: dict[str, object] = {"__metadata__": header.as_metadata()}
    end = 0
    for name, (dtype, shape) in header.tensors().items():
        first, end = end, end + stored_bytes((dtype, shape))
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}
    data = json.dumps(entries, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    return len(data).to_bytes(8, "little") + data


def _contents(header: SnapshotHeader, sequence: PoolSequence) -> Iterator[bytes | memoryview]:
    """The bytes of every tensor between the digests, in order."""
    yield array_bytes(mx.array(sequence.ids, mx.uint32))
    for own, layer in zip(header.layers, sequence.saved_layers, strict=True):
        if isinstance(layer, PoolLayer):
            arrays = [*layer.tables().values(), *sequence.held_rows(layer, own.first(header.length, header.written))]
        else:
            arrays = [array for array in layer if array is not None]
        for array in arrays:
            yield array_bytes(array)


def _fill(header: SnapshotHeader, sequence: PoolSequence, reader: "_Reader") -> list[int]:
    """Write every layer's tokens into an empty sequence, without counting them. Returns their ids."""
    length, written = header.length, header.written
    ids: list[int] = reader.take(("U32", (length,))).tolist()  # type: ignore[assignment]
    layers = list(zip(header.layers, sequence.saved_layers, strict=True))
    lost = {own: given.first(length, written) for given, own in layers if isinstance(own, PoolLayer)}
    sequence.begin_at(lost, length)
    states = []
    for number, (given, own) in enumerate(layers):
        if isinstance(own, PoolLayer):
            for name, stored in given.tables().items():
                if not mx.array_equal(reader.take(stored), own.tables()[name]):
                    raise ValueError(f"of another model: {name} of layer {number} has other numbers")
            tokens = [reader.take(stored) for stored in given.arrays(given.rows(length, written)).values()]
            sequence.put(own, tokens, length)
        else:
            states.append([None if stored is None else reader.take(stored) for stored in given.state])
    sequence.restore_states(length, states)
    return ids


class _Reader:
    """The tensors of a snapshot, one after the other, on the way to its digest."""

    def __init__(self, file: BinaryIO, whole: "hashlib._Hash") -> None:
        self._file, self._whole = file, whole

    def take(self, stored: Stored) -> mx.array:
        """The next array."""
        data = bytearray(stored_bytes(stored))
        if self._file.readinto(data) != len(data):  # type: ignore[attr-defined]
            raise ValueError("truncated while it was read")
        self._whole.update(data)
        return as_array(data, stored)


@contextmanager
def _open(path: Path) -> Iterator[tuple[BinaryIO, SnapshotHeader, "hashlib._Hash"]]:
    """A snapshot open behind the digest of its header, the header, and the hash of the bytes so far.

    The header is compared with its digest, and with the tensors that follow from it, before any of it is used.
    """
    try:
        real = Path(os.path.realpath(path))  # whoever names a link means the file behind it
        if os.path.lexists(real) and not real.is_file():  # a device is not even opened
            raise SnapshotError(f"{path}: not a regular file")
    except (OSError, ValueError) as error:  # a name too long, a NUL
        raise SnapshotError(f"{path}: cannot be read: {one_line(error)}") from error
    with open_regular(real, path, SnapshotError) as file:
        try:
            found = read_tensor_header(path, file, os.fstat(file.fileno()).st_size, SnapshotError)
        except (OSError, ValueError, RecursionError) as error:
            raise SnapshotError(f"{path}: not a whole safetensors file: {one_line(error)}") from error
        try:
            header = parse(found.metadata)
            digest = file.read(DIGEST_BYTES)
            if hashlib.sha256(found.data).digest() != digest:
                raise ValueError("altered: the SHA-256 of its header is another")
            _check_tensors(found, header)
        except (OSError, ValueError, RecursionError) as error:
            raise SnapshotError(f"{path}: {one_line(error)}") from error
        yield file, header, hashlib.sha256(found.data + digest)


def _check_tensors(found: TensorHeader, header: SnapshotHeader) -> None:
    """Refuse tensors that are not exactly those that the header describes: the file has their bytes then."""
    given = [(name, (tensor.dtype, tensor.shape)) for name, tensor in found.tensors.items()]
    expected = list(header.tensors().items())
    ordered = sorted(found.tensors.values(), key=lambda tensor: (tensor.first, tensor.last))
    if given != expected or ordered != list(found.tensors.values()):
        other = next((one for one, own in zip(given, expected, strict=False) if one != own), None)
        raise ValueError(f"its tensors are not those of the cache it describes: {other or len(given)}")

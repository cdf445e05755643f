"""A cache's tokens as a file: saved whole or not at all, and restored into a cache of the same format.

docs/python.md describes the file. A layer is copied at a time, so nothing is held twice.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

import mlx.core as mx

from kvant.cache.atomic import atomic_file
from kvant.cache.identity import Identity
from kvant.cache.layer import KVCache
from kvant.cache.layer_format import DTYPES, Stored, as_full, difference
from kvant.cache.snapshot_header import RopeFacts, SnapshotHeader, describe, parse
from kvant.errors import SnapshotError, one_line
from kvant.files import open_regular
from kvant.tensor_header import MAX_HEADER_BYTES, TensorHeader
from kvant.tensor_header import read_header as read_tensor_header

DIGEST_BYTES = 32


class Reader(Protocol):
    """Where arrays come from."""

    def take(self, stored: Stored) -> mx.array:
        """The next array, of this dtype and shape; a ValueError where it is another."""


def save(path: Path, layers: Sequence[KVCache], *, metadata: Mapping[str, str]) -> None:
    """Write what the layers of one cache hold, in place of what is at ``path``.

    Args:
        path: its folder is there.
        layers: of one cache. A step that is not committed is left out.
        metadata: text by its name.

    Raises:
        SnapshotError: it cannot be written; what was at ``path`` still is.
        ValueError: metadata that is no text.
    """
    if not all(isinstance(text, str) for pair in metadata.items() for text in pair):
        raise ValueError("metadata has a key or a value that is no text; expected a dict of str to str")
    header = describe(layers, metadata)
    data = _encode(header)
    if len(data) > MAX_HEADER_BYTES:
        raise SnapshotError(f"{path}: its header would have {len(data)} bytes; at most {MAX_HEADER_BYTES} are read")
    try:
        with atomic_file(path) as file:
            whole = hashlib.sha256()
            for part in (data, hashlib.sha256(data).digest(), *_contents(header, layers)):
                file.write(part)
                whole.update(part)
            file.write(whole.digest())
    except (OSError, ValueError) as error:
        raise SnapshotError(f"{path}: cannot be written: {one_line(error)}") from error


def read_header(path: Path) -> SnapshotHeader:
    """What a snapshot says of itself; its header is whole, the rest has not been looked at.

    Raises:
        SnapshotError: not a snapshot, one of another version, truncated, or with an altered header.
    """
    with _open(path) as (_, header, _):
        return header


def restore(path: Path, layers: Sequence[KVCache]) -> dict[str, str]:
    """Put a snapshot's tokens into the layers of one cache, which is empty.

    After an error the layers are to be reset: rows may have been written, none counts.

    Returns:
        the metadata it was saved with.

    Raises:
        SnapshotError: as :func:`read_header`; a truncated or altered file; a cache of another model or format, or
            without room for the tokens. The message names the field, and both values.
    """
    sequences = layers[0].sequences
    with _open(path) as (file, header, whole):
        try:
            check_fits(header, layers)
            sequences.take_batch(len(header.lengths))
            ids = fill(header, layers, _Reader(file, whole))
            if file.read(DIGEST_BYTES + 1) != whole.digest():
                raise ValueError("altered: its SHA-256 is another")
        except (OSError, ValueError) as error:
            raise SnapshotError(f"{path}: {one_line(error)}") from error
    if sequences.identity is None:  # a cache without a model: the first one that uses it is compared
        sequences.identity, sequences.unchecked = header.identity, path
    sequences.restore(header.lengths, header.written, ids)
    return dict(header.metadata)


def check_fits(header: SnapshotHeader, layers: Sequence[KVCache]) -> None:
    """Refuse a snapshot that the layers of a cache cannot take.

    Raises:
        ValueError: it names the field, and both values.
    """
    own = describe(layers, {})
    check_model(header, own)
    for number, (given, layer) in enumerate(zip(header.layers, layers, strict=True)):
        differs = difference(given, layer.format, header.reservation, layer.max_seq_len)
        if differs:
            raise ValueError(f"of another format: {differs}, in layer {number}")
    if own.reservation is None:  # it grows
        return
    if len(header.lengths) != len(own.lengths):
        raise ValueError(f"batch is {len(header.lengths)}; expected {len(own.lengths)}, as the cache has")
    if max(header.lengths) > own.reservation:
        raise ValueError(f"lengths has {max(header.lengths)} tokens; the cache has {own.reservation} reserved")


def check_model(given: SnapshotHeader, own: SnapshotHeader) -> None:
    """Refuse another model's. What one of them does not know is not compared.

    Raises:
        ValueError: it names the field, and both values.
    """
    _check_identity(given.identity, own.identity)
    if len(given.layers) != len(own.layers):
        raise ValueError(f"of another model: it has {len(given.layers)} layers; expected {len(own.layers)}")
    if given.layout != own.layout:
        pairs = enumerate(zip(given.layout, own.layout, strict=False))
        start = max(0, next((i for i, (a, b) in pairs if a != b), 0) - 20)
        one, other = (layout[start : start + 80] for layout in (given.layout, own.layout))
        raise ValueError(f"of another model: its layout has {one!r}; expected {other!r}")
    if given.rope is not None and own.rope is not None and given.rope != own.rope:
        raise ValueError(f"of another model: {_rope_difference(given.rope, own.rope)}")


def check_source(layers: Sequence[KVCache], identity: Identity | None, reference: Sequence[KVCache] | None) -> None:
    """Compare the layers of a cache that was made without a model with the first model that uses it.

    Raises:
        SnapshotError: as :meth:`kvant.cache.ModelCache.check_source`.
    """
    sequences = layers[0].sequences
    try:
        _check_identity(sequences.identity, identity)
        if reference is not None:
            given = describe(layers, {})
            check_model(given, describe(reference, {}))
            for number, (layer, own) in enumerate(zip(layers, reference, strict=True)):
                held, expected = layer.format, own.format
                expected = as_full(expected, held) if held.kind == "full" else expected
                differs = difference(held, expected, given.reservation, own.max_seq_len)
                if differs:
                    raise ValueError(f"of another model: {differs}, in layer {number}")
                check_tables(number, layer.tables(), own.tables())
    except ValueError as error:
        raise SnapshotError(f"{sequences.unchecked}: {one_line(error)}") from error
    sequences.identity = identity or sequences.identity


def _check_identity(given: Identity | None, own: Identity | None) -> None:
    if given is None or own is None:
        return
    for what in ("model", "tokenizer"):
        one, other = getattr(given, what), getattr(own, what)
        if one != other:
            raise ValueError(f"of another model: the {what}'s digest is {one}; expected {other}")


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
        first, end = end, end + nbytes((dtype, shape))
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}
    data = json.dumps(entries, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    return len(data).to_bytes(8, "little") + data


def nbytes(stored: Stored) -> int:
    """Bytes of an array."""
    dtype, shape = stored
    size = DTYPES[dtype].size
    for length in shape:
        size *= length
    return size


def _contents(header: SnapshotHeader, layers: Sequence[KVCache]) -> Iterator[bytes | memoryview]:
    """The bytes of every tensor between the digests, in order."""
    if header.has_ids:
        for ids in layers[0].sequences.ids:
            yield _bytes(mx.array(ids, mx.uint32))
    for layer in layers:
        layer.settle_committed()
        for array in (*layer.tables().values(), *layer.stored_state()):
            yield _bytes(array)
        for sequence in range(len(header.lengths)) if layer.format.has_tokens else ():
            for array in layer.stored(sequence):
                yield _bytes(array)


def _bytes(array: mx.array) -> bytes | memoryview:
    if not array.size:
        return b""
    return memoryview(mx.view(mx.contiguous(array).reshape(-1), mx.uint8))  # type: ignore[arg-type]


def fill(header: SnapshotHeader, layers: Sequence[KVCache], reader: Reader) -> list[list[int]]:
    """Write every layer's tokens into it, without counting them.

    Args:
        header: fits the layers. A cache made without a model takes the biases that it has, too.
        layers: of one cache, empty.
        reader: gives the arrays in the order of a snapshot.

    Returns:
        the ids of each sequence, or nothing where the header has none.

    Raises:
        ValueError: biases of another model, or an array that is not as the header says.
    """
    lengths, written = header.lengths, header.written
    ids: list[list[int]] = [
        reader.take(("U32", (length,))).tolist()  # type: ignore[misc]
        for length in (lengths if header.has_ids else ())
    ]
    for number, (given, layer) in enumerate(zip(header.layers, layers, strict=True)):
        tables = {name: reader.take(stored) for name, stored in given.tables().items()}
        if layer.sequences.unchecked is None:
            check_tables(number, tables, layer.tables())
        else:
            for name, own in layer.tables().items():
                own[:] = tables[name]  # in place: a ring has several splits that share it
        if not given.has_tokens:
            layer.restore_state([None if stored is None else reader.take(stored) for stored in given.state])
        for b in range(len(lengths)) if given.has_tokens else ():
            arrays = given.arrays(given.rows(lengths[b], written[b]))
            tokens = [reader.take(stored) for stored in arrays.values()]
            layer.restore(b, tokens, given.first(lengths[b], written[b]), lengths)
            mx.eval(layer.buffers)  # written now, so that what was read is freed before the next is
    return ids


def check_tables(number: int, given: Mapping[str, mx.array], own: Mapping[str, mx.array]) -> None:
    """Raise a ValueError unless the biases of a layer's tokens are the same."""
    for name, array in given.items():
        if not mx.array_equal(array, own[name]):
            raise ValueError(f"of another model: {name} of layer {number} has other numbers")


class _Reader:
    """The tensors of a snapshot, one after the other, on the way to its digest."""

    def __init__(self, file: BinaryIO, whole: "hashlib._Hash") -> None:
        self._file, self._whole = file, whole

    def take(self, stored: Stored) -> mx.array:
        """The next array."""
        data = read_exactly(self._file, nbytes(stored))
        self._whole.update(data)
        return as_array(data, stored)


def read_exactly(file: BinaryIO, count: int) -> bytearray:
    """So many bytes, or a ValueError."""
    data = bytearray(count)
    if file.readinto(data) != count:  # type: ignore[attr-defined]
        raise ValueError("truncated while it was read")
    return data


def as_array(data: bytearray, stored: Stored) -> mx.array:
    """The array of these bytes, which are as many as it has."""
    dtype, shape = stored
    if not data:
        return mx.zeros(shape, DTYPES[dtype])
    array = mx.array(memoryview(data))  # type: ignore[arg-type]
    return array.view(DTYPES[dtype]).reshape(shape)


@contextmanager
def _open(path: Path) -> Iterator[tuple[BinaryIO, SnapshotHeader, "hashlib._Hash"]]:
    """A snapshot open behind the digest of its header, the header, and the hash of the bytes so far.

    The header is compared with its digest, and with the tensors that follow from it, before any of it is used.
    """
    with open_tensors(path) as (file, found):
        try:
            header = parse(found.metadata)
            digest = file.read(DIGEST_BYTES)
            if hashlib.sha256(found.data).digest() != digest:
                raise ValueError("altered: the SHA-256 of its header is another")
            _check_tensors(found, header)
        except (OSError, ValueError, RecursionError) as error:
            raise SnapshotError(f"{path}: {one_line(error)}") from error
        yield file, header, hashlib.sha256(found.data + digest)


@contextmanager
def open_tensors(path: Path) -> Iterator[tuple[BinaryIO, TensorHeader]]:
    """A safetensors file open behind its header, and the header. It may be a stranger's.

    Raises:
        SnapshotError: no such file, or one that is truncated or no safetensors file.
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
        yield file, found


def _check_tensors(found: TensorHeader, header: SnapshotHeader) -> None:
    """Refuse tensors that are not exactly those that the header describes: the file has their bytes then."""
    given = [(name, (tensor.dtype, tensor.shape)) for name, tensor in found.tensors.items()]
    expected = list(header.tensors().items())
    ordered = sorted(found.tensors.values(), key=lambda tensor: (tensor.first, tensor.last))
    if given != expected or ordered != list(found.tensors.values()):
        other = next((one for one, own in zip(given, expected, strict=False) if one != own), None)
        raise ValueError(f"its tensors are not those of the cache it describes: {other or len(given)}")

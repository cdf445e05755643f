"""Snapshots: files of a cache's tokens, saved atomically, and restored into a cache of the same format.

docs/python.md describes the file. Layers are copied one at a time, so there is no second copy of all. Every
field of a header is checked when it is read.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx

from kvant.atomic import atomic_file
from kvant.cache.exact_tail import TailCopy, check_tail
from kvant.cache.identity import Identity
from kvant.cache.layer_format import (
    LayerFormat,
    Stored,
    array_bytes,
    as_array,
    check_number,
    check_numbers,
    difference,
    stored_bytes,
    stored_of,
)
from kvant.cache.layer_group import PoolLayer
from kvant.cache.pool_sequence import PoolSequence
from kvant.errors import SnapshotError, one_line
from kvant.files import open_regular, unique_keys
from kvant.tensor_header import MAX_HEADER_BYTES, make_header
from kvant.tensor_header import read_header as read_tensor_header

FORMAT = "kvant cache"
VERSION = 2  # version 1 had a digest of only a sample of the weights
MLX_LM_CLASSES = {"1.0", "2.0"}  # keys of the first cache's class in mlx-lm's files, old and new
DIGEST: Stored = ("U8", (32,))
DIGEST_BYTES = 32
FIELDS = {"identity", "rope", "reservation", "lengths", "written", "has_ids", "layers", "layout"}
MAX_LENGTH = 2**40  # tokens
MAX_LAYERS = 2**16


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """The description of a snapshot."""

    identity: Identity | None  # of the model; None: it was not loaded from a folder
    rope: Mapping[str, Any] | None  # frequencies and factor of its keys; None: mlx-lm's model rotates them
    reservation: int  # reserved tokens
    length: int  # number of its tokens
    written: int  # PoolSequence.written
    layers: tuple[LayerFormat, ...]
    # the cache entries that a bridged model expects, as JSON; "" for a decoder
    layout: str
    metadata: Mapping[str, str]  # the caller's
    # an exact tail's number of first tokens, and the position of its next one
    tail: tuple[int, int] | None = None

    @classmethod
    def of(cls, sequence: PoolSequence, metadata: Mapping[str, str]) -> "SnapshotHeader":
        """Return the header for a snapshot of a sequence."""
        pool = sequence.pool
        rotary = pool.rotary
        rope = None
        if rotary is not None:
            rope = {"frequencies": [*map(float, rotary.frequencies)], "factor": float(rotary.factor)}
        layers = [
            layer.format if isinstance(layer, PoolLayer) else LayerFormat("state", state=stored_of(layer))
            for layer in sequence.saved_layers
        ]
        length = sequence.length
        written = sequence.written
        span = sequence.tail
        tail = None if span is None else (min(span.sinks, length), min(span.start, length))
        return cls(
            pool.identity,
            rope,
            sequence.max_tokens,
            length,
            written,
            tuple(layers),
            pool.layout,
            metadata,
            tail,
        )

    @classmethod
    def parse(cls, metadata: Mapping[str, str]) -> "SnapshotHeader":
        """Parse the metadata of a file."""
        if metadata.get("format") != FORMAT:
            if MLX_LM_CLASSES & metadata.keys():
                raise ValueError(
                    "mlx-lm's prompt cache, which has no token ids; read the prompt with kvant and save that,"
                    " or use mlx_lm.models.cache.load_prompt_cache with mlx-lm's own loops"
                )
            raise ValueError("not a snapshot of a cache")
        version = metadata.get("version", "")
        if version != str(VERSION):
            raise ValueError(
                f"version {version[:20]!r} of the format, written by kvant "
                f"{metadata.get('kvant', '')[:20]!r}; this kvant reads version {VERSION}"
            )
        if metadata.keys() != {"format", "version", "kvant", "cache", "metadata"}:
            raise ValueError("its text has other parts than format, version, kvant, cache and metadata")
        text, raw = (_json_object(name, metadata[name]) for name in ("metadata", "cache"))
        if not all(isinstance(value, str) for value in text.values()):
            raise ValueError("metadata is not an object of strings")
        if raw.keys() - {"tail"} != FIELDS:  # only caches with exact tails have one
            raise ValueError("it has other fields than " + ", ".join(sorted(FIELDS)))
        if not isinstance(raw["layers"], list) or not 0 < len(raw["layers"]) <= MAX_LAYERS:
            raise ValueError("layers is not a list of formats")
        reservation = check_number("reservation", raw["reservation"], 1, MAX_LENGTH)
        lengths = check_numbers("lengths", raw["lengths"], 0, MAX_LENGTH)
        writtens = check_numbers("written", raw["written"], 0, MAX_LENGTH)
        if not len(lengths) == len(writtens) == 1:
            raise ValueError(
                f"lengths has {len(lengths)} numbers, written {len(writtens)}; expected one sequence"
            )
        if raw["has_ids"] is not True or not isinstance(raw["layout"], str):
            raise ValueError("has_ids is not true, or layout is not text")
        identity = _identity(raw["identity"])
        rope = _rope(raw["rope"])
        (length,) = lengths
        (written,) = writtens
        layers = tuple(map(LayerFormat.from_json, raw["layers"]))
        # Lengths must agree with each other, and with the tokens that windows and states may have forgotten.
        if length > written or (written and not length):
            raise ValueError(f"lengths has {length}, but written has {written}")
        if length > reservation:
            raise ValueError(f"lengths has {length}; reservation is {reservation}")
        for layer in layers:
            if layer.kind == "state" and length != written:
                raise ValueError(
                    f"lengths has {length}, but written has {written}, with the state of a linear layer"
                )
            if layer.first(length, written) and length < written - layer.slack - 1:
                raise ValueError(
                    f"lengths has {length}, but written has {written}, with a window of {layer.window}"
                )
        tail = None
        if any(layer.tail_dtype for layer in layers):
            sinks, start = check_tail(check_numbers("tail", raw.get("tail"), 0, MAX_LENGTH), length)
            tail = sinks, start
        elif "tail" in raw:
            raise ValueError("it has a tail, and none of its layers has one")
        return cls(identity, rope, reservation, length, written, layers, raw["layout"], text, tail)

    def as_metadata(self) -> dict[str, str]:
        """Return the metadata for the safetensors file."""
        from importlib.metadata import version  # here, because it takes milliseconds

        identity = self.identity
        facts = {
            "identity": None
            if identity is None
            else {"model": identity.model, "tokenizer": identity.tokenizer},
            "rope": self.rope,
            "reservation": self.reservation,
            "lengths": [self.length],  # a list, because older versions had several sequences in a cache
            "written": [self.written],
            "has_ids": True,  # older versions also wrote caches without them
            "layers": [layer.as_json() for layer in self.layers],
            "layout": self.layout,
        }
        if self.tail is not None:
            facts["tail"] = list(self.tail)
        return {
            "format": FORMAT,
            "version": str(VERSION),
            "kvant": version("kvant"),
            "cache": json.dumps(facts),
            "metadata": json.dumps(dict(self.metadata)),
        }

    def tensors(self) -> dict[str, Stored]:
        """Return all tensors of the file, in order."""
        tensors: dict[str, Stored] = {"header_sha256": DIGEST, "ids.0": ("U32", (self.length,))}
        for number, layer in enumerate(self.layers):
            tensors |= {f"layers.{number}.{name}": stored for name, stored in layer.tables().items()}
            tensors |= {
                f"layers.{number}.state.{i}": state
                for i, state in enumerate(layer.state)
                if state is not None
            }
            if layer.has_tokens:
                arrays = layer.arrays(layer.rows(self.length, self.written))
                tensors |= {f"layers.{number}.sequences.0.{name}": stored for name, stored in arrays.items()}
                tensors |= {f"layers.{number}.sequences.0.tail": stored for stored in self.tail_of(layer)}
        return tensors | {"sha256": DIGEST}

    def tail_of(self, layer: LayerFormat) -> list[Stored]:
        """Return the array of a layer's exact tail; empty without one."""
        if self.tail is None:
            return []
        sinks, start = self.tail
        return layer.tail(sinks + self.length - start)

    def check_fits(self, ours: "SnapshotHeader") -> None:
        """Raise a ValueError unless it fits a cache with this header. Unknown fields are not compared."""
        if self.identity is not None and ours.identity is not None:
            for what in ("model", "tokenizer"):
                one = getattr(self.identity, what)
                other = getattr(ours.identity, what)
                if one != other:
                    raise ValueError(f"of another model: the {what}'s digest is {one}; expected {other}")
        if len(self.layers) != len(ours.layers):
            raise ValueError(
                f"of another model: it has {len(self.layers)} layers; expected {len(ours.layers)}"
            )
        if self.layout != ours.layout:
            pairs = enumerate(zip(self.layout, ours.layout, strict=False))
            start = max(0, next((i for i, (a, b) in pairs if a != b), 0) - 20)
            one, other = (layout[start : start + 80] for layout in (self.layout, ours.layout))
            raise ValueError(f"of another model: its layout has {one!r}; expected {other!r}")
        if self.rope is not None and ours.rope is not None and self.rope != ours.rope:
            raise ValueError(f"of another model: {_rope_difference(self.rope, ours.rope)}")
        for number, (stored, expected) in enumerate(zip(self.layers, ours.layers, strict=True)):
            if differs := difference(stored, expected, self.reservation, ours.reservation):
                raise ValueError(f"of another format: {differs}, in layer {number}")
        if self.length > ours.reservation:
            raise ValueError(f"lengths has {self.length} tokens; the cache has {ours.reservation} reserved")


def save(path: Path, sequence: PoolSequence, *, metadata: Mapping[str, str]) -> None:
    """Write the committed tokens of a sequence; see :meth:`kvant.cache.ModelCache.save`."""
    if not all(isinstance(text, str) for pair in metadata.items() for text in pair):
        raise ValueError("metadata has a key or a value that is not text; expected a dict of str to str")
    header = SnapshotHeader.of(sequence, metadata)
    data = make_header(header.tensors(), header.as_metadata())
    if len(data) > MAX_HEADER_BYTES:
        raise SnapshotError(
            f"{path}: its header would have {len(data)} bytes; at most {MAX_HEADER_BYTES} are read"
        )
    try:
        with atomic_file(path) as file:
            whole = hashlib.sha256()
            for piece in chain((data, hashlib.sha256(data).digest()), _contents(header, sequence)):
                file.write(piece)
                whole.update(piece)
            file.write(whole.digest())
    except (OSError, ValueError) as error:
        # The full text of an OSError contains the name of the temporary file.
        reason = error.strerror if isinstance(error, OSError) else None
        raise SnapshotError(f"{path}: cannot be written: {reason or one_line(error)}") from error


def read_header(path: Path) -> SnapshotHeader:
    """Return the header of a snapshot. The rest of the file is not checked."""
    with _open(path) as (_, header, _):
        return header


def restore(path: Path, sequence: PoolSequence) -> dict[str, str]:
    """Read a snapshot's tokens into an empty sequence; return the metadata it was saved with."""
    with _open(path) as (file, header, whole):
        try:
            header.check_fits(SnapshotHeader.of(sequence, {}))
            _fill(header, sequence, file, whole)
        except (OSError, ValueError) as error:
            raise SnapshotError(f"{path}: {one_line(error)}") from error
    if sequence.pool.identity is None:
        sequence.pool.identity = header.identity
    return dict(header.metadata)


def _fill(header: SnapshotHeader, sequence: PoolSequence, file: BinaryIO, whole: "hashlib._Hash") -> None:
    """Read every layer's tokens, tensor by tensor; they are committed after the digest was compared."""

    def take(stored: Stored) -> mx.array:
        data = bytearray(stored_bytes(stored))
        if file.readinto(data) != len(data):  # type: ignore[attr-defined]
            raise ValueError("truncated while it was read")
        whole.update(data)
        return as_array(data, stored)

    length = header.length
    written = header.written
    ids: list[int] = take(("U32", (length,))).tolist()  # type: ignore[assignment]
    layers = list(zip(header.layers, sequence.saved_layers, strict=True))
    lost = {layer: saved.first(length, written) for saved, layer in layers if isinstance(layer, PoolLayer)}
    states = []
    tails: list[mx.array] = []
    with sequence.filling(lost, ids):
        for number, (saved, layer) in enumerate(layers):
            if not isinstance(layer, PoolLayer):
                states.append([None if stored is None else take(stored) for stored in saved.state])
                continue
            for name, stored in saved.tables().items():
                if not mx.array_equal(take(stored), layer.tables()[name]):
                    raise ValueError(f"of another model: {name} of layer {number} has other numbers")
            arrays = saved.arrays(saved.rows(length, written))
            sequence.put(layer, [take(stored) for stored in arrays.values()], length)
            rows = [take(stored) for stored in header.tail_of(saved)]
            tails += rows if layer.exact_arrays else []
        for state, values in zip(sequence.pool.states, states, strict=True):
            state.check(values)
        sequence.will_have(length, states)
        if file.read(DIGEST_BYTES + 1) != whole.digest():
            raise ValueError("altered: its SHA-256 is another")
    if header.tail is not None:
        sequence.take_tail(TailCopy(*header.tail, length, tails))


def _contents(header: SnapshotHeader, sequence: PoolSequence) -> Iterator[bytes | memoryview]:
    """Yield the bytes of every tensor between the digests, in order."""
    yield array_bytes(mx.array(sequence.ids, mx.uint32))
    tail = sequence.copied_tail()
    exact = iter([] if tail is None else tail.rows)
    for saved, layer in zip(header.layers, sequence.saved_layers, strict=True):
        if isinstance(layer, PoolLayer):
            yield from map(array_bytes, layer.tables().values())
            yield from map(
                array_bytes, sequence.copied_rows(layer, saved.first(header.length, header.written))
            )
            if layer.exact_arrays:
                yield array_bytes(next(exact))
        else:
            yield from (array_bytes(array) for array in layer if array is not None)


@contextmanager
def _open(path: Path) -> Iterator[tuple[BinaryIO, SnapshotHeader, "hashlib._Hash"]]:
    """Open a snapshot after its header's digest; return the file, the header, and the hash so far.

    The header is first compared with its digest and with the file's tensors.
    """
    try:
        real = Path(os.path.realpath(path))  # follow links
        if os.path.lexists(real) and not real.is_file():  # do not even open a device
            raise SnapshotError(f"{path}: not a regular file")
    except (OSError, ValueError) as error:  # a name too long, a NUL
        raise SnapshotError(f"{path}: cannot be read: {one_line(error)}") from error
    with open_regular(real, path, SnapshotError) as file:
        try:
            tensor_header = read_tensor_header(path, file, os.fstat(file.fileno()).st_size, SnapshotError)
        except (OSError, ValueError, RecursionError) as error:
            raise SnapshotError(f"{path}: not a whole safetensors file: {one_line(error)}") from error
        try:
            header = SnapshotHeader.parse(tensor_header.metadata)
            digest = file.read(DIGEST_BYTES)
            if hashlib.sha256(tensor_header.data).digest() != digest:
                raise ValueError("altered: the SHA-256 of its header is another")
            # They must be exactly those of the header; then the file has all their bytes.
            tensors = [(name, (tensor.dtype, tensor.shape)) for name, tensor in tensor_header.tensors.items()]
            expected = [*header.tensors().items()]
            places = [(each.first, each.last) for each in tensor_header.tensors.values()]
            if tensors != expected or places != sorted(places):
                other = next(
                    (one for one, right in zip(tensors, expected, strict=False) if one != right), None
                )
                raise ValueError(
                    f"its tensors are not those of the cache it describes: {other or len(tensors)}"
                )
        except (OSError, ValueError, RecursionError) as error:
            raise SnapshotError(f"{path}: {one_line(error)}") from error
        yield file, header, hashlib.sha256(tensor_header.data + digest)


def _identity(raw: object) -> Identity | None:
    if raw is None:
        return None
    if not isinstance(raw, dict) or raw.keys() != {"model", "tokenizer"}:
        raise ValueError("identity is not an object of model and tokenizer")
    for name, value in raw.items():
        if not isinstance(value, str) or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
            raise ValueError(f"identity's {name} is not a SHA-256")
    return Identity(**raw)


def _rope(raw: object) -> dict[str, Any] | None:
    if raw is None:
        return None
    if (
        not isinstance(raw, dict)
        or raw.keys() != {"frequencies", "factor"}
        or not isinstance(raw["frequencies"], list)
    ):
        raise ValueError("rope is not an object of frequencies and factor")
    if not all(
        isinstance(number, float) and 0 < number < 1e30 for number in [*raw["frequencies"], raw["factor"]]
    ):
        raise ValueError("rope has a frequency or a factor that is not a number above 0")
    return raw


def _rope_difference(stored: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    one = stored["frequencies"]
    other = expected["frequencies"]
    if len(one) != len(other):
        return f"RoPE has {len(one)} frequencies; expected {len(other)}"
    for pair, (a, b) in enumerate(zip(one, other, strict=True)):
        if a != b:
            return f"RoPE's frequency of pair {pair} is {a!r}; expected {b!r}"
    return f"RoPE's factor is {stored['factor']!r}; expected {expected['factor']!r}"


def _json_object(name: str, text: str) -> dict[str, Any]:
    raw = json.loads(text, object_pairs_hook=unique_keys)
    if not isinstance(raw, dict):
        raise ValueError(f"{name} is a JSON {type(raw).__name__}; expected an object")
    return raw

"""A cache's tokens as a file: saved whole or not at all, and restored into a cache of the same format.

docs/python.md describes the file. A layer is copied at a time, so nothing is held twice. Every field of a
header is checked when it is read.
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
VERSION = 2  # 1: its model's digest was of a sample of the weights
MLX_LM_CLASSES = {"1.0", "2.0"}  # of caches: the place of the first in mlx-lm's files, now and in older ones
DIGEST: Stored = ("U8", (32,))
DIGEST_BYTES = 32
FIELDS = {"identity", "rope", "reservation", "lengths", "written", "has_ids", "layers", "layout"}
MAX_LENGTH = 2**40  # tokens
MAX_LAYERS = 2**16


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """What a snapshot says of itself."""

    identity: Identity | None  # of the model; None: it was not loaded from a folder
    rope: Mapping[str, Any] | None  # frequencies and factor of its keys; None: mlx-lm's model turns them
    reservation: int  # tokens it could have
    length: int  # its tokens
    written: int  # the most tokens that it has had, as PoolSequence.written has it
    layers: tuple[LayerFormat, ...]
    # of a bridged model's cache, the caches that mlx-lm's model expects, as JSON; "": a decoder's
    layout: str
    metadata: Mapping[str, str]  # the caller's
    # of an exact tail: how many of the first tokens it has, and the position of the first of the others
    tail: tuple[int, int] | None = None

    @classmethod
    def of(cls, sequence: PoolSequence, metadata: Mapping[str, str]) -> "SnapshotHeader":
        """The header of a snapshot of a sequence."""
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
        """The header of a file's text."""
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
                f"{metadata.get('kvant', '')[:20]!r}; "
                f"this kvant reads version {VERSION}"
            )
        if metadata.keys() != {"format", "version", "kvant", "cache", "metadata"}:
            raise ValueError("its text has other parts than format, version, kvant, cache and metadata")
        text, raw = (_json_object(name, metadata[name]) for name in ("metadata", "cache"))
        if not all(isinstance(value, str) for value in text.values()):
            raise ValueError("metadata is not an object of strings")
        if raw.keys() - {"tail"} != FIELDS:  # only caches with exact tails have one
            raise ValueError("it has other fields than " + ", ".join(sorted(FIELDS)))
        if not isinstance(raw["layers"], list) or not 0 < len(raw["layers"]) <= MAX_LAYERS:
            raise ValueError("layers is no list of formats")
        reservation = check_number("reservation", raw["reservation"], 1, MAX_LENGTH)
        lengths = check_numbers("lengths", raw["lengths"], 0, MAX_LENGTH)
        writtens = check_numbers("written", raw["written"], 0, MAX_LENGTH)
        if not len(lengths) == len(writtens) == 1:
            raise ValueError(
                f"lengths has {len(lengths)} numbers, written {len(writtens)}; expected one sequence"
            )
        if raw["has_ids"] is not True or not isinstance(raw["layout"], str):
            raise ValueError("has_ids is not true, or layout no text")
        identity = _identity(raw["identity"])
        rope = _rope(raw["rope"])
        (length,) = lengths
        (written,) = writtens
        layers = tuple(map(LayerFormat.from_json, raw["layers"]))
        # Lengths contradict neither each other nor what windows and states can have forgotten.
        if length > written or (written and not length):
            raise ValueError(f"lengths has {length} where written has {written}")
        if length > reservation:
            raise ValueError(f"lengths has {length}; reservation is {reservation}")
        for layer in layers:
            if layer.kind == "state" and length != written:
                raise ValueError(
                    f"lengths has {length} where written has {written}, with the state of a linear layer"
                )
            if layer.first(length, written) and length < written - layer.slack - 1:
                raise ValueError(
                    f"lengths has {length} where written has {written}, with a window of {layer.window}"
                )
        tail = None
        if any(layer.tail_dtype for layer in layers):
            sinks, start = check_tail(check_numbers("tail", raw.get("tail"), 0, MAX_LENGTH), length)
            tail = sinks, start
        elif "tail" in raw:
            raise ValueError("it has a tail, and none of its layers has one")
        return cls(identity, rope, reservation, length, written, layers, raw["layout"], text, tail)

    def as_metadata(self) -> dict[str, str]:
        """The text that a safetensors file has for it."""
        from importlib.metadata import version  # not at every start: it takes milliseconds

        identity = self.identity
        facts = {
            "identity": None
            if identity is None
            else {"model": identity.model, "tokenizer": identity.tokenizer},
            "rope": self.rope,
            "reservation": self.reservation,
            "lengths": [self.length],  # a list: versions before had several sequences in a cache
            "written": [self.written],
            "has_ids": True,  # versions before wrote caches without them
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
        """Every tensor of the file, in order."""
        found: dict[str, Stored] = {"header_sha256": DIGEST, "ids.0": ("U32", (self.length,))}
        for number, layer in enumerate(self.layers):
            found |= {f"layers.{number}.{name}": stored for name, stored in layer.tables().items()}
            found |= {
                f"layers.{number}.state.{i}": state
                for i, state in enumerate(layer.state)
                if state is not None
            }
            if layer.has_tokens:
                arrays = layer.arrays(layer.rows(self.length, self.written))
                found |= {f"layers.{number}.sequences.0.{name}": stored for name, stored in arrays.items()}
                found |= {f"layers.{number}.sequences.0.tail": stored for stored in self.tail_of(layer)}
        return found | {"sha256": DIGEST}

    def tail_of(self, layer: LayerFormat) -> list[Stored]:
        """What there is of a layer's exact tail: one array, or none."""
        if self.tail is None:
            return []
        sinks, start = self.tail
        return layer.tail(sinks + self.length - start)

    def check_fits(self, own: "SnapshotHeader") -> None:
        """Refuse it for a cache that would write ``own``. What one of them does not know is not compared."""
        if self.identity is not None and own.identity is not None:
            for what in ("model", "tokenizer"):
                one = getattr(self.identity, what)
                other = getattr(own.identity, what)
                if one != other:
                    raise ValueError(f"of another model: the {what}'s digest is {one}; expected {other}")
        if len(self.layers) != len(own.layers):
            raise ValueError(
                f"of another model: it has {len(self.layers)} layers; expected {len(own.layers)}"
            )
        if self.layout != own.layout:
            pairs = enumerate(zip(self.layout, own.layout, strict=False))
            start = max(0, next((i for i, (a, b) in pairs if a != b), 0) - 20)
            one, other = (layout[start : start + 80] for layout in (self.layout, own.layout))
            raise ValueError(f"of another model: its layout has {one!r}; expected {other!r}")
        if self.rope is not None and own.rope is not None and self.rope != own.rope:
            raise ValueError(f"of another model: {_rope_difference(self.rope, own.rope)}")
        for number, (given, expected) in enumerate(zip(self.layers, own.layers, strict=True)):
            if differs := difference(given, expected, self.reservation, own.reservation):
                raise ValueError(f"of another format: {differs}, in layer {number}")
        if self.length > own.reservation:
            raise ValueError(f"lengths has {self.length} tokens; the cache has {own.reservation} reserved")


def save(path: Path, sequence: PoolSequence, *, metadata: Mapping[str, str]) -> None:
    """Write the committed tokens of a sequence; see :meth:`kvant.cache.ModelCache.save`."""
    if not all(isinstance(text, str) for pair in metadata.items() for text in pair):
        raise ValueError("metadata has a key or a value that is no text; expected a dict of str to str")
    header = SnapshotHeader.of(sequence, metadata)
    data = make_header(header.tensors(), header.as_metadata())
    if len(data) > MAX_HEADER_BYTES:
        raise SnapshotError(
            f"{path}: its header would have {len(data)} bytes; at most {MAX_HEADER_BYTES} are read"
        )
    try:
        with atomic_file(path) as file:
            whole = hashlib.sha256()
            for part in chain((data, hashlib.sha256(data).digest()), _contents(header, sequence)):
                file.write(part)
                whole.update(part)
            file.write(whole.digest())
    except (OSError, ValueError) as error:
        # An OSError's whole text has the name of the temporary file.
        reason = error.strerror if isinstance(error, OSError) else None
        raise SnapshotError(f"{path}: cannot be written: {reason or one_line(error)}") from error


def read_header(path: Path) -> SnapshotHeader:
    """What a snapshot says of itself; its header is whole, the rest has not been looked at."""
    with _open(path) as (_, header, _):
        return header


def restore(path: Path, sequence: PoolSequence) -> dict[str, str]:
    """Put a snapshot's tokens into an empty sequence. Returns the metadata it was saved with."""
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
    """Put in every layer's tokens, one tensor after the other, which count once the digest was compared."""

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
    lost = {own: given.first(length, written) for given, own in layers if isinstance(own, PoolLayer)}
    states = []
    tails: list[mx.array] = []
    with sequence.filling(lost, ids):
        for number, (given, own) in enumerate(layers):
            if not isinstance(own, PoolLayer):
                states.append([None if stored is None else take(stored) for stored in given.state])
                continue
            for name, stored in given.tables().items():
                if not mx.array_equal(take(stored), own.tables()[name]):
                    raise ValueError(f"of another model: {name} of layer {number} has other numbers")
            arrays = given.arrays(given.rows(length, written))
            sequence.put(own, [take(stored) for stored in arrays.values()], length)
            rows = [take(stored) for stored in header.tail_of(given)]
            tails += rows if own.exact_arrays else []
        for state, found in zip(sequence.pool.states, states, strict=True):
            state.check(found)
        sequence.will_have(length, states)
        if file.read(DIGEST_BYTES + 1) != whole.digest():
            raise ValueError("altered: its SHA-256 is another")
    if header.tail is not None:
        sequence.take_tail(TailCopy(*header.tail, length, tails))


def _contents(header: SnapshotHeader, sequence: PoolSequence) -> Iterator[bytes | memoryview]:
    """The bytes of every tensor between the digests, in order."""
    yield array_bytes(mx.array(sequence.ids, mx.uint32))
    tail = sequence.copied_tail()
    exact = iter([] if tail is None else tail.rows)
    for own, layer in zip(header.layers, sequence.saved_layers, strict=True):
        if isinstance(layer, PoolLayer):
            yield from map(array_bytes, layer.tables().values())
            yield from map(array_bytes, sequence.copied_rows(layer, own.first(header.length, header.written)))
            if layer.exact_arrays:
                yield array_bytes(next(exact))
        else:
            yield from (array_bytes(array) for array in layer if array is not None)


@contextmanager
def _open(path: Path) -> Iterator[tuple[BinaryIO, SnapshotHeader, "hashlib._Hash"]]:
    """A snapshot open behind the digest of its header, the header, and the hash of the bytes so far.

    The header is compared with its digest, and with the tensors that follow from it, before any of it is
    used.
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
            header = SnapshotHeader.parse(found.metadata)
            digest = file.read(DIGEST_BYTES)
            if hashlib.sha256(found.data).digest() != digest:
                raise ValueError("altered: the SHA-256 of its header is another")
            # They are exactly those that the header describes: the file has their bytes then.
            given = [(name, (tensor.dtype, tensor.shape)) for name, tensor in found.tensors.items()]
            expected = [*header.tensors().items()]
            places = [(each.first, each.last) for each in found.tensors.values()]
            if given != expected or places != sorted(places):
                other = next((one for one, own in zip(given, expected, strict=False) if one != own), None)
                raise ValueError(
                    f"its tensors are not those of the cache it describes: {other or len(given)}"
                )
        except (OSError, ValueError, RecursionError) as error:
            raise SnapshotError(f"{path}: {one_line(error)}") from error
        yield file, header, hashlib.sha256(found.data + digest)


def _identity(raw: object) -> Identity | None:
    if raw is None:
        return None
    if not isinstance(raw, dict) or raw.keys() != {"model", "tokenizer"}:
        raise ValueError("identity is no object of model and tokenizer")
    for name, value in raw.items():
        if not isinstance(value, str) or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
            raise ValueError(f"identity's {name} is no SHA-256")
    return Identity(**raw)


def _rope(raw: object) -> dict[str, Any] | None:
    if raw is None:
        return None
    if (
        not isinstance(raw, dict)
        or raw.keys() != {"frequencies", "factor"}
        or not isinstance(raw["frequencies"], list)
    ):
        raise ValueError("rope is no object of frequencies and factor")
    if not all(
        isinstance(number, float) and 0 < number < 1e30 for number in [*raw["frequencies"], raw["factor"]]
    ):
        raise ValueError("rope has a frequency or a factor that is no number above 0")
    return raw


def _rope_difference(given: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    one = given["frequencies"]
    other = own["frequencies"]
    if len(one) != len(other):
        return f"RoPE has {len(one)} frequencies; expected {len(other)}"
    for pair, (a, b) in enumerate(zip(one, other, strict=True)):
        if a != b:
            return f"RoPE's frequency of pair {pair} is {a!r}; expected {b!r}"
    return f"RoPE's factor is {given['factor']!r}; expected {own['factor']!r}"


def _json_object(name: str, text: str) -> dict[str, Any]:
    raw = json.loads(text, object_pairs_hook=unique_keys)
    if not isinstance(raw, dict):
        raise ValueError(f"{name} is a JSON {type(raw).__name__}; expected an object")
    return raw

"""What a snapshot says of itself: its header as JSON, every field checked when it is read.

docs/python.md describes the file.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvant.cache.identity import Identity
from kvant.cache.layer_format import LayerFormat, Stored, check_number, check_numbers, stored_of
from kvant.cache.paged_layers import PoolLayer
from kvant.cache.pool_sequence import PoolSequence
from kvant.files import unique_keys

FORMAT, VERSION = "kvant cache", 1
DIGEST: Stored = ("U8", (32,))
FIELDS = {"identity", "rope", "reservation", "lengths", "written", "has_ids", "layers", "layout"}
MAX_LENGTH = 2**40  # tokens
MAX_LAYERS = 2**16


@dataclass(frozen=True, slots=True)
class RopeFacts:
    """How the heads of a cache's keys turn; see :class:`kvant.operators.rotary.Rotary`."""

    frequencies: tuple[float, ...]
    factor: float


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """What a snapshot holds.

    Attributes:
        identity: of the model; None: it was not loaded from a folder.
        rope: how its keys turn; None: mlx-lm's model turns them.
        reservation: tokens it could have.
        length: its tokens.
        written: the most tokens that it has had; see :attr:`kvant.cache.pool_sequence.PoolSequence.written`.
        layers: the format of each.
        layout: of a bridged model's cache, the caches that mlx-lm's model expects, as JSON; "": a decoder's.
        metadata: the caller's.
        kvant: the version that wrote it.
    """

    identity: Identity | None
    rope: RopeFacts | None
    reservation: int
    length: int
    written: int
    layers: tuple[LayerFormat, ...]
    layout: str
    metadata: Mapping[str, str]
    kvant: str

    def as_metadata(self) -> dict[str, str]:
        """The text that a safetensors file has for it."""
        identity, rope = self.identity, self.rope
        facts = {
            "identity": None if identity is None else {"model": identity.model, "tokenizer": identity.tokenizer},
            "rope": None if rope is None else {"frequencies": rope.frequencies, "factor": rope.factor},
            "reservation": self.reservation,
            "lengths": [self.length],  # a list: versions before had several sequences in a cache
            "written": [self.written],
            "has_ids": True,  # versions before wrote caches without them
            "layers": [layer.as_json() for layer in self.layers],
            "layout": self.layout,
        }
        return {
            "format": FORMAT,
            "version": str(VERSION),
            "kvant": self.kvant,
            "cache": json.dumps(facts),
            "metadata": json.dumps(dict(self.metadata)),
        }

    def tensors(self) -> dict[str, Stored]:
        """Every tensor of the file, in order."""
        found: dict[str, Stored] = {"header_sha256": DIGEST, "ids.0": ("U32", (self.length,))}
        for number, layer in enumerate(self.layers):
            found |= {f"layers.{number}.{name}": stored for name, stored in layer.tables().items()}
            found |= {f"layers.{number}.state.{i}": state for i, state in enumerate(layer.state) if state is not None}
            if layer.has_tokens:
                arrays = layer.arrays(layer.rows(self.length, self.written))
                found |= {f"layers.{number}.sequences.0.{name}": stored for name, stored in arrays.items()}
        return found | {"sha256": DIGEST}


def describe(sequence: PoolSequence, metadata: Mapping[str, str]) -> SnapshotHeader:
    """The header of a snapshot of a sequence."""
    from importlib.metadata import version  # not at every start: it takes milliseconds

    pool, rotary = sequence.pool, sequence.pool.rotary
    layers = [
        layer.format if isinstance(layer, PoolLayer) else LayerFormat("state", state=stored_of(layer))
        for layer in sequence.saved_layers
    ]
    return SnapshotHeader(
        identity=pool.identity,
        rope=None if rotary is None else RopeFacts(tuple(map(float, rotary.frequencies)), float(rotary.factor)),
        reservation=sequence.max_tokens,
        length=sequence.length,
        written=sequence.written,
        layers=tuple(layers),
        layout=pool.layout,
        metadata=metadata,
        kvant=version("kvant"),
    )


def parse(metadata: Mapping[str, str]) -> SnapshotHeader:
    """The header of a file's text."""
    if metadata.get("format") != FORMAT:
        raise ValueError("not a snapshot of a cache")
    version = metadata.get("version", "")
    if version != str(VERSION):
        raise ValueError(
            f"version {version[:20]!r} of the format, written by kvant {metadata.get('kvant', '')[:20]!r}; "
            f"this kvant reads version {VERSION}"
        )
    if metadata.keys() != {"format", "version", "kvant", "cache", "metadata"}:
        raise ValueError("its text has other parts than format, version, kvant, cache and metadata")
    text = _json_object("metadata", metadata["metadata"])
    if not all(isinstance(value, str) for value in text.values()):
        raise ValueError("metadata is not an object of strings")
    raw = _json_object("cache", metadata["cache"])
    if raw.keys() != FIELDS:
        raise ValueError("it has other fields than " + ", ".join(sorted(FIELDS)))
    if not isinstance(raw["layers"], list) or not 0 < len(raw["layers"]) <= MAX_LAYERS:
        raise ValueError("layers is no list of formats")
    check_number("reservation", raw["reservation"], 1, MAX_LENGTH)
    lengths = check_numbers("lengths", raw["lengths"], 0, MAX_LENGTH)
    written = check_numbers("written", raw["written"], 0, MAX_LENGTH)
    if not len(lengths) == len(written) == 1:
        raise ValueError(f"lengths has {len(lengths)} numbers, written {len(written)}; expected one sequence")
    if raw["has_ids"] is not True or not isinstance(raw["layout"], str):
        raise ValueError("has_ids is not true, or layout no text")
    header = SnapshotHeader(
        identity=_identity(raw["identity"]),
        rope=_rope(raw["rope"]),
        reservation=raw["reservation"],
        length=lengths[0],
        written=written[0],
        layers=tuple(map(LayerFormat.from_json, raw["layers"])),
        layout=raw["layout"],
        metadata=text,
        kvant=metadata["kvant"],
    )
    _check_lengths(header)
    return header


def _check_lengths(header: SnapshotHeader) -> None:
    """Raise a ValueError where lengths contradict the reservation, or what windows and states can have forgotten."""
    length, written = header.length, header.written
    if length > written or (written and not length):
        raise ValueError(f"lengths has {length} where written has {written}")
    if length > header.reservation:
        raise ValueError(f"lengths has {length}; reservation is {header.reservation}")
    for layer in header.layers:
        if layer.kind == "state" and length != written:
            raise ValueError(f"lengths has {length} where written has {written}, with the state of a linear layer")
        window, lost = layer.window or 0, layer.first(length, written)
        if lost and length < written - layer.slack - 1:
            raise ValueError(f"lengths has {length} where written has {written}, with a window of {window}")


def _identity(raw: object) -> Identity | None:
    if raw is None:
        return None
    if not isinstance(raw, dict) or raw.keys() != {"model", "tokenizer"}:
        raise ValueError("identity is no object of model and tokenizer")
    for name, value in raw.items():
        if not isinstance(value, str) or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
            raise ValueError(f"identity's {name} is no SHA-256")
    return Identity(**raw)


def _rope(raw: object) -> RopeFacts | None:
    if raw is None:
        return None
    if not isinstance(raw, dict) or raw.keys() != {"frequencies", "factor"} or not isinstance(raw["frequencies"], list):
        raise ValueError("rope is no object of frequencies and factor")
    numbers: Sequence[object] = [*raw["frequencies"], raw["factor"]]
    if not all(isinstance(number, float) and 0 < number < 1e30 for number in numbers):
        raise ValueError("rope has a frequency or a factor that is no number above 0")
    return RopeFacts(tuple(raw["frequencies"]), raw["factor"])


def _json_object(name: str, text: str) -> dict[str, Any]:
    raw = json.loads(text, object_pairs_hook=unique_keys)
    if not isinstance(raw, dict):
        raise ValueError(f"{name} is a JSON {type(raw).__name__}; expected an object")
    return raw

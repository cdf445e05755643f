"""A cache format tuned for one model: the bits and key transform of each layer.

``kvant report --tune`` writes it as a JSON file; docs/measuring.md describes it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvant.atomic import atomic_file
from kvant.cache.identity import Identity
from kvant.errors import ArgumentError, KvantError, SnapshotError, one_line
from kvant.files import read_user_file, unique_keys
from kvant.operators.bias_split import BiasSplit
from kvant.operators.key_transform import VALUES, KeyTransform
from kvant.operators.quantization import QUANT_BITS

NAME = "kv_format"
PMX = "pmx"  # instead of a file: PMX's symmetric groups without a key transform
FORMAT = "kvant kv format"
VERSION = 2  # version 1 had a digest of only a sample of the weights
MAX_BYTES = 16 * 1024 * 1024
MAX_EXPONENT = 24  # of a channel's balance

Rows = tuple[tuple[float, ...], ...]  # for each kv head a number per channel


@dataclass(frozen=True)
class LayerChoice:
    """How a layer's cache stores its tokens.

    Attributes:
        kv_bits, kv_group_size: as in :class:`kvant.cache.CacheOptions`. ``kv_bits`` are the keys'.
        value_bits: bits of values; by default those of keys.
        rotates, rotates_values, center, balance: as in
            :class:`kvant.operators.key_transform.KeyTransform`, the balance as exponents of 2; (): none.
    """

    kv_bits: int
    value_bits: int = field(default=-1, kw_only=True)
    kv_group_size: int
    rotates: bool = False
    rotates_values: bool = field(default=False, kw_only=True)
    center: Rows = ()
    balance: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.value_bits < 0:
            object.__setattr__(self, "value_bits", self.kv_bits)
        if bool(self.kv_bits) != bool(self.value_bits):
            raise ValueError(
                f"a layer has {self.kv_bits} bits of keys and {self.value_bits} of values; expected both or 0"
            )

    @cached_property
    def name(self) -> str:
        """Return the name of its key transform, the components and a digest of their numbers, or ""."""
        has = {
            "center": self.center,
            "balance": self.balance,
            "rotate": self.rotates,
            VALUES: self.rotates_values,
        }
        parts = "+".join(component for component, value in has.items() if value)
        numbers = [self.center, self.balance]
        return parts and f"{parts}:{hashlib.sha256(json.dumps(numbers).encode()).hexdigest()[:16]}"

    def transform(self, heads: range, width: int, split: BiasSplit | None = None) -> KeyTransform:
        """Return the key transform for these kv heads of a layer, with keys of this width."""
        for component, rows in (("center", self.center), ("balance", self.balance)):
            if rows and (len(rows) < heads.stop or any(len(row) != width for row in rows)):
                raise ArgumentError(
                    NAME, f"has a {component} of {len(rows)} kv heads of {len(rows[0])}; expected {width}"
                )
        ours = slice(heads.start, heads.stop)
        center = mx.array(self.center[ours], mx.float32)[:, None] if self.center else None
        balance = mx.power(2.0, mx.array(self.balance[ours], mx.float32))[:, None] if self.balance else None
        return KeyTransform(self.name, split, center, balance, self.rotates, self.rotates_values)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """A tuned format.

    Attributes:
        model: the digest of its model (:class:`kvant.cache.Identity`), or "" if the model has none.
        layers: a choice for each layer that stores keys and values.
        figures: measurements, for people.
        path: the file it was read from, or "".
    """

    model: str
    layers: tuple[LayerChoice, ...]
    figures: Mapping[str, Any] = field(default_factory=dict, compare=False, hash=False)
    path: str = field(default="", compare=False)

    @classmethod
    def of(cls, source: object) -> "KVFormat":
        """Return the format itself, or that of a file or of :meth:`as_json`; raise an ArgumentError."""
        if isinstance(source, KVFormat):
            return source
        if isinstance(source, Mapping):
            return _parsed(source, "")
        if not isinstance(source, str | Path):
            raise ArgumentError(
                NAME, f"is a {type(source).__name__}; expected a file that kvant report --tune wrote"
            )
        try:
            return _parsed(
                json.loads(read_user_file(source, MAX_BYTES), object_pairs_hook=unique_keys), str(source)
            )
        except (ValueError, RecursionError) as error:
            problem = "not JSON" if isinstance(error, json.JSONDecodeError | RecursionError) else str(error)
            raise ArgumentError(
                NAME, f"is {source}: {problem}; expected a file that kvant report --tune wrote"
            ) from error
        except KvantError as error:
            raise ArgumentError(NAME, f"is {error}") from error

    def as_json(self) -> dict[str, Any]:
        """Return the format as JSON values."""
        layers = [asdict(layer) for layer in self.layers]
        for layer in layers:  # older files lack these fields
            if layer["value_bits"] == layer["kv_bits"]:
                del layer["value_bits"]
            if not layer["rotates_values"]:
                del layer["rotates_values"]
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "figures": self.figures,
            "layers": layers,
        }

    def write(self, path: Path) -> None:
        """Write the file atomically; raise a SnapshotError if that fails."""
        data = json.dumps(self.as_json(), separators=(",", ":")).encode()
        try:
            with atomic_file(path) as file:
                file.write(data + b"\n")
        except OSError as error:
            raise SnapshotError(f"{path}: cannot be written: {one_line(error)}") from error

    def check(self, identity: Identity | None, layers: int) -> None:
        """Raise an ArgumentError unless it is for this model, with this many layers with keys and values."""
        where = f"is {self.path or 'a format'}"
        digest = "" if identity is None else identity.model
        if self.model != digest:
            raise ArgumentError(
                NAME, f"{where}, which is for another model: {self.model[:16]}; this one is {digest[:16]}"
            )
        self.check_layers(layers)

    def check_layers(self, layers: int) -> None:
        """Raise an ArgumentError unless it has this many layers."""
        if len(self.layers) != layers:
            where = self.path or "a format"
            count = len(self.layers)
            raise ArgumentError(NAME, f"is {where}, with {count} layers; expected {layers}")


def _parsed(raw: object, path: str) -> KVFormat:
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ValueError("not a format of a cache")
    if raw.get("version") != VERSION:
        raise ValueError(f"version {raw.get('version')!r:.20}; this kvant reads version {VERSION}")
    names = {"format", "version", "model", "figures", "layers"}
    if raw.keys() != names or not isinstance(raw["model"], str) or not isinstance(raw["figures"], dict):
        raise ValueError(f"it has other parts than {', '.join(sorted(names))}")
    if not isinstance(raw["layers"], list) or not raw["layers"]:
        raise ValueError("layers is not a list of formats")
    return KVFormat(raw["model"], tuple(map(_layer, raw["layers"])), raw["figures"], path)


def _layer(raw: object) -> LayerChoice:
    names = [each.name for each in fields(LayerChoice)]
    if not isinstance(raw, dict) or {"value_bits", "rotates_values", *raw} != {*names}:
        raise ValueError("a layer has other parts than " + ", ".join(names))
    bits = raw["kv_bits"]
    group = raw["kv_group_size"]
    values: Any = raw.get("value_bits", bits)
    for side in (bits, values):
        if type(side) is not int or side not in QUANT_BITS or type(group) is not int or group < 1:
            raise ValueError(f"a layer of {side!r:.20} bits in groups of {group!r:.20}")
    rotates_values = raw.get("rotates_values", False)
    for name, flag in (("rotates", raw["rotates"]), ("rotates_values", rotates_values)):
        if type(flag) is not bool:
            raise ValueError(f"{name} is {flag!r:.20}; expected true or false")
    center = _rows("center", raw["center"], lambda number: type(number) in (int, float) and abs(number) < 1e6)
    balance = _rows(
        "balance", raw["balance"], lambda number: type(number) is int and abs(number) <= MAX_EXPONENT
    )
    return LayerChoice(
        bits,
        group,
        raw["rotates"],
        center,
        balance,
        value_bits=values,
        rotates_values=rotates_values,
    )


def _rows(name: str, raw: object, is_right: Any) -> Any:
    """Return checked rows of equally many numbers, one row per kv head."""
    rows = raw if isinstance(raw, list | tuple) else None
    if rows is None or not all(isinstance(row, list | tuple) and row for row in rows):
        raise ValueError(f"{name} is not a list of rows of numbers")
    if not all(is_right(number) for row in rows for number in row) or len({len(row) for row in rows}) > 1:
        raise ValueError(f"{name} has a number that is out of range, or rows of different lengths")
    return tuple(tuple(row) for row in rows)

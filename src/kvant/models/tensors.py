"""The tensors of a model folder: safetensors only, shape and dtype checked before an array is made."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import mlx.core as mx

from kvant.errors import CheckpointError, one_line
from kvant.files import open_file, read_json, unique_keys
from kvant.sizes import format_bytes, physical_memory

FLOATS = ("F32", "F16", "BF16")
MAX_INDEX_BYTES = 64 * 1024 * 1024
MAX_HEADER_BYTES = 16 * 1024 * 1024  # a header of 100,000 tensors
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("U8", "I8", "BOOL", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")

Expected = Mapping[str, tuple[tuple[int, ...], Sequence[str]]]  # a tensor's name to its shape and dtypes
Identity = tuple[int, int, int, int]  # of a file: device, inode, bytes, time of change in ns


class TensorFiles:
    """The tensors of a model folder by name. Headers are checked at once; data is read lazily."""

    def __init__(self, folder: Path, files: Sequence[Path] | None = None) -> None:
        """Read the headers of ``files``; None: those of the folder's model."""
        self._file_of: dict[str, Path] = {}
        self._shape_of: dict[str, tuple[int, ...]] = {}
        self._dtype_of: dict[str, str] = {}
        self._opened: dict[Path, Identity] = {}
        self._loaded: dict[Path, dict[str, mx.array]] = {}
        self.files, owners = _shards(folder) if files is None else (list(files), {})
        self._nbytes = 0
        for path in self.files:
            self._read_header(path)
        for name, owner in owners.items():
            if name not in self._file_of or self._file_of[name].name != owner:
                raise CheckpointError(f"{folder / owner}: tensor {name} is missing; the index says it is there")

    def _read_header(self, path: Path) -> None:
        try:
            with open_file(path, error=CheckpointError) as stream:
                state = os.fstat(stream.fileno())
                self._opened[path] = _identity(state)
                for name, (dtype, shape) in _header(path, stream, state.st_size).items():
                    if name in self._file_of:
                        raise CheckpointError(f"{path.name}: tensor {name} is also in {self._file_of[name].name}")
                    self._file_of[name], self._shape_of[name], self._dtype_of[name] = path, shape, dtype
                self._check_identity(path)
                self._nbytes += state.st_size
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: not a whole safetensors file: {one_line(error)}") from error

    def _check_identity(self, path: Path) -> None:
        """Refuse a file that is not the one whose header was checked: libraries open it again, by its name.

        Raises:
            CheckpointError: another file, or a changed one.
        """
        if _identity(path.stat()) != self._opened[path]:
            raise CheckpointError(f"{path}: changed while it was read")

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    @property
    def names(self) -> set[str]:
        """Every tensor's name."""
        return set(self._file_of)

    @property
    def nbytes(self) -> int:
        """Bytes of the files."""
        return self._nbytes

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape."""
        self._require(name)
        return self._shape_of[name]

    def dtype(self, name: str) -> str:
        """The dtype as safetensors writes it, such as BF16."""
        self._require(name)
        return self._dtype_of[name]

    def check(self, expected: Expected) -> None:
        """Refuse the checkpoint before any of it is read, unless every tensor expected is there and right.

        Raises:
            CheckpointError: a tensor that is missing or wrong, or more bytes than this machine has memory.
        """
        for name, (shape, dtypes) in expected.items():
            self._check(name, shape, dtypes)
        if self._nbytes > physical_memory():
            raise CheckpointError(
                f"the tensors have {format_bytes(self._nbytes)}; this machine has {format_bytes(physical_memory())}"
            )

    def take(self, name: str, shape: tuple[int, ...], dtypes: Sequence[str] = FLOATS) -> mx.array:
        """The tensor, after a check of its shape and dtype."""
        self._check(name, shape, dtypes)
        path = self._file_of[name]
        try:
            if path not in self._loaded:
                self._loaded[path] = mx.load(str(path))  # type: ignore[assignment]
                self._check_identity(path)
            array = self._loaded[path].pop(name)
        except (RuntimeError, ValueError, KeyError, OSError) as error:
            raise CheckpointError(f"{path}: MLX does not read it: {one_line(error)}") from error
        if array.shape != shape:  # MLX reads the header once more
            raise CheckpointError(f"tensor {name} has shape {array.shape} when read; expected {shape}")
        return array

    def _check(self, name: str, shape: tuple[int, ...], dtypes: Sequence[str]) -> None:
        self._require(name)
        if self._shape_of[name] != shape:
            raise CheckpointError(f"tensor {name} has shape {self._shape_of[name]}; expected {shape}")
        if self._dtype_of[name] not in dtypes:
            raise CheckpointError(f"tensor {name} has dtype {self._dtype_of[name]}; expected {' or '.join(dtypes)}")

    def _require(self, name: str) -> None:
        if name not in self._file_of:
            raise CheckpointError(f"tensor {name} is missing")


def _identity(state: os.stat_result) -> Identity:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def _header(path: Path, stream: BinaryIO, size: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Each tensor's dtype and shape, of a file whose tensors fill it without a gap, by the format's specification.

    The safetensors library is not used. It imports NumPy, and that takes longer than reading a small model's weights.
    It does not notice a name that is there twice.

    Raises:
        CheckpointError: a header that is too long.
        ValueError: a file that is none, or cut short.
    """
    length = int.from_bytes(stream.read(8), "little")
    if MAX_HEADER_BYTES < length < size:
        raise CheckpointError(f"{path}: a header of {length} bytes; expected at most {MAX_HEADER_BYTES}")
    if not 2 <= length <= size - 8:
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    header = json.loads(stream.read(length), object_pairs_hook=unique_keys)
    if not isinstance(header, dict):
        raise ValueError(f"its header is a JSON {type(header).__name__}; expected an object")
    metadata = header.pop("__metadata__", None)
    known = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    if metadata is not None and not known:
        raise ValueError("__metadata__ is no object of strings")
    spans, found = [], {}
    for name, entry in header.items():
        dtype, shape, first, last = _entry(name, entry)
        spans.append((first, last))
        found[name] = dtype, shape
    end = 0
    for first, last in sorted(spans):
        if first != end:
            raise ValueError(f"its tensors leave a gap, or overlap, at byte {min(first, end)}")
        end = last
    if end != size - 8 - length:
        raise ValueError(f"its tensors have {end} bytes; {size - 8 - length} are there")
    return found


def _entry(name: str, entry: object) -> tuple[str, tuple[int, ...], int, int]:
    """A tensor's dtype, shape, and where its bytes begin and end."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name[:200]} has not just dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"tensor {name[:200]} has dtype {str(dtype)[:40]!r}; expected one of {', '.join(BITS)}")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
            raise ValueError(f"tensor {name[:200]} has a shape or offsets that are no lists of counts")
    if len(offsets) != 2 or math.prod(shape) * BITS[dtype] != (offsets[1] - offsets[0]) * 8:
        raise ValueError(f"tensor {name[:200]} has other bytes than its dtype and shape take")
    return dtype, tuple(shape), offsets[0], offsets[1]


def _shards(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The safetensors files of a folder, and the file of each tensor where an index says so.

    A shard's name is a bare file name inside the folder, anything else is refused; a file no index names is not opened.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if os.path.lexists(single):
        return [single], {}
    if not os.path.lexists(index):
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
        only = f"; {pickles[0]} is a pickle, which could execute anything and is never opened" if pickles else ""
        raise CheckpointError(f"{folder}: neither {single.name} nor {index.name} is there{only}")
    owners = read_json(index, MAX_INDEX_BYTES, CheckpointError).get("weight_map")
    if not isinstance(owners, dict) or not owners:
        raise CheckpointError(f"{index}: no weight_map of tensor names to file names")
    for name in owners.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors") or "\0" in name:
            raise CheckpointError(f"{index}: shard {name!r}; expected the bare name of a .safetensors file")
    names = sorted(set(owners.values()))
    for name in names:
        if not os.path.lexists(folder / name):
            raise CheckpointError(f"{folder / name}: no such file; {index.name} names it")
    return [folder / name for name in names], owners

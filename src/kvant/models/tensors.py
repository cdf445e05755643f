"""The tensors of a model folder: safetensors only, shape and dtype checked before an array is made."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx

from kvant.errors import CheckpointError, one_line
from kvant.files import open_file, read_json
from kvant.sizes import format_bytes, physical_memory
from kvant.tensor_header import read_header

FLOATS = ("F32", "F16", "BF16")
MAX_INDEX_BYTES = 64 * 1024 * 1024
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
                for name, tensor in read_header(path, stream, state.st_size, CheckpointError).tensors.items():
                    if name in self._file_of:
                        raise CheckpointError(f"{path.name}: tensor {name} is also in {self._file_of[name].name}")
                    self._file_of[name], self._shape_of[name], self._dtype_of[name] = path, tensor.shape, tensor.dtype
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


def tensor_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder's model.

    Raises:
        CheckpointError: there are none, or the index names others than there are.
    """
    return _shards(folder)[0]


def _identity(state: os.stat_result) -> Identity:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


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

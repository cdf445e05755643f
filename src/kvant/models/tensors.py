"""The tensors of a model folder: safetensors only, shape and dtype checked before an array is made."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import mlx.core as mx

from kvant.errors import CheckpointError, one_line
from kvant.files import open_file, read_json
from kvant.sizes import format_bytes, physical_memory
from kvant.tensor_header import BITS, Tensor, read_header

FLOATS = ("F32", "F16", "BF16")
DTYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16, "U32": mx.uint32, "U8": mx.uint8}
MAX_INDEX_BYTES = 64 * 1024 * 1024
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")

Expected = Mapping[str, tuple[tuple[int, ...], Sequence[str]]]  # a tensor's name to its shape and dtypes
Identity = tuple[int, int, int, int]  # of a file: device, inode, bytes, time of change in ns


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a tensor: some ranges along one axis, one after the other, and all of the other axes."""

    axis: int
    ranges: tuple[tuple[int, int], ...]  # (first, last) of each: ascending, none empty, all in the tensor

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The part's shape, of a tensor of this shape."""
        bounds, size = [bound for each in self.ranges for bound in each], whole[self.axis]
        empty = any(first >= last for first, last in self.ranges)
        if not bounds or empty or bounds != sorted(bounds) or bounds[0] < 0 or bounds[-1] > size:
            raise ValueError(f"ranges {self.ranges} of an axis of {size}; expected some of it, in order")
        return (*whole[: self.axis], sum(last - first for first, last in self.ranges), *whole[self.axis + 1 :])


class TensorFiles:
    """The tensors of a model folder by name. Headers are checked at once; data is read lazily."""

    def __init__(self, folder: Path, files: Sequence[Path] | None = None) -> None:
        """Read the headers of ``files``; None: those of the folder's model."""
        self.nbytes = 0  # of the files
        self.bytes_read = 0  # of the tensors taken so far, whole or in part; headers are not counted
        self._tensors: dict[str, tuple[Path, Tensor]] = {}  # each with its file
        self._data_of: dict[Path, int] = {}  # where a file's tensors begin
        self._opened: dict[Path, Identity] = {}
        self._loaded: dict[Path, dict[str, mx.array]] = {}
        self.files, owners = _shards(folder) if files is None else (list(files), {})
        for path in self.files:
            self._read_header(path)
        for name, owner in owners.items():
            if name not in self._tensors or self._tensors[name][0].name != owner:
                raise CheckpointError(f"{folder / owner}: tensor {name} is missing; the index says it is there")

    def _read_header(self, path: Path) -> None:
        try:
            with open_file(path, error=CheckpointError) as stream:
                state = os.fstat(stream.fileno())
                self._opened[path] = _identity(state)
                header = read_header(path, stream, state.st_size, CheckpointError)
                self._data_of[path] = len(header.data)
                for name, tensor in header.tensors.items():
                    if name in self._tensors:
                        raise CheckpointError(f"{path.name}: tensor {name} is also in {self._tensors[name][0].name}")
                    self._tensors[name] = path, tensor
                self._check_same(path, path.stat())
                self.nbytes += state.st_size
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: not a whole safetensors file: {one_line(error)}") from error

    def _check_same(self, path: Path, state: os.stat_result) -> None:
        """Refuse a file that is not the one whose header was checked: libraries open it again, by its name."""
        if _identity(state) != self._opened[path]:
            raise CheckpointError(f"{path}: changed while it was read")

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def dtype(self, name: str) -> str:
        """The dtype as safetensors writes it, such as BF16."""
        return self._tensor(name).dtype

    def part_bytes(self, name: str, part: Part | None) -> int:
        """Bytes of a part of the tensor; None: of all of it."""
        shape = self.shape(name)
        return math.prod(shape if part is None else part.shape(shape)) * BITS[self.dtype(name)] // 8

    def check(self, expected: Expected) -> None:
        """Refuse the checkpoint before any of it is read, unless every tensor expected is there and right."""
        for name, (shape, dtypes) in expected.items():
            self._check(name, shape, dtypes)

    def check_memory(self, nbytes: int) -> None:
        """Refuse to read more bytes than this machine has memory."""
        if nbytes > physical_memory():
            raise CheckpointError(
                f"the tensors have {format_bytes(nbytes)}; this machine has {format_bytes(physical_memory())}"
            )

    def take(
        self, name: str, shape: tuple[int, ...], dtypes: Sequence[str] = FLOATS, part: Part | None = None
    ) -> mx.array:
        """The tensor, after a check of its dtype and of its ``shape``, which is the whole tensor's.

        A ``part`` is read now; all of the tensor (None) when MLX uses it.
        """
        self._check(name, shape, dtypes)
        if part is not None:
            return self._read_part(name, part)
        path, _ = self._tensors[name]
        self.bytes_read += self.part_bytes(name, None)
        try:
            if path not in self._loaded:
                self._loaded[path] = mx.load(str(path))  # type: ignore[assignment]
                self._check_same(path, path.stat())
            array = self._loaded[path].pop(name)
        except (RuntimeError, ValueError, KeyError, OSError) as error:
            raise CheckpointError(f"{path}: MLX does not read it: {one_line(error)}") from error
        if array.shape != shape:  # MLX reads the header once more
            raise CheckpointError(f"tensor {name} has shape {array.shape} when read; expected {shape}")
        return array

    def _read_part(self, name: str, part: Part) -> mx.array:
        """Read the part's bytes, and no others. The file has to be the same before and after."""
        path, tensor = self._tensors[name]
        buffer = memoryview(bytearray(self.part_bytes(name, part)))
        start, done = self._data_of[path] + tensor.first, 0
        try:
            with open_file(path, error=CheckpointError) as stream:
                raw = stream.raw
                assert isinstance(raw, FileIO)  # without a buffer of its own, which would read ahead
                self._check_same(path, os.fstat(raw.fileno()))
                for first, last in _runs(tensor, part):
                    self.bytes_read += _read_into(raw, start + first, buffer[done : done + last - first])
                    done += last - first
                self._check_same(path, os.fstat(raw.fileno()))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {one_line(error)}") from error
        data = mx.array(buffer)  # type: ignore[arg-type]  # it takes any buffer
        return data.view(DTYPES[tensor.dtype]).reshape(part.shape(tensor.shape))

    def _check(self, name: str, shape: tuple[int, ...], dtypes: Sequence[str]) -> None:
        tensor = self._tensor(name)
        if tensor.shape != shape:
            raise CheckpointError(f"tensor {name} has shape {tensor.shape}; expected {shape}")
        if tensor.dtype not in dtypes:
            raise CheckpointError(f"tensor {name} has dtype {tensor.dtype}; expected {' or '.join(dtypes)}")

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"tensor {name} is missing")
        return self._tensors[name][1]


def tensor_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder's model."""
    return _shards(folder)[0]


def _runs(tensor: Tensor, part: Part) -> Iterator[tuple[int, int]]:
    """Where the part's bytes are in the tensor: (first, last) of each run without a gap."""
    rows = math.prod(tensor.shape[: part.axis])
    row = (tensor.last - tensor.first) // rows
    item = row // tensor.shape[part.axis]
    for number in range(rows):
        yield from ((number * row + first * item, number * row + last * item) for first, last in part.ranges)


def _read_into(raw: FileIO, start: int, buffer: memoryview) -> int:
    """Fill the buffer with a file's bytes from ``start`` on. Returns how many were read."""
    raw.seek(start)
    size = len(buffer)
    while len(buffer):
        count = raw.readinto(buffer)  # not always all that was asked for: at most 2 GiB on macOS
        if not count:
            raise OSError("it ends too early")
        buffer = buffer[count:]
    return size


def _identity(state: os.stat_result) -> Identity:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def _shards(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The safetensors files of a folder, and the file of each tensor if an index says so.

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

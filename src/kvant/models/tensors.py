"""The tensors of a model folder: safetensors only, shape and dtype checked before an array is made."""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
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
HEAD_FILE = "mtp.safetensors"  # of a head for drafts, if it is in no file of the model's
SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
COMPARED_BYTES = (
    2**17
)  # of two tensors at a time: a larger buffer is new memory every time, and takes five times as long
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")

Expected = Mapping[str, tuple[tuple[int, ...], Sequence[str]]]  # a tensor's name to its shape and dtypes
Identity = tuple[int, int, int, int]  # of a file: device, inode, bytes, time of change in ns
# a file, as it was when its header was read, and where a tensor's bytes begin
Place = tuple[Path, Identity, int]


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
        return (
            *whole[: self.axis],
            sum(last - first for first, last in self.ranges),
            *whole[self.axis + 1 :],
        )


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
        self._stored_names: dict[str, str] = {}  # of tensors that have another name here
        self.files, owners = _shards(folder) if files is None else (list(files), {})
        for path in self.files:
            self._read_header(path)
        for name, owner in owners.items():
            if name not in self._tensors or self._tensors[name][0].name != owner:
                raise CheckpointError(
                    f"{folder / owner}: tensor {name} is missing; the index says it is there"
                )

    def _read_header(self, path: Path) -> None:
        try:
            with open_file(path, error=CheckpointError) as stream:
                state = os.fstat(stream.fileno())
                self._opened[path] = _identity(state)
                header = read_header(path, stream, state.st_size, CheckpointError)
                self._data_of[path] = len(header.data)
                for name, tensor in header.tensors.items():
                    if name in self._tensors:
                        raise CheckpointError(
                            f"{path.name}: tensor {name} is also in {self._tensors[name][0].name}"
                        )
                    self._tensors[name] = path, tensor
                self._check_same(path, path.stat())
                self.nbytes += state.st_size
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: not a whole safetensors file: {one_line(error)}") from error

    def _check_same(self, path: Path, state: os.stat_result) -> None:
        """Refuse a file that is not the one whose header was checked: libraries open it again, by its
        name.
        """
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

    def rename(self, name: str, new: str) -> None:
        """Give a tensor another name."""
        self._tensors[new] = self._tensors.pop(name)
        self._stored_names[new] = name

    def are_same(self, name: str, other: str) -> bool:
        """Whether two tensors are there with the same dtype, shape and bytes; these are read as far as
        they agree.
        """
        if name not in self or other not in self:
            return False
        one, two = self._tensor(name), self._tensor(other)
        alike = (one.dtype, one.shape) == (two.dtype, two.shape)
        return alike and _same_bytes(self._place(name), self._place(other), one.last - one.first)

    def _place(self, name: str) -> Place:
        path, tensor = self._tensors[name]
        return path, self._opened[path], self._data_of[path] + tensor.first

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
            array = self._loaded[path].pop(self._stored_names.get(name, name))
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


def tensor_files(folder: Path, *, head: bool = False) -> list[Path]:
    """The safetensors files of a folder's model; ``head``: with one that has the head for drafts alone."""
    beside = folder / HEAD_FILE
    return [*_shards(folder)[0], *([beside] if head and os.path.lexists(beside) else [])]


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


@lru_cache(maxsize=64)  # a command plans the memory, and then loads
def _same_bytes(one: Place, two: Place, size: int) -> bool:
    with (
        open_file(one[0], error=CheckpointError) as first,
        open_file(two[0], error=CheckpointError) as second,
    ):
        first.seek(one[2])
        second.seek(two[2])
        counts = (min(COMPARED_BYTES, size - done) for done in range(0, size, COMPARED_BYTES))
        return all(first.read(count) == second.read(count) for count in counts)


def _shards(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The safetensors files of a folder, and the file of each tensor if an index says so.

    A shard's name is a bare file name inside the folder, anything else is refused; a file no index names is
    not opened. Without an index shards are those of transformers' names. A whole file beside shards that an
    index names is refused: transformers reads it alone, and mlx-lm all of them.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    has_single = os.path.lexists(single)
    if not os.path.lexists(index):
        return ([single] if has_single else _numbered_shards(folder)), {}
    owners = read_json(index, MAX_INDEX_BYTES, CheckpointError).get("weight_map")
    if not isinstance(owners, dict) or not owners:
        raise CheckpointError(f"{index}: no weight_map of tensor names to file names")
    for name in owners.values():
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or not name.endswith(".safetensors")
            or "\0" in name
        ):
            raise CheckpointError(f"{index}: shard {name!r}; expected the bare name of a .safetensors file")
    names = sorted(set(owners.values()))
    missing = [name for name in names if not os.path.lexists(folder / name)]
    if has_single and single.name not in names:
        if len(missing) == len(names):  # an index that was left behind
            return [single], {}
        raise CheckpointError(
            f"{folder}: {single.name} is there, and {names[0]} that {index.name} names; expected one of the "
            f"two: "
            "remove the one that is not the model"
        )
    if missing:
        raise CheckpointError(f"{folder / missing[0]}: no such file; {index.name} names it")
    return [folder / name for name in names], owners


def _numbered_shards(folder: Path) -> list[Path]:
    """The shards of a folder without an index, by their names; all of them have to be there."""
    found = {int(match[1]): match for path in folder.iterdir() if (match := SHARD.fullmatch(path.name))}
    if not found:
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
        only = (
            f"; {pickles[0]} is a pickle, which could execute anything and is never opened" if pickles else ""
        )
        raise CheckpointError(
            f"{folder}: neither model.safetensors nor model.safetensors.index.json is there{only}"
        )
    names = {match[0] for match in found.values()}
    total = max(found.values(), key=lambda match: match[0])[2]
    expected = [f"model-{number:05}-of-{total}.safetensors" for number in range(1, int(total) + 1)]
    if wrong := sorted(names.symmetric_difference(expected)):
        is_wrong = "not one of them" if wrong[0] in names else "no such file"
        raise CheckpointError(
            f"{folder / wrong[0]}: {is_wrong}; expected {int(total)} shards, as there is no index"
        )
    return [folder / name for name in expected]

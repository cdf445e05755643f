"""Read the tensors of a model folder, from safetensors files only."""

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
HEAD_FILE = "mtp.safetensors"  # a head for drafts that is stored separately
SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
# Two tensors are compared in chunks of this size. Larger buffers are new memory and take five times as long.
COMPARED_BYTES = 2**17
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")

Expected = Mapping[str, tuple[tuple[int, ...], Sequence[str]]]  # tensor name -> shape and allowed dtypes
Identity = tuple[int, int, int, int]  # of a file: device, inode, size in bytes, modification time in ns
# a file, its identity when its header was read, and the offset of a tensor's bytes
Place = tuple[Path, Identity, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a tensor: concatenated ranges along one axis, and all of the other axes."""

    axis: int
    ranges: tuple[tuple[int, int], ...]  # (first, end) of each: ascending, not empty, within the tensor

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the piece of a tensor with the shape ``whole``."""
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
    """The tensors of a model folder by name. Headers are read immediately, data when it is needed."""

    def __init__(self, folder: Path, files: Sequence[Path] | None = None) -> None:
        """Read the headers of ``files``; None: the files of the folder's model."""
        self.nbytes = 0  # of the files
        self.bytes_read = 0  # of tensors and pieces taken so far; headers are not counted
        self._tensors: dict[str, tuple[Path, Tensor]] = {}  # name -> file and header entry
        self._data_of: dict[Path, int] = {}  # the offset of a file's first tensor
        self._opened: dict[Path, Identity] = {}
        self._loaded: dict[Path, dict[str, mx.array]] = {}
        self._stored_names: dict[str, str] = {}  # of renamed tensors, by new name
        self.files, owners = _shards(folder) if files is None else (list(files), {})
        for path in self.files:
            self._read_header(path)
        for name, owner in owners.items():
            if name not in self._tensors or self._tensors[name][0].name != owner:
                raise CheckpointError(
                    f"{folder / owner}: tensor {name} is missing, although the index lists it"
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
        """Raise an error if a file changed since its header was checked: it is opened again by name."""
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
        """Return the dtype as safetensors writes it, such as BF16."""
        return self._tensor(name).dtype

    def rename(self, name: str, new: str) -> None:
        """Give a tensor another name."""
        self._tensors[new] = self._tensors.pop(name)
        self._stored_names[new] = name

    def are_same(self, name: str, other: str) -> bool:
        """Return whether two tensors exist with the same dtype, shape and bytes."""
        if name not in self or other not in self:
            return False
        one, two = self._tensor(name), self._tensor(other)
        alike = (one.dtype, one.shape) == (two.dtype, two.shape)
        return alike and _same_bytes(self._place(name), self._place(other), one.last - one.first)

    def _place(self, name: str) -> Place:
        path, tensor = self._tensors[name]
        return path, self._opened[path], self._data_of[path] + tensor.first

    def piece_bytes(self, name: str, piece: Piece | None) -> int:
        """Return the bytes of a piece of the tensor; None: of all of it."""
        shape = self.shape(name)
        return math.prod(shape if piece is None else piece.shape(shape)) * BITS[self.dtype(name)] // 8

    def check(self, expected: Expected) -> None:
        """Raise an error unless every expected tensor exists with its shape and dtype. No data is read."""
        for name, (shape, dtypes) in expected.items():
            self._check(name, shape, dtypes)

    def check_memory(self, nbytes: int) -> None:
        """Raise an error if this machine has less memory than ``nbytes``."""
        if nbytes > physical_memory():
            raise CheckpointError(
                f"the tensors have {format_bytes(nbytes)}; this machine has {format_bytes(physical_memory())}"
            )

    def take(
        self, name: str, shape: tuple[int, ...], dtypes: Sequence[str] = FLOATS, piece: Piece | None = None
    ) -> mx.array:
        """Return a tensor, or a piece of it, after checking its dtype and the ``shape`` of the whole tensor.

        A piece is read immediately, a whole tensor when MLX evaluates it.
        """
        self._check(name, shape, dtypes)
        if piece is not None:
            return self._read_piece(name, piece)
        path, _ = self._tensors[name]
        self.bytes_read += self.piece_bytes(name, None)
        try:
            if path not in self._loaded:
                self._loaded[path] = mx.load(str(path))  # type: ignore[assignment]
                self._check_same(path, path.stat())
            array = self._loaded[path].pop(self._stored_names.get(name, name))
        except (RuntimeError, ValueError, KeyError, OSError) as error:
            raise CheckpointError(f"{path}: MLX cannot read it: {one_line(error)}") from error
        if array.shape != shape:  # MLX reads the header once more
            raise CheckpointError(f"tensor {name} has shape {array.shape} when read; expected {shape}")
        return array

    def _read_piece(self, name: str, piece: Piece) -> mx.array:
        """Read only the piece's bytes. The file must not change meanwhile."""
        path, tensor = self._tensors[name]
        buffer = memoryview(bytearray(self.piece_bytes(name, piece)))
        start, done = self._data_of[path] + tensor.first, 0
        try:
            with open_file(path, error=CheckpointError) as stream:
                raw = stream.raw
                assert isinstance(raw, FileIO)  # unbuffered: a buffer would read more than the piece
                self._check_same(path, os.fstat(raw.fileno()))
                for first, last in _runs(tensor, piece):
                    self.bytes_read += _read_into(raw, start + first, buffer[done : done + last - first])
                    done += last - first
                self._check_same(path, os.fstat(raw.fileno()))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {one_line(error)}") from error
        data = mx.array(buffer)  # type: ignore[arg-type]  # it accepts any buffer
        return data.view(DTYPES[tensor.dtype]).reshape(piece.shape(tensor.shape))

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
    """Return the safetensors files of a folder's model; ``head``: include a separate file of the head."""
    head_file = folder / HEAD_FILE
    return [*_shards(folder)[0], *([head_file] if head and os.path.lexists(head_file) else [])]


def _runs(tensor: Tensor, piece: Piece) -> Iterator[tuple[int, int]]:
    """Yield the byte offsets (first, end) of each contiguous run of the piece in the tensor."""
    rows = math.prod(tensor.shape[: piece.axis])
    row = (tensor.last - tensor.first) // rows
    item = row // tensor.shape[piece.axis]
    for number in range(rows):
        yield from ((number * row + first * item, number * row + last * item) for first, last in piece.ranges)


def _read_into(raw: FileIO, start: int, buffer: memoryview) -> int:
    """Fill the buffer with a file's bytes from ``start`` on; return how many were read."""
    raw.seek(start)
    size = len(buffer)
    while len(buffer):
        count = raw.readinto(buffer)  # may be short: macOS reads at most 2 GiB
        if not count:
            raise OSError("it ends too early")
        buffer = buffer[count:]
    return size


def _identity(state: os.stat_result) -> Identity:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


@lru_cache(maxsize=64)  # planning the memory and loading both compare
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
    """Return the safetensors files of a folder, and the index's map of tensors to files, empty without one.

    An index may only list bare file names, and files that it does not list are not opened. Without an index,
    shards must have transformers' names. A single file next to the shards of an index is refused, because
    transformers reads only the single file, and mlx-lm all of them.
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
        if len(missing) == len(names):  # a leftover index
            return [single], {}
        raise CheckpointError(
            f"{folder}: both {single.name} and {names[0]}, which {index.name} lists, exist; remove the one "
            f"that is not the model"
        )
    if missing:
        raise CheckpointError(f"{folder / missing[0]}: no such file; {index.name} lists it")
    return [folder / name for name in names], owners


def _numbered_shards(folder: Path) -> list[Path]:
    """Return the shards of a folder without an index; raise an error if one is missing."""
    matches = {int(match[1]): match for path in folder.iterdir() if (match := SHARD.fullmatch(path.name))}
    if not matches:
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
        only = (
            f"; {pickles[0]} is a pickle, which could execute code, so it is never opened" if pickles else ""
        )
        raise CheckpointError(
            f"{folder}: neither model.safetensors nor model.safetensors.index.json exists{only}"
        )
    names = {match[0] for match in matches.values()}
    total = max(matches.values(), key=lambda match: match[0])[2]
    expected = [f"model-{number:05}-of-{total}.safetensors" for number in range(1, int(total) + 1)]
    if wrong := sorted(names.symmetric_difference(expected)):
        problem = "unexpected shard" if wrong[0] in names else "no such file"
        raise CheckpointError(
            f"{folder / wrong[0]}: {problem}; expected {int(total)} shards, because there is no index"
        )
    return [folder / name for name in expected]

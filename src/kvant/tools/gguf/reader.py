"""Read a GGUF file's metadata and tensor index from a memory map. A stranger may have made the file.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every read is checked against the file's end first,
and counts, lengths and nesting have limits: a malformed file takes memory like its size, and ends in one line.
"""

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvant.errors import ConvertError
from kvant.files import open_given
from kvant.tools.gguf.blocks import BLOCK_TYPES, TYPE_NAMES, BlockType

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # 1 counts with 32 bits and was replaced within weeks
MAX_KEYS = 4096
MAX_TENSORS = 65536
MAX_KEY_BYTES = 1024
MAX_TEXT_BYTES = 4 * 1024 * 1024  # a chat template; published ones have some 30,000
MAX_ELEMENTS = 2**21  # of all arrays together; the largest published vocabularies have 1.3 million
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 2**16

# Number types of metadata values, as struct knows them.
NUMBERS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
TEXT, ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """An entry of the tensor index.

    Attributes:
        shape: outermost axis first, as MLX and safetensors count; the file stores it the other way round.
        first, last: its bytes are those from ``first`` to ``last - 1`` of the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: BlockType
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """An open file: its metadata, and its tensors by name."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]
    _data: memoryview

    def blocks(self, tensor: GGUFTensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return a tensor's blocks, (blocks, bytes of one) uint8, as a read-only view of the file."""
        data = np.frombuffer(self._data[tensor.first : tensor.last], np.uint8)
        return data.reshape(-1, tensor.kind.nbytes)


@contextmanager
def open_gguf(path: Path) -> Iterator[GGUFFile]:
    """Open a GGUF file and read its index.

    Raises:
        ConvertError: the file cannot be read, is no GGUF file, or breaks the format; the message says where.
    """
    with open_given(path, ConvertError) as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ConvertError(f"{path}: not a GGUF file; expected one that begins with the letters GGUF")
        # Unmapped when the last view of it is gone: an array may outlive this block.
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        try:
            found = _read(mapped)
        except ValueError as error:
            raise ConvertError(f"{path}: {error}") from error
        yield found


class _Cursor:
    """A place in the file that moves as values are read; a value past the end is a ValueError."""

    def __init__(self, data: memoryview, at: int) -> None:
        self.data = data
        self.at = at
        self.elements_left = MAX_ELEMENTS

    def take(self, count: int) -> memoryview:
        if count > len(self.data) - self.at:
            raise ValueError(f"cut short: {count} bytes are expected at byte {self.at} of {len(self.data)}")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def count(self, what: str, most: int) -> int:
        found = int(self.number("<Q"))
        if found > most:
            raise ValueError(f"{found} {what}; expected at most {most}")
        return found

    def text(self, most: int) -> str:
        data = self.take(self.count("bytes of text", most))
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"text that is not UTF-8 ends at byte {self.at}") from error

    def value(self, kind: int, *, inner: bool = False) -> Any:
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == TEXT:
            return self.text(MAX_TEXT_BYTES)
        if kind != ARRAY or inner:
            raise ValueError(f"a metadata value of type {kind}; expected a number, text or an array of them")
        element = self.number("<I")
        length = self.count("elements of an array", self.elements_left)
        self.elements_left -= length
        if element in NUMBERS:
            return np.frombuffer(self.take(length * struct.calcsize(NUMBERS[element])), NUMBERS[element]).tolist()
        return [self.value(element, inner=True) for _ in range(length)]


def _read(data: memoryview) -> GGUFFile:
    cursor = _Cursor(data, len(MAGIC))
    version = cursor.number("<I")
    if version not in VERSIONS:
        raise ValueError(f"GGUF version {version}; expected 2 or 3, little-endian")
    tensor_count = cursor.count("tensors", MAX_TENSORS)
    key_count = cursor.count("metadata keys", MAX_KEYS)
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.text(MAX_KEY_BYTES)
        if key in metadata:
            raise ValueError(f"metadata key {key[:80]!r} is there twice")
        metadata[key] = cursor.value(cursor.number("<I"))
    entries = [_entry(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT:
        raise ValueError(f"general.alignment is {str(alignment)[:40]}; expected an int from 1 to {MAX_ALIGNMENT}")
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise ValueError(f"tensor {name[:80]!r} is there twice")
        if offset % alignment:
            raise ValueError(f"tensor {name[:80]!r} has offset {offset}; expected a multiple of {alignment}")
        tensors[name] = _placed(name, shape, kind, start + offset, len(data))
    _refuse_overlaps(tensors)
    return GGUFFile(metadata, tensors, data)


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Return name, shape, type number and offset of the next tensor."""
    name = cursor.text(MAX_KEY_BYTES)
    dimensions = cursor.number("<I")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise ValueError(f"tensor {name[:80]!r} has {dimensions} dimensions; expected 1 to {MAX_DIMENSIONS}")
    shape = tuple(int(cursor.number("<Q")) for _ in range(dimensions))[::-1]
    return name, shape, cursor.number("<I"), cursor.number("<Q")


def _placed(name: str, shape: tuple[int, ...], number: int, first: int, end: int) -> GGUFTensor:
    if number not in BLOCK_TYPES:
        kind = TYPE_NAMES.get(number, f"number {number}")
        known = ", ".join(block.name for block in BLOCK_TYPES.values())
        raise ValueError(f"tensor {name[:80]!r} is of type {kind}; expected {known}")
    block = BLOCK_TYPES[number]
    if 0 in shape or shape[-1] % block.size:
        raise ValueError(f"tensor {name[:80]!r} is {shape}; expected rows of whole blocks of {block.size}")
    last = first + math.prod(shape) // block.size * block.nbytes
    if last > end:
        raise ValueError(f"tensor {name[:80]!r} ends at byte {last}; the file has {end}")
    return GGUFTensor(name, shape, block, first, last)


def _refuse_overlaps(tensors: Mapping[str, GGUFTensor]) -> None:
    """Refuse tensors that share bytes: many over the same ones would come out larger than the file."""
    end = 0
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.first):
        if tensor.first < end:
            raise ValueError(f"tensor {tensor.name[:80]!r} begins within another one, at byte {tensor.first}")
        end = tensor.last

"""Read a GGUF file from an untrusted source: metadata, the index of its tensors, and their blocks.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every read checks for the end of the file,
and counts, lengths and nesting are limited, so a malformed file cannot take much more memory than its size.
"""

import math
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from kvant.errors import ConvertError, ModelError, one_line
from kvant.files import open_user_file, unique_keys
from kvant.tools.gguf.blocks import BLOCK_TYPES, TYPE_NAMES, BlockType, Bytes

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # 1 counts with 32 bits and was replaced within weeks
MAX_KEYS = 4096
MAX_TENSORS = 65536
MAX_KEY_BYTES = 1024
MAX_TEXT_BYTES = 4 * 1024 * 1024  # a chat template; published ones have some 30,000
MAX_ELEMENTS = 2**21  # in all arrays together; the largest published vocabularies have 1.3 million
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 2**16

# Types of metadata values: struct's codes of numbers, and two others.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT = 8
ARRAY = 9


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """An entry of the tensor index."""

    name: str
    shape: tuple[int, ...]  # outermost axis first, as in MLX and safetensors; the file stores it reversed
    kind: BlockType
    offset: int  # of the first byte, relative to the end of the index

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.kind.size * self.kind.nbytes


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """An open file: its metadata, and its tensors by name."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]
    _stream: BufferedReader
    _start: int  # where the tensors' data begins

    def blocks(self, tensor: GGUFTensor, first: int = 0, count: int | None = None) -> Bytes:
        """Read ``count`` blocks of a tensor, or all, starting at ``first``: (blocks, bytes per block) uint8.

        Raises:
            ConvertError: the file cannot be read, or has become shorter.
        """
        size = tensor.kind.nbytes
        last = tensor.nbytes if count is None else min((first + count) * size, tensor.nbytes)
        self._stream.seek(self._start + tensor.offset + first * size)
        return np.frombuffer(_take(self._stream, last - first * size), np.uint8).reshape(-1, size)


@contextmanager
def open_gguf(path: Path) -> Iterator[GGUFFile]:
    """Open a GGUF file and read its index.

    Raises:
        ConvertError: the file cannot be read, is not a GGUF file, or is malformed; the message says where.
    """
    with open_user_file(path, ConvertError) as stream:
        with naming(path):
            file = _read(stream)
        yield file


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Prefix errors with the file's path."""
    try:
        yield
    except (ConvertError, ModelError) as error:
        raise ConvertError(f"{path}: {error}") from error


def _take(stream: BufferedReader, count: int) -> bytes:
    try:
        data = stream.read(count)
    except OSError as error:
        raise ConvertError(f"cannot be read: {one_line(error)}") from error
    if len(data) < count:
        at = stream.tell() - len(data)
        raise ConvertError(f"is cut short: {count} bytes are expected at byte {at}, {len(data)} are there")
    return data


class _Index:
    """Read the beginning of the file value by value; refuse one that breaks the format."""

    def __init__(self, stream: BufferedReader) -> None:
        self.stream = stream
        self.elements_left = MAX_ELEMENTS

    def numbers(self, form: str, count: int) -> tuple[Any, ...]:
        packed = f"<{count}{form}"
        return struct.unpack(packed, _take(self.stream, struct.calcsize(packed)))

    def number(self, form: str) -> Any:
        return self.numbers(form, 1)[0]

    def count(self, what: str, most: int) -> int:
        number = int(self.number("Q"))
        if number > most:
            raise ConvertError(f"{number} {what}; expected at most {most}")
        return number

    def text(self, most: int) -> str:
        data = _take(self.stream, self.count("bytes of text", most))
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ConvertError(f"text that is not UTF-8 ends at byte {self.stream.tell()}") from error

    def value(self) -> Any:
        kind = self.number("I")
        if kind != ARRAY:
            return self.element(kind)
        kind = self.number("I")
        length = self.count("elements of an array", self.elements_left)
        self.elements_left -= length
        if kind in NUMBERS:
            return [*self.numbers(NUMBERS[kind], length)]
        return [self.element(kind) for _ in range(length)]

    def element(self, kind: int) -> Any:
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind != TEXT:
            raise ConvertError(
                f"a metadata value of type {kind}; expected a number, text or an array of them"
            )
        return self.text(MAX_TEXT_BYTES)

    def tensor(self) -> GGUFTensor:
        name = self.text(MAX_KEY_BYTES)
        shown = f"tensor {name[:80]!r}"
        dimensions = self.number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ConvertError(f"{shown} has {dimensions} dimensions; expected 1 to {MAX_DIMENSIONS}")
        shape = self.numbers("Q", dimensions)[::-1]
        number = self.number("I")
        if number not in BLOCK_TYPES:
            kind = TYPE_NAMES.get(number, f"number {number}")
            known = ", ".join(block.name for block in BLOCK_TYPES.values())
            raise ConvertError(f"{shown} is of type {kind}; expected {known}")
        block = BLOCK_TYPES[number]
        if 0 in shape or shape[-1] % block.size:
            raise ConvertError(f"{shown} is {shape}; expected rows of whole blocks of {block.size}")
        return GGUFTensor(name, shape, block, self.number("Q"))


def _read(stream: BufferedReader) -> GGUFFile:
    if stream.read(len(MAGIC)) != MAGIC:
        raise ConvertError("not a GGUF file; expected one that begins with the letters GGUF")
    index = _Index(stream)
    version = index.number("I")
    if version not in VERSIONS:
        raise ConvertError(f"GGUF version {version}; expected 2 or 3, little-endian")
    tensor_count = index.count("tensors", MAX_TENSORS)
    key_count = index.count("metadata keys", MAX_KEYS)
    settings = ((index.text(MAX_KEY_BYTES), index.value()) for _ in range(key_count))
    metadata = unique_keys(settings, "metadata key ", ConvertError)
    entries = ((tensor.name, tensor) for tensor in (index.tensor() for _ in range(tensor_count)))
    tensors: dict[str, GGUFTensor] = unique_keys(entries, "tensor ", ConvertError)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT:
        raise ConvertError(
            f"general.alignment is {str(alignment)[:40]}; expected an int from 1 to {MAX_ALIGNMENT}"
        )
    start = -(-stream.tell() // alignment) * alignment
    size = os.fstat(stream.fileno()).st_size
    end = 0
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        shown = f"tensor {tensor.name[:80]!r}"
        if tensor.offset % alignment:
            raise ConvertError(f"{shown} has offset {tensor.offset}; expected a multiple of {alignment}")
        if tensor.offset < end:  # overlapping tensors could expand to more than the file's size
            raise ConvertError(f"{shown} begins within another one, at byte {start + tensor.offset}")
        end = tensor.offset + tensor.nbytes
        if start + end > size:
            raise ConvertError(f"{shown} ends at byte {start + end}; the file has {size}")
    return GGUFFile(metadata, tensors, stream, start)

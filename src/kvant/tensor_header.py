"""Read the header of a safetensors file safely, since a stranger may have made it.

The safetensors library is not used: it imports NumPy, which takes longer than reading a small model's
weights, and it does not notice duplicate names.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvant.errors import KvantError
from kvant.files import unique_keys

MAX_HEADER_BYTES = 16 * 1024 * 1024  # room for 100,000 tensors
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("U8", "I8", "BOOL", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a file. Its bytes are first to last - 1, counted from the end of the header."""

    dtype: str  # as safetensors writes it, such as BF16
    shape: tuple[int, ...]
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A file's header."""

    metadata: Mapping[str, str]
    tensors: Mapping[str, Tensor]  # without gaps
    data: bytes  # the header as stored, beginning with the eight bytes of its length


def read_header(path: Path, stream: BinaryIO, size: int, error: type[KvantError]) -> TensorHeader:
    """Read the header of a file of ``size`` bytes by the format's specification.

    Args:
        path: for messages.
        stream: at the file's first byte.
        size: of the file in bytes.
        error: raised if the header is too long. Any other malformed or truncated file raises a ValueError.
    """
    prefix = stream.read(8)
    length = int.from_bytes(prefix, "little")
    if MAX_HEADER_BYTES < length < size:
        raise error(f"{path}: a header of {length} bytes; expected at most {MAX_HEADER_BYTES}")
    if not 2 <= length <= size - 8:
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    data = stream.read(length)
    header = json.loads(data, object_pairs_hook=unique_keys)
    if not isinstance(header, dict):
        raise ValueError(f"its header is a JSON {type(header).__name__}; expected an object")
    metadata = header.pop("__metadata__", None)
    known = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    if metadata is not None and not known:
        raise ValueError("__metadata__ is not an object of strings")
    tensors = {name: _tensor(name, entry) for name, entry in header.items()}
    end = 0
    for first, last in sorted((tensor.first, tensor.last) for tensor in tensors.values()):
        if first != end:
            raise ValueError(f"its tensors leave a gap, or overlap, at byte {min(first, end)}")
        end = last
    if end != size - 8 - length:
        raise ValueError(f"its tensors have {end} bytes; {size - 8 - length} are there")
    return TensorHeader(metadata or {}, tensors, prefix + data)


def make_header(tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """Make the header of a file that contains these tensors in order.

    ``tensors``: dtype, as safetensors writes it, and shape by name.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in tensors.items():
        first = end
        end += math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    return len(data).to_bytes(8, "little") + data


def _tensor(name: str, entry: object) -> Tensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name[:200]} has not just dtype, shape and data_offsets")
    dtype = entry["dtype"]
    shape = entry["shape"]
    offsets = entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(
            f"tensor {name[:200]} has dtype {str(dtype)[:40]!r}; expected one of {', '.join(BITS)}"
        )
    for numbers in (shape, offsets):
        counts = isinstance(numbers, list) and len(numbers) <= 16  # a longer product would take hours
        if not counts or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
            raise ValueError(f"tensor {name[:200]} has a shape or offsets that are not lists of counts")
    if len(offsets) != 2 or math.prod(shape) * BITS[dtype] != (offsets[1] - offsets[0]) * 8:
        raise ValueError(f"tensor {name[:200]} has other bytes than its dtype and shape take")
    return Tensor(dtype, tuple(shape), offsets[0], offsets[1])

"""How many queries a simdgroup of the fused kernel holds at most.

Each takes 16 registers or more of a thread's. With more queries a row is loaded and made floats for more of them at
once; with fewer registers a GPU runs more threads at a time. Which is faster depends on the device. `kvant doctor`
measures it and records the faster number.

It is not measured at each start. The order of sums depends on it, and so does their rounding: the same seed is to give
the same text from start to start.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from kvant.errors import ModelError
from kvant.files import read_json, user_cache
from kvant.operators.kernels.launch import Backend, text_digest

# The default, and the other number. Apple's GPUs have 128 registers a thread, NVIDIA's 255.
CHOICES: dict[Backend, tuple[int, int]] = {"metal": (4, 2), "cuda": (8, 4)}
MAX_RECORD_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Queries:
    """The number that is used.

    Attributes:
        recorded: it was measured on this device; otherwise it is the default.
        reason: for people.
    """

    number: int
    recorded: bool
    reason: str


@cache
def queries_here(backend: Backend) -> Queries:
    """The recorded number for MLX's default device, or the default. The file is read once in a process."""
    default = CHOICES[backend][0]
    path = record_path()
    try:
        record = read_records(path).get(device_key(backend))
    except ModelError as error:
        return Queries(default, False, f"the default: {error}")
    if record is None:
        return Queries(default, False, "the default: not measured on this device")
    if not isinstance(record, Mapping) or record.get("kernel") != text_digest(backend):
        return Queries(default, False, f"the default: {path} is of another kernel's text")
    number = record.get("queries")
    if type(number) is not int or number not in CHOICES[backend]:
        wanted = " or ".join(map(str, CHOICES[backend]))
        return Queries(default, False, f"the default: {path}: queries is {str(number)[:80]!r}; expected {wanted}")
    return Queries(number, True, f"measured on this device: {path}")


def record_path() -> Path:
    """The file of the recorded numbers."""
    return user_cache() / "fused-kernel.json"


def read_records(path: Path) -> Mapping[str, Any]:
    """The records of all devices, by :func:`device_key`; empty where there is no file.

    Raises:
        ModelError: a file that cannot be read, or holds no JSON object.
    """
    return read_json(path, MAX_RECORD_BYTES) if os.path.lexists(path) else {}


def new_record(backend: Backend, number: int) -> dict[str, Any]:
    """What :func:`queries_here` reads, as JSON has it."""
    return {"kernel": text_digest(backend), "queries": number}


def device_key(backend: Backend) -> str:
    """MLX's default device as the records name it."""
    return f"{mx.device_info().get('device_name', 'unknown')} ({backend})"

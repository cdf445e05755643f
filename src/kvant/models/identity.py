"""Digests that tell a model's and a tokenizer's files from others, in a few milliseconds.

They are for mistakes, such as a snapshot of another model, and not for tampering. A file of more than :data:`WHOLE`
bytes is sampled. Two that have one name, one size, one header and the same bytes at the sampled places count as the
same.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from kvant.cache import Identity
from kvant.errors import CheckpointError
from kvant.files import MAX_CONFIG_BYTES, open_file, read_bytes
from kvant.models.adapter import CONFIG_FILE, TENSORS_FILE
from kvant.models.tensors import tensor_files
from kvant.tensor_header import MAX_HEADER_BYTES

WHOLE = 1024 * 1024  # bytes of a file that is read whole
BLOCKS, BLOCK_BYTES = 64, 4096  # of a larger one, evenly spaced, its first and last among them
MAX_TOKENIZER_BYTES = 64 * 1024 * 1024


def identify(folder: Path, adapter: Path | None = None) -> Identity:
    """The identity of a model folder that can be loaded, and of an adapter.

    It covers config.json and tokenizer.json whole, and of each file of tensors its name, its size, its header and its
    bytes, sampled.
    """
    parts = _folder_parts(folder / "config.json", tensor_files(folder))
    if adapter is not None:
        parts += _folder_parts(adapter / CONFIG_FILE, [adapter / TENSORS_FILE])
    return Identity(model=_digest(parts), tokenizer=tokenizer_digest(folder), folder=folder)


def tokenizer_digest(folder: Path) -> str:
    """Of a folder's tokenizer.json; 64 hexadecimal digits."""
    return hashlib.sha256(read_bytes(folder / "tokenizer.json", MAX_TOKENIZER_BYTES)).hexdigest()


def _folder_parts(config: Path, files: Sequence[Path]) -> list[bytes]:
    parts = [read_bytes(config, MAX_CONFIG_BYTES)]
    for path in files:
        parts += [path.name.encode(), *_file_parts(path)]
    return parts


def _file_parts(path: Path) -> list[bytes]:
    """A file's size, and what is looked at of it."""
    with open_file(path, error=CheckpointError) as file:
        size = os.fstat(file.fileno()).st_size
        parts = [str(size).encode()]
        if size <= WHOLE:
            return [*parts, file.read(WHOLE)]
        header = int.from_bytes(file.read(8), "little")
        parts.append(file.read(min(header, MAX_HEADER_BYTES)))
        for number in range(BLOCKS):
            file.seek((size - BLOCK_BYTES) * number // (BLOCKS - 1))
            parts.append(file.read(BLOCK_BYTES))
    return parts


def _digest(parts: Sequence[bytes]) -> str:
    """Of parts whose ends count."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little"))
        whole.update(part)
    return whole.hexdigest()

"""SHA-256 digests of files, remembered in the user's cache while a file is unchanged.

A file is unchanged while its path, device, inode, size, modification time and change time are the same.
Programs cannot set the change time, so an edit that restores the modification time is detected too. The
record is never stored next to the file, where the author of a model folder could put a false one.
"""

import hashlib
import json
import os
import time
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from kvant.errors import CheckpointError, one_line
from kvant.files import open_file, user_cache
from kvant.private import read_record, write_record

FILE = "digests.json"
SMALL = 2**20  # bytes; hashing a smaller file is as fast as looking up its digest
MOST_FILES = 2**11  # the record has at most this many digests, the newest ones
MAX_BYTES = 2**20  # limit of the record; MOST_FILES digests take less
# A digest is remembered only if the file has been unchanged for this long. Another change within the same
# tick of the file system's clock would not change its times.
SETTLED_NS = 10**8
SETTLED_COARSE_NS = 2 * 10**9  # for file systems that count whole seconds


class FileState(NamedTuple):
    """Properties that change with a file's content; times are in nanoseconds."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int


NO_FILE = FileState(0, 0, 0, 0, 0)


def state_of(path: Path) -> FileState:
    """Return the state of a file, or :data:`NO_FILE` if it does not exist."""
    try:
        return _state(os.stat(path))
    except (OSError, ValueError):
        return NO_FILE


def file_sha256(path: Path, expected: FileState | None = None) -> str:
    """Return the digest of a file in a model folder as 64 hexadecimal digits, from the record if possible.

    Args:
        path: a file that :func:`kvant.files.open_file` opens.
        expected: the result of :func:`state_of` before the file was used; None accepts any state.

    Raises:
        CheckpointError: the file cannot be read, its state is not ``expected``, or it changes meanwhile.
    """
    with open_file(path, error=CheckpointError) as file:
        state = _state(os.fstat(file.fileno()))
        changed = CheckpointError(f"{path}: changed since it was read; load the model again")
        if expected is not None and state != expected:
            raise changed
        digest = _remembered().get(_key(path, state)) if state.size > SMALL else None
        if digest is None:
            try:
                digest = hash_file(path, file)
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read: {one_line(error)}") from error
        if _state(os.fstat(file.fileno())) != state:
            raise changed
    return digest


def hash_file(path: Path, file: BufferedReader) -> str:
    """Read an open file to its end; remember and return its digest as 64 hexadecimal digits.

    Args:
        path: the name under which the digest is remembered.
        file: open for reading, at its beginning.

    Raises:
        OSError: the file cannot be read.
    """
    state = _state(os.fstat(file.fileno()))
    age_ns = time.time_ns() - state.changed
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    has_coarse_times = state.changed % 10**9 == 0
    if state.size > SMALL and age_ns >= (SETTLED_COARSE_NS if has_coarse_times else SETTLED_NS):
        known = _remembered()
        known[_key(path, state)] = digest
        write_record(_path(), dict([*known.items()][-MOST_FILES:]))
    return digest


def _path() -> Path:
    return user_cache() / FILE


def _state(status: os.stat_result) -> FileState:
    return FileState(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _key(path: Path, state: FileState) -> str:
    return hashlib.sha256(json.dumps([os.path.realpath(path), *state]).encode()).hexdigest()


def _remembered() -> dict[str, str]:
    """Return the recorded digests by :func:`_key`; none if other users can write to the record."""
    read = read_record(_path(), MAX_BYTES)
    if not isinstance(read, dict) or not all(isinstance(digest, str) for digest in read.values()):
        return {}
    return read

"""SHA-256 digests of files, remembered in the user's cache for as long as a file is unchanged.

A file is unchanged while its path, device, inode, size, time of modification and time of change are the same. No
program can set the last of them, so an edit that restores the time of modification is noticed too. The record is never
beside the file: whoever made a model's folder could put a false one there.
"""

import contextlib
import hashlib
import json
import os
import time
from io import BufferedReader
from pathlib import Path

from kvant.atomic import atomic_file
from kvant.errors import CheckpointError, one_line
from kvant.files import open_file, read_own, user_cache

FILE = "digests.json"
SMALL = 2**20  # bytes of a file that is hashed as fast as it is looked up
MOST_FILES = 2**11  # the last ones are kept
MAX_BYTES = 2**20  # more than all of these take
SETTLED_NS = 10**8  # after a change, before which another one could have the same time
SETTLED_COARSE_NS = 2 * 10**9  # where a file system counts whole seconds

FileState = tuple[int, ...]  # (): there is no file


def state_of(path: Path) -> FileState:
    """What changes when a file does; (): there is none."""
    try:
        return _state(os.stat(path))
    except (OSError, ValueError):
        return ()


def file_sha256(path: Path, state: FileState | None = None) -> str:
    """Return the digest of a file of a model folder, 64 hexadecimal digits. It is computed unless it is remembered.

    Args:
        path: a file that :func:`kvant.files.open_file` opens.
        state: what :func:`state_of` returned before the file was read; None: any.

    Raises:
        CheckpointError: the file cannot be read, or was changed since or meanwhile.
    """
    with open_file(path, error=CheckpointError) as file:
        now = _state(os.fstat(file.fileno()))
        digest = ""
        try:
            if state in (None, now):
                digest = (now[2] > SMALL and _remembered().get(_key(path, now))) or hash_file(path, file)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {one_line(error)}") from error
        if not digest or _state(os.fstat(file.fileno())) != now:
            raise CheckpointError(f"{path}: changed since it was read; load the model again")
    return digest


def hash_file(path: Path, file: BufferedReader) -> str:
    """Return the digest of an open file, which is read whole, and remember it."""
    state = _state(os.fstat(file.fileno()))
    age_ns = time.time_ns() - state[-1]
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    # A change within the same tick of the file system's clock would not be noticed later.
    if state[2] > SMALL and age_ns >= (SETTLED_NS if state[-1] % 10**9 else SETTLED_COARSE_NS):
        known = _remembered()
        known[_key(path, state)] = digest
        with contextlib.suppress(OSError):  # a full disk, a folder that cannot be written: it is hashed again
            _path().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with atomic_file(_path()) as record:
                record.write(json.dumps(dict([*known.items()][-MOST_FILES:]), indent=0).encode())
    return digest


def _path() -> Path:
    return user_cache() / FILE


def _state(found: os.stat_result) -> FileState:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _key(path: Path, state: FileState) -> str:
    return hashlib.sha256(json.dumps([os.path.realpath(path), *state]).encode()).hexdigest()


def _remembered() -> dict[str, str]:
    """The digests by :func:`_key`; none if the record is not this user's alone."""
    read = read_own(_path(), MAX_BYTES)
    return read if isinstance(read, dict) and all(isinstance(digest, str) for digest in read.values()) else {}

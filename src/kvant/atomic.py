"""Write a file completely or not at all: write under another name, sync, rename."""

import contextlib
import errno
import fcntl
import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

SUFFIX = ".partial"


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file, readable only by its owner, that replaces ``path`` when the block ends.

    On an error the new file is removed and ``path`` is untouched. A killed process leaves
    ``.<name>.<digits>.partial``, which the next process that writes ``path`` removes.
    """
    if os.path.lexists(path) and not os.path.isfile(path):
        raise OSError("what is there is neither a regular file nor a link to one")
    _remove_abandoned(path)
    new = path.with_name(f"{_prefix(path)}{os.urandom(8).hex()}{SUFFIX}")
    try:
        with open(_create(new), "wb", buffering=1024 * 1024) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError, ValueError):
            os.unlink(new)
        raise
    _sync_folder(path.parent)


def _create(path: Path) -> int:
    """Create a file and lock it until it is closed, so that nobody removes it as abandoned."""
    while True:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        # on a file system without locks nothing is ever removed as abandoned
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # it was removed as abandoned before it was locked


def _remove_abandoned(path: Path) -> None:
    """Remove what killed processes left of earlier attempts, recognizable by free locks."""
    for abandoned in path.parent.glob(f"{glob.escape(_prefix(path))}{'[0-9a-f]' * 16}{SUFFIX}"):
        with contextlib.suppress(OSError):
            descriptor = os.open(abandoned, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(abandoned)
            finally:
                os.close(descriptor)


def _prefix(path: Path) -> str:
    return f".{path.name[:50]}."  # names are limited to 255 bytes


def _sync_folder(folder: Path) -> None:
    """Sync the new name to disk; file systems that cannot sync folders do that themselves."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)

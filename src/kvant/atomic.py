"""A file that is there whole or not at all: written beside its name, synced, renamed."""

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
    """A new file, for its owner only. It takes the name ``path`` when the block ends, in place of what is
    there.

    After an error the new file is gone and what was there is untouched. A process that is killed leaves the
    new file, ``.<name>.<digits>.partial``; the next one that writes the same name removes it.
    """
    if os.path.lexists(path) and not os.path.isfile(path):
        raise OSError("what is there is neither a regular file nor a link to one")
    _remove_abandoned(path)
    part = path.with_name(f"{_prefix(path)}{os.urandom(8).hex()}{SUFFIX}")
    try:
        with open(_create(part), "wb", buffering=1024 * 1024) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError, ValueError):
            os.unlink(part)
        raise
    _sync_folder(path.parent)


def _create(part: Path) -> int:
    """A new file, locked until it is closed: whoever looks for abandoned files leaves it alone."""
    while True:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        # a file system without locks: then nothing is taken for abandoned either
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # it was taken for abandoned before it was locked


def _remove_abandoned(path: Path) -> None:
    """Remove what a killed process left of an earlier attempt: nobody holds its lock."""
    for part in path.parent.glob(f"{glob.escape(_prefix(path))}{'[0-9a-f]' * 16}{SUFFIX}"):
        with contextlib.suppress(OSError):
            descriptor = os.open(part, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(part)
            finally:
                os.close(descriptor)


def _prefix(path: Path) -> str:
    return f".{path.name[:50]}."  # a name has 255 bytes at most


def _sync_folder(folder: Path) -> None:
    """Have the new name on the disk too; a file system that does not sync folders does it by itself."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)

"""Files that only this user may change, so that their content can be trusted: libraries and records."""

import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from kvant.atomic import atomic_file

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS_USE = stat.S_IRWXG | stat.S_IRWXO


def is_private(state: os.stat_result, others: int = OTHERS_WRITE) -> bool:
    """Return whether a file or folder is this user's, and nobody else has one of the rights ``others``."""
    return state.st_uid == os.geteuid() and not state.st_mode & others


def open_private(path: str | Path, folder: int | None = None) -> int | None:
    """Open a regular file that only this user may change, for reading. A pipe does not block.

    Args:
        path: of the file.
        folder: the descriptor of the folder that a relative path begins at; None: the current folder.

    Returns:
        a descriptor; None: what is there is no such file.

    Raises:
        OSError: it cannot be opened; a link is not followed.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    state = os.fstat(descriptor)
    if stat.S_ISREG(state.st_mode) and is_private(state):
        return descriptor
    os.close(descriptor)
    return None


def read_record(path: Path, limit: int) -> Any:
    """Return the JSON of a record, or None if it is missing, cut, over ``limit`` bytes or not private."""
    try:
        descriptor = open_private(path)
        if descriptor is None:
            return None
        with open(descriptor, "rb") as file:
            return json.loads(file.read(limit))
    except (OSError, ValueError, RecursionError):
        return None


def write_record(path: Path, record: object) -> None:
    """Write JSON in place of a record. If the disk is full or read-only, what is there stays."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic_file(path) as file:
            file.write(json.dumps(record, indent=1).encode())

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
    """Whether this user owns a file or folder, and nobody else has one of the rights ``others``."""
    return state.st_uid == os.geteuid() and not state.st_mode & others


def open_private(path: str | Path, folder: int | None = None) -> int | None:
    """Open a regular file for reading if only this user may change it. A pipe does not block.

    Args:
        path: the file.
        folder: a descriptor of the folder to which a relative path belongs; None: the current folder.

    Returns:
        A descriptor, or None if the file is not regular or not private.

    Raises:
        OSError: the file cannot be opened, or is a link.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    state = os.fstat(descriptor)
    if stat.S_ISREG(state.st_mode) and is_private(state):
        return descriptor
    os.close(descriptor)
    return None


def read_record(path: Path, limit: int) -> Any:
    """Return the JSON of a record, or None if it is missing, malformed, too long or not private."""
    try:
        descriptor = open_private(path)
        if descriptor is None:
            return None
        with open(descriptor, "rb") as file:
            return json.loads(file.read(limit))
    except (OSError, ValueError, RecursionError):
        return None


def write_record(path: Path, record: object) -> None:
    """Replace a record with JSON. If the disk is full or read-only, the old one stays."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic_file(path) as file:
            file.write(json.dumps(record, indent=1).encode())

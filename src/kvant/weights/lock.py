"""The record of pulled and verified files: one JSON file a repository, in the user's cache.

A commit without an entry is not loaded. So a pull that was cut short, or that brought wrong files, leaves nothing that
could be loaded.
"""

import errno
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvant.errors import WeightsError
from kvant.files import user_cache
from kvant.weights.reference import COMMIT, REPOSITORY, is_revision

FORMAT = 1
RECORD = "kvant"  # the name of huggingface_hub's lock that is held while the record is written
DEFAULT_BRANCH = ""  # the pin of a repository without a revision


@dataclass(frozen=True, slots=True)
class Verified:
    """A file as it was when its digest was computed; while size and time stay, it counts as unchanged."""

    bytes: int
    mtime_ns: int
    sha256: str


@dataclass(slots=True)
class Lock:
    """The record of a repository.

    Attributes:
        pins: revision as it was written (DEFAULT_BRANCH: none) -> its commit when it was pulled.
        snapshots: commit -> its files by name, all of them verified.
    """

    repository: str
    pins: dict[str, str] = field(default_factory=dict)
    snapshots: dict[str, dict[str, Verified]] = field(default_factory=dict)


def read_lock(repository: str) -> Lock:
    """The record of a repository; an empty lock if there is none.

    Raises:
        WeightsError: a file that cannot be read, or that kvant did not write.
    """
    path = _path(repository)
    try:
        lock = _parse(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return Lock(repository)
    except OSError as error:
        raise WeightsError(f"{path}: the record of what was pulled cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{path}: not a lock that kvant wrote; remove it and pull {repository} again") from error
    if lock.repository != repository:  # on a disk that does not tell capital letters from small ones
        raise WeightsError(f"{path}: the lock of {lock.repository!r}; expected {repository!r}")
    return lock


def read_locks() -> Iterator[Lock]:
    """Every repository's lock, by name."""
    for path in sorted(_folder().glob("*.json")):
        yield read_lock(path.stem.replace("--", "/"))


def check_writable() -> None:
    """Find out before a download, rather than after it, that it could not be recorded.

    Raises:
        WeightsError: kvant's cache folder cannot be written.
    """
    folder = _folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise WeightsError(f"{folder}: what is pulled cannot be recorded there: {error.strerror}") from error


def write_lock(lock: Lock) -> None:
    """Record it, at once: another process finds the old record or the new one.

    Raises:
        OSError: the cache folder cannot be written.
    """
    path = _path(lock.repository)
    path.parent.mkdir(parents=True, exist_ok=True)
    snapshots = {
        commit: {
            name: {"bytes": file.bytes, "mtime_ns": file.mtime_ns, "sha256": file.sha256}
            for name, file in sorted(files.items())
        }
        for commit, files in sorted(lock.snapshots.items())
    }
    record = {"format": FORMAT, "repository": lock.repository, "pins": lock.pins, "snapshots": snapshots}
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")  # its mode is 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise


def remove_lock(repository: str) -> None:
    """Take a repository's record away; what it listed is loaded no more."""
    _path(repository).unlink(missing_ok=True)


def _folder() -> Path:
    return user_cache() / "weights"


def _path(repository: str) -> Path:
    return _folder() / f"{repository.replace('/', '--')}.json"


def _parse(record: Mapping[str, Any]) -> Lock:
    """The lock, with all names checked: each becomes part of a path."""
    repository, pins, snapshots = record["repository"], record["pins"], record["snapshots"]
    commits = [*pins.values(), *snapshots]
    if record["format"] != FORMAT or not REPOSITORY.fullmatch(repository) or not all(map(COMMIT.fullmatch, commits)):
        raise ValueError("of another format")
    if not all(pin == DEFAULT_BRANCH or is_revision(pin) for pin in pins):
        raise ValueError("not a revision")
    return Lock(
        repository,
        dict(pins),
        {commit: {name: _verified(name, file) for name, file in files.items()} for commit, files in snapshots.items()},
    )


def _verified(name: str, file: Mapping[str, Any]) -> Verified:
    if name != os.path.basename(name) or name in ("", ".", ".."):
        raise ValueError("not a file's name")
    return Verified(int(file["bytes"]), int(file["mtime_ns"]), str(file["sha256"]))

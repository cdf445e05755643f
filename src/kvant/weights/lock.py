"""The record of pulled and verified files: one JSON file per repository, in the user's cache.

A commit without an entry is not loaded, so an interrupted pull, or one of wrong files, leaves nothing
loadable. Pins are stored here and not in the hub's refs/, which any downloading program moves to a branch's
current commit.
"""

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvant.atomic import atomic_file
from kvant.errors import WeightsError
from kvant.files import user_cache
from kvant.weights.reference import COMMIT, REPOSITORY, is_revision
from kvant.weights.snapshot import POOLING, Verified, cache_folder, repository_folder

FORMAT = 1
DEFAULT_BRANCH = ""  # the pin of a repository without a revision


@dataclass(slots=True)
class Lock:
    """The record of a repository.

    Attributes:
        pins: revision as the user wrote it (DEFAULT_BRANCH: none) -> its commit when it was pulled.
        snapshots: commit -> its files by name, all verified.
    """

    repository: str
    pins: dict[str, str] = field(default_factory=dict)
    snapshots: dict[str, dict[str, Verified]] = field(default_factory=dict)


def read_lock(repository: str) -> Lock:
    """Read a repository's record; empty if there is none. One that kvant did not write is refused."""
    path = _path(repository)
    try:
        lock = _parse(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return Lock(repository)
    except OSError as error:
        raise WeightsError(f"{path}: the record of pulled files cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(
            f"{path}: not a lock that kvant wrote; remove it and pull {repository} again"
        ) from error
    if lock.repository != repository:  # on a disk that ignores case
        raise WeightsError(f"{path}: the lock of {lock.repository!r}; expected {repository!r}")
    return lock


def read_locks() -> Iterator[Lock]:
    """Yield every repository's lock, by name."""
    for path in sorted(_folder().glob("*.json")):
        yield read_lock(path.stem.replace("--", "/"))


@contextmanager
def locked(repository: str, name: str = "kvant") -> Iterator[None]:
    """Lock a repository's record, or its blob ``name``, against other processes."""
    from huggingface_hub.utils import WeakFileLock

    place = cache_folder() / ".locks" / repository_folder(repository).name / f"{name}.lock"
    place.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(place):
        yield


def check_writable() -> None:
    """Raise before a download if it could not be recorded."""
    folder = _folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise WeightsError(f"{folder}: pulled files cannot be recorded there: {error.strerror}") from error


def write_lock(lock: Lock) -> None:
    """Replace the record atomically, or remove it if it has become empty."""
    path = _path(lock.repository)
    if not lock.snapshots:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(json.dumps({"format": FORMAT} | asdict(lock), indent=1, sort_keys=True).encode())


def _folder() -> Path:
    return user_cache() / "weights"


def _path(repository: str) -> Path:
    return _folder() / f"{repository.replace('/', '--')}.json"


def _parse(record: Mapping[str, Any]) -> Lock:
    """Parse a lock and check all names, since each becomes part of a path."""
    repository = record["repository"]
    pins = record["pins"]
    snapshots = record["snapshots"]
    commits = [*pins.values(), *snapshots]
    if (
        record["format"] != FORMAT
        or not REPOSITORY.fullmatch(repository)
        or not all(map(COMMIT.fullmatch, commits))
    ):
        raise ValueError("another format")
    if not all(pin == DEFAULT_BRANCH or is_revision(pin) for pin in pins):
        raise ValueError("not a revision")
    return Lock(
        repository,
        dict(pins),
        {
            commit: {name: _verified(name, file) for name, file in files.items()}
            for commit, files in snapshots.items()
        },
    )


def _verified(name: str, file: Mapping[str, Any]) -> Verified:
    if (name != os.path.basename(name) and not POOLING.fullmatch(name)) or name in ("", ".", ".."):
        raise ValueError("not a file's name")
    return Verified(int(file["bytes"]), int(file["mtime_ns"]), str(file["sha256"]))

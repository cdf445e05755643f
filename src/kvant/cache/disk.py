"""A bounded folder of named files in the user's cache, written by a background thread."""

import errno
import fcntl
import hashlib
import logging
import math
import os
import re
import stat
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kvant.errors import SnapshotError, one_line
from kvant.private import OTHERS_USE, is_private, open_private
from kvant.sizes import format_bytes

logger = logging.getLogger("kvant.cache")

DEFAULT_BYTES = 20_000_000_000
QUEUE_BYTES = 128 << 20  # maximum that is queued for writing; further files are dropped
BLOCK = 4096  # allocation unit of a file system
RETRY_S = 30.0  # pause after a disk error before writing again
TURN_S = 1.0  # time that a process keeps the folder locked while it writes, so that others can follow
LOCK = "kvant-disk-cache.lock"
LOCK_TEXT = b"kvant disk cache\n"  # start of the lock file; the id of the last writer follows
LOCK_RETRY_S = 0.02  # between two attempts to lock the folder
CLOSED_LOCK_S = 1.0  # how long a closed cache tries to lock the folder for its last files
FILE = re.compile(r"[0-9a-f]{64}\.kv")
PARTIAL = re.compile(r"[0-9a-f]{64}\.kv\.part")
DIGEST_BYTES = 32
WRITER_BYTES = 16


@dataclass(slots=True)
class DiskCounts:
    """The contents of a folder, and counts since it was opened."""

    bytes: int = 0  # of its files now
    files: int = 0
    hits: int = 0  # files read
    written: int = 0  # files written
    dropped: int = 0  # files not written: the queue or the hour's bytes were used up, or the disk failed


class DiskCache:
    """A folder of files that several processes may use. Files that are altered or truncated are removed.

    The files never take more than ``max_bytes``: the least recently used are removed before another one is
    written. At most as many bytes are written per hour, to spare the disk. One process writes at a time.
    """

    def __init__(self, folder: str | Path, max_bytes: int = DEFAULT_BYTES) -> None:
        """Open or create a folder for its owner only; raise a SnapshotError if others can use it."""
        if type(max_bytes) is not int or max_bytes < BLOCK:
            raise ValueError(f"max_bytes is {max_bytes!r}; expected an int of at least {BLOCK}")
        self.folder = Path(os.path.abspath(os.path.expanduser(folder)))
        self.max_bytes = max_bytes
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = os.stat(self.folder)
            if not is_private(state, OTHERS_USE):
                raise SnapshotError(
                    f"{folder}: a folder of user {state.st_uid} with mode {stat.S_IMODE(state.st_mode):o}; "
                    "expected one that only its owner can open (chmod 700): it will hold what clients wrote"
                )
            self._lock_file = _open_lock(self.folder / LOCK)
        except (OSError, ValueError) as error:
            raise SnapshotError(f"{folder}: no folder for a disk cache: {one_line(error)}") from error
        self._writer = LOCK_TEXT + os.urandom(WRITER_BYTES)  # in the lock file if this cache wrote last
        self._changed = threading.Condition()
        # bytes and time of the last use, least recently used first
        self._files: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._waiting: dict[str, bytes] = {}
        self._jobs: deque[str | Sequence[str]] = deque()  # a file to write, or files that were used
        self._counts = DiskCounts()
        self._allowed = float(max_bytes)  # bytes that may still be written
        self._seen = time.monotonic()  # when these were updated
        self._paused_until = 0.0
        self._said = ""
        self._closed = False
        try:
            self._scan()
        except OSError as error:
            os.close(self._lock_file)
            raise SnapshotError(f"{folder}: cannot be read: {one_line(error)}") from error
        self._jobs.append(())  # removes files above the limit
        self._thread = threading.Thread(target=self._write_jobs, name="kvant disk cache", daemon=True)
        self._thread.start()

    def __contains__(self, name: str) -> bool:
        return name in self._files or name in self._waiting

    @property
    def counts(self) -> DiskCounts:
        """Return the current counts, in any thread."""
        with self._changed:
            return replace(self._counts, files=len(self._files))

    def describe(self) -> str:
        """Return a line with the folder, its number of files and their size."""
        now = self.counts
        return (
            f"{self.folder}: {now.files} files, {format_bytes(now.bytes)} of {format_bytes(self.max_bytes)}"
        )

    def put(self, name: str, size: int, contents: Callable[[], bytes]) -> None:
        """Queue a file for writing unless it exists. Never waits.

        Args:
            size: the approximate number of bytes.
            contents: returns the bytes; it is called now, or not at all.
        """
        with self._changed:
            if self._closed or name in self:
                return
            waiting = sum(map(len, self._waiting.values()))
            if waiting + size > QUEUE_BYTES or size > self.max_bytes or time.monotonic() < self._paused_until:
                self._counts.dropped += 1
                return
        data = contents()
        with self._changed:
            if name not in self:
                self._waiting[name] = data
                self._jobs.append(name)
                self._changed.notify_all()

    def get(self, name: str) -> bytes | None:
        """Return the contents of a file, or None if it does not exist. Removes one with a wrong digest."""
        with self._changed:
            data = self._waiting.get(name)
        if data is None:
            try:
                data = self._read(name)
            except OSError as error:
                if not isinstance(error, FileNotFoundError):
                    self._say(error)
                with self._changed:
                    self._forget(name)
                return None
            if data[:DIGEST_BYTES] != _digest(name, memoryview(data)[DIGEST_BYTES:]):
                self.remove(name)
                return None
            data = data[DIGEST_BYTES:]
        with self._changed:
            self._counts.hits += 1
        return data

    def remove(self, name: str) -> None:
        """Remove an unusable file."""
        with self._changed:
            self._forget(name)
        with suppress(OSError):
            os.unlink(self._path(name))

    def used(self, names: Sequence[str]) -> None:
        """Note that files were used; the first one stays longest."""
        with self._changed:
            if not self._closed:
                self._jobs.append(tuple(names))
                self._changed.notify_all()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything is written or dropped; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Accept no more files; the first call waits up to ``timeout`` seconds until the rest is written."""
        with self._changed:
            if self._closed:
                timeout = 0.0
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout)
        if not self._thread.is_alive() and self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.kv"

    def _read(self, name: str) -> bytes:
        """Return the bytes of a file; empty if it is unusable."""
        descriptor = open_private(self._path(name))
        if descriptor is None:
            return b""
        with open(descriptor, "rb") as file:
            is_too_long = os.fstat(descriptor).st_size > QUEUE_BYTES + DIGEST_BYTES
            return b"" if is_too_long else file.read()

    def _write_jobs(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
            try:
                with self._locked_folder():
                    until = time.monotonic() + TURN_S
                    while self._jobs and time.monotonic() < until:
                        self._do(self._jobs[0])
                        with self._changed:
                            self._jobs.popleft()
                            self._changed.notify_all()
                if self._jobs:
                    time.sleep(2 * LOCK_RETRY_S)  # long enough for another process to lock the folder
            except OSError as error:  # a full disk, or a folder that was removed or became read-only
                self._say(error)
                with self._changed:
                    self._counts.dropped += len(self._waiting)
                    self._waiting.clear()
                    self._jobs.clear()
                    self._paused_until = time.monotonic() + RETRY_S
                    self._changed.notify_all()

    @contextmanager
    def _locked_folder(self) -> Iterator[None]:
        """Lock the folder, and update the list of files if another process wrote since."""
        self._lock()
        try:
            if not os.fstat(self._lock_file).st_nlink:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.folder))
            if os.pread(self._lock_file, len(self._writer), 0) != self._writer:
                self._scan(is_locked=True)
                os.pwrite(self._lock_file, self._writer, 0)
            self._make_room(0)
            yield
        finally:
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    def _lock(self) -> None:
        """Wait for the lock on the folder; once the cache is closed, at most ``CLOSED_LOCK_S`` seconds."""
        deadline = math.inf
        while True:
            try:
                fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if self._closed:
                    deadline = min(deadline, time.monotonic() + CLOSED_LOCK_S)
                if time.monotonic() >= deadline:
                    path = str(self.folder / LOCK)
                    raise BlockingIOError(errno.EAGAIN, "another process holds it", path) from None
            time.sleep(LOCK_RETRY_S)

    def _scan(self, *, is_locked: bool = False) -> None:
        """List the existing files; with the folder locked, remove half-written ones."""
        files = []
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):
                if entry.is_dir(follow_symlinks=False):
                    continue  # not kvant's, whatever its name
                if is_locked and PARTIAL.fullmatch(entry.name):
                    os.unlink(entry.path)
                elif FILE.fullmatch(entry.name):
                    state = entry.stat(follow_symlinks=False)
                    files.append((state.st_mtime_ns, entry.name.removesuffix(".kv"), _on_disk(state.st_size)))
        with self._changed:
            self._files = OrderedDict((name, (size, used)) for used, name, size in sorted(files))
            self._counts.bytes = sum(size for _, _, size in files)

    def _make_room(self, size: int) -> None:
        """Remove files until ``size`` bytes fit, those least recently used by any process first."""
        while self._counts.bytes + size > self.max_bytes and self._files:
            name, (_, known) = next(iter(self._files.items()))
            with suppress(FileNotFoundError):
                state = os.lstat(self._path(name))
                if state.st_mtime_ns > known:
                    self._note(name, state.st_mtime_ns)
                    continue
                if not stat.S_ISDIR(state.st_mode):
                    os.unlink(self._path(name))
            with self._changed:
                self._forget(name)

    def _do(self, job: str | Sequence[str]) -> None:
        """Write a queued file unless the hour's bytes are used up, or note which files were used."""
        if not isinstance(job, str):
            for name in reversed(job):
                with suppress(FileNotFoundError):
                    self._note(name, time.time_ns(), is_new=True)
            return
        data = self._waiting[job]
        size = _on_disk(DIGEST_BYTES + len(data))
        now = time.monotonic()
        self._allowed = min(self.max_bytes, self._allowed + (now - self._seen) * self.max_bytes / 3600)
        self._seen = now
        is_allowed = size <= self._allowed and not self._is_blocked(job)
        if is_written := is_allowed and job not in self._files:
            self._make_room(size)
            self._write(self._path(job), (_digest(job, data), data))
            self._allowed -= size
        with self._changed:
            del self._waiting[job]
            self._counts.dropped += not is_allowed
            if is_written:
                self._counts.written += 1
                self._files[job] = size, time.time_ns()
                self._counts.bytes += size

    def _is_blocked(self, name: str) -> bool:
        """Return whether a folder has the name of the file to write; if so, log it."""
        path = self._path(name)
        for place in (path, _partial_path(path)):
            if place.is_dir() and not place.is_symlink():
                self._say(IsADirectoryError(errno.EISDIR, "a folder in the place of a file", str(place)))
                return True
        return False

    def _write(self, path: Path, parts: Sequence[bytes]) -> None:
        """Write a file, then rename it. A power loss may truncate it, which its digest reveals."""
        partial = _partial_path(path)
        try:
            with suppress(FileNotFoundError):
                os.unlink(partial)  # it may be a pipe, and opening that would block
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(partial, flags, 0o600), "wb") as file:
                file.writelines(parts)
            os.replace(partial, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(partial)
            raise

    def _note(self, name: str, used: int, *, is_new: bool = False) -> None:
        """Note that a file was used last; ``is_new``: tell other processes by its modification time."""
        if name in self._files:
            if is_new:
                os.utime(self._path(name), ns=(used, used), follow_symlinks=False)
            with self._changed:
                if name in self._files:
                    self._files[name] = self._files[name][0], used
                    self._files.move_to_end(name)

    def _forget(self, name: str) -> None:
        size, _ = self._files.pop(name, (0, 0))
        self._counts.bytes -= size

    def _say(self, error: OSError) -> None:
        if (said := one_line(error)) != self._said:
            self._said = said
            logger.warning("disk cache: %s; answers go on without it", said)


def _open_lock(path: Path) -> int:
    """Open the lock file of a folder, or create it; raise a SnapshotError for a file that is not kvant's."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    state = os.fstat(descriptor)
    if stat.S_ISREG(state.st_mode):
        is_new = state.st_size == 0
        size = len(LOCK_TEXT) + WRITER_BYTES
        if is_new or (state.st_size == size and os.pread(descriptor, size, 0).startswith(LOCK_TEXT)):
            return descriptor
    os.close(descriptor)
    raise SnapshotError(f"{path}: not kvant's lock file; remove it or choose another folder")


def _partial_path(path: Path) -> Path:
    """Return the path of a file while it is being written."""
    return path.with_name(f"{path.name}.part")


def _digest(name: str, data: bytes | memoryview) -> bytes:
    """Return a digest of the name and the contents, so that a renamed file does not match."""
    whole = hashlib.sha256(name.encode())
    whole.update(data)
    return whole.digest()


def _on_disk(size: int) -> int:
    return -(-size // BLOCK) * BLOCK

"""Bytes under names in a folder of the user's: bounded, and written by a thread that nobody waits for."""

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
QUEUE_BYTES = 128 << 20  # that wait to be written; what comes then is dropped
BLOCK = 4096  # that a file system gives away at a time
RETRY_S = 30.0  # after an error of the disk, until something is written again
TURN_S = 1.0  # that a server writes, where others wait for the folder
LOCK = "kvant-disk-cache.lock"
LOCK_TEXT = b"kvant disk cache\n"  # the lock file begins with it; the id of the last writer follows
LOCK_RETRY_S = 0.02  # between two attempts to lock the folder
CLOSED_LOCK_S = 1.0  # a closed cache tries this long to lock the folder for its last files
FILE = re.compile(r"[0-9a-f]{64}\.kv")
PART = re.compile(r"[0-9a-f]{64}\.kv\.part")
DIGEST_BYTES = 32
WRITER_BYTES = 16


@dataclass(slots=True)
class DiskCounts:
    """What a folder has, and what was done with it since it was opened."""

    bytes: int = 0  # that it has now
    files: int = 0
    hits: int = 0  # files that were read
    written: int = 0  # files that were written
    dropped: int = 0  # times that one was not: for want of room to wait, of the hour's bytes or of a disk


class DiskCache:
    """A folder that several processes may use. A file that is altered, cut or another's counts as none, and
    goes.

    The files are never more than ``max_bytes``: the least recently used go before another one is written. In
    an hour as many bytes are written at most, so that no disk is worn out. One process writes at a time.
    """

    def __init__(self, folder: str | Path, max_bytes: int = DEFAULT_BYTES) -> None:
        """Open or make a folder for its owner alone; a SnapshotError if that fails or it is others' too."""
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
                    f"expected "
                    "one that its owner alone can open (chmod 700): it will hold what clients wrote"
                )
            self._lock_file = _open_lock(self.folder / LOCK)
        except (OSError, ValueError) as error:
            raise SnapshotError(f"{folder}: no folder for a disk cache: {one_line(error)}") from error
        self._writer = LOCK_TEXT + os.urandom(WRITER_BYTES)  # is in the lock file if this cache wrote last
        self._changed = threading.Condition()
        # bytes and time of use, the oldest first
        self._files: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._waiting: dict[str, bytes] = {}
        self._jobs: deque[str | Sequence[str]] = deque()  # a file to write, or files that were used
        self._counts = DiskCounts()
        self._allowed = float(max_bytes)  # bytes that may be written
        self._seen = time.monotonic()  # when these were counted
        self._paused_until = 0.0
        self._said = ""
        self._closed = False
        try:
            self._scan()
        except OSError as error:
            os.close(self._lock_file)
            raise SnapshotError(f"{folder}: cannot be read: {one_line(error)}") from error
        self._jobs.append(())  # what is too much goes
        self._thread = threading.Thread(target=self._write_jobs, name="kvant disk cache", daemon=True)
        self._thread.start()

    def __contains__(self, name: str) -> bool:
        return name in self._files or name in self._waiting

    @property
    def counts(self) -> DiskCounts:
        """What it has and did; any thread may ask."""
        with self._changed:
            return replace(self._counts, files=len(self._files))

    def describe(self) -> str:
        """Where it is and what is in it, in a line."""
        now = self.counts
        return (
            f"{self.folder}: {now.files} files, {format_bytes(now.bytes)} of {format_bytes(self.max_bytes)}"
        )

    def put(self, name: str, size: int, contents: Callable[[], bytes]) -> None:
        """Write a file some time later, unless it is there. Never waits.

        ``size``: bytes of the contents, about, which ``contents`` makes: it is called now, or not at all.
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
        """Return the contents of a file; None if it is not there, or was removed for a wrong digest."""
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
        """Remove a file that nobody can use."""
        with self._changed:
            self._forget(name)
        with suppress(OSError):
            os.unlink(self._path(name))

    def used(self, names: Sequence[str]) -> None:
        """Note that files were used; the first of them stays longest."""
        with self._changed:
            if not self._closed:
                self._jobs.append(tuple(names))
                self._changed.notify_all()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything is written, or dropped. Returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Take nothing more; the first call waits ``timeout`` seconds at most until the rest is written."""
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
        """Return the bytes of a file, or none if nobody can use it."""
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
            except OSError as error:  # a full disk, a folder that went or became read-only
                self._say(error)
                with self._changed:
                    self._counts.dropped += len(self._waiting)
                    self._waiting.clear()
                    self._jobs.clear()
                    self._paused_until = time.monotonic() + RETRY_S
                    self._changed.notify_all()

    @contextmanager
    def _locked_folder(self) -> Iterator[None]:
        """Hold the folder. What others did since it was held last is known inside."""
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
        """Wait until no other process has locked the folder; once the cache is closed, only for a moment."""
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
        """Find the files that are there; the holder of the folder's lock removes half-written ones."""
        found = []
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):
                if entry.is_dir(follow_symlinks=False):
                    continue  # not ours, whatever its name
                if is_locked and PART.fullmatch(entry.name):
                    os.unlink(entry.path)
                elif FILE.fullmatch(entry.name):
                    state = entry.stat(follow_symlinks=False)
                    found.append((state.st_mtime_ns, entry.name.removesuffix(".kv"), _on_disk(state.st_size)))
        with self._changed:
            self._files = OrderedDict((name, (size, used)) for used, name, size in sorted(found))
            self._counts.bytes = sum(size for _, _, size in found)

    def _make_room(self, size: int) -> None:
        """Remove the files that were used least recently, by whatever process, until so many bytes fit."""
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
        """Write a file that waits, unless the hour's bytes are used up; or note which files were used."""
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
        """Return whether a folder has the name that a file would be written under, and log it."""
        path = self._path(name)
        for place in (path, _part(path)):
            if place.is_dir() and not place.is_symlink():
                self._say(IsADirectoryError(errno.EISDIR, "a folder in the place of a file", str(place)))
                return True
        return False

    def _write(self, path: Path, parts: Sequence[bytes]) -> None:
        """Write a file and then name it. After a loss of power it may be cut, which its digest tells."""
        part = _part(path)
        try:
            with suppress(FileNotFoundError):
                os.unlink(part)  # opening a pipe would block
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(part, flags, 0o600), "wb") as file:
                file.writelines(parts)
            os.replace(part, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise

    def _note(self, name: str, used: int, *, is_new: bool = False) -> None:
        """Count a file as the one that was used last; ``is_new``: other processes are to know, too."""
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


def _part(path: Path) -> Path:
    """Return the path of a file while it is written."""
    return path.with_name(f"{path.name}.part")


def _digest(name: str, data: bytes | memoryview) -> bytes:
    """Of contents under their name: another file's are wrong."""
    whole = hashlib.sha256(name.encode())
    whole.update(data)
    return whole.digest()


def _on_disk(size: int) -> int:
    return -(-size // BLOCK) * BLOCK

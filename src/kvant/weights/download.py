"""A file of the hub into huggingface_hub's cache: whole, checked, and resumed where it was cut.

The layout is huggingface_hub's: models--owner--name/blobs/<digest>, and snapshots/<commit>/<name>, a link to it. Every
part of a path is a validated name: the digest is the listing's, and no header of an answer names a file. An unfinished
file lies beside the blob; the next pull goes on from there.
"""

import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from kvant.errors import one_line
from kvant.sizes import format_bytes
from kvant.weights.answer import Answer, AnswerError, StatusError, ask
from kvant.weights.digest import Digest, new_hash
from kvant.weights.settings import cache_folder, links_allowed, repository_folder

ATTEMPTS = 5  # without progress
PROGRESS_BYTES = 1_000_000  # an attempt that brings less made none
WAIT_S = 1.0  # between two attempts
NOT_SATISFIABLE = 416  # there is no such range
RETRIED = (408, 429, 500, 502, 503, 504)
PARTIAL = ".kvant.incomplete"  # ours
ANY_PARTIAL = ".incomplete"  # huggingface_hub's too; no other process can use a killed one's
TRY_S = 0.2  # for a lock before it counts as held
STALE_S = 86_400  # since the last write to a partial file that is not ours
CHUNK_BYTES = 1 << 20
CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")

Say = Callable[[str], None]  # takes a line for a person


class ContentError(AnswerError):
    """Bytes that are not the file. They are removed."""


def download_file(url: str, path: Path, size: int, digest: Digest, say: Say) -> None:
    """Bring one file into its snapshot. A blob of that digest that is here already is linked, not fetched.

    Args:
        path: of the file: models--owner--name/snapshots/<commit>/<name>.
        size: in bytes; never more is written.
        digest: of the content; it names the blob.
        say: called with a line for a person where something happens.

    Raises:
        AnswerError: an answer that is too slow, or not the file.
        StatusError: the hub refuses.
        OSError: the cache cannot be written.
        Exception: of httpx2, where the hub cannot be reached.
    """
    repository = path.parents[2]
    blob = repository / "blobs" / digest.value
    blob.parent.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(repository.name, digest.value, lambda: say(f"waiting for another download of {path.name}")):
        if path.is_file():
            return
        fetched = not blob.is_file()
        if fetched:
            _fetch(url, blob, path.name, size, digest, say)
        _link(blob, path, fetched)


def bytes_here(path: Path, digest: Digest) -> int:
    """How much of a file need not be fetched."""
    blob = path.parents[2] / "blobs" / digest.value
    for place in (blob, blob.with_name(blob.name + PARTIAL)):
        if place.is_file():
            return place.stat().st_size
    return 0


def remove_partials(repository: str) -> None:
    """Remove unfinished downloads of a repository, except where one is at work."""
    blobs = repository_folder(repository) / "blobs"
    with suppress(OSError):
        for path in blobs.iterdir():
            if path.name.endswith(PARTIAL):
                with locked(blobs.parent.name, path.name.removesuffix(PARTIAL)) as ours:
                    if ours:
                        path.unlink(missing_ok=True)
            elif path.name.endswith(ANY_PARTIAL) and time.time() - path.lstat().st_mtime > STALE_S:
                path.unlink(missing_ok=True)


@contextmanager
def locked(folder: str, name: str, waiting: Callable[[], None] | None = None) -> Iterator[bool]:
    """Hold a lock of huggingface_hub's cache, by the name huggingface_hub gives it.

    Args:
        folder: of the repository in the cache.
        name: a blob's digest.
        waiting: called where somebody else holds it, before waiting; None: do not wait, but yield False.
    """
    from filelock import Timeout
    from huggingface_hub.utils import WeakFileLock

    place = cache_folder() / ".locks" / folder / f"{name}.lock"
    place.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        try:
            held.enter_context(WeakFileLock(place, timeout=TRY_S))
        except Timeout:
            if waiting is None:
                yield False
                return
            waiting()
            held.enter_context(WeakFileLock(place))
        yield True


def _fetch(url: str, blob: Path, name: str, size: int, digest: Digest, say: Say) -> None:
    with closing(_Partial(blob.with_name(blob.name + PARTIAL), size, digest)) as partial:
        try:
            _receive_all(url, name, partial, say)
            partial.check()
        except ContentError:
            partial.path.unlink(missing_ok=True)
            raise
        os.replace(partial.path, blob)


def _receive_all(url: str, name: str, partial: "_Partial", say: Say) -> None:
    """Ask until the file is whole; a connection that breaks is made again, from where it broke."""
    from httpx2 import NetworkError, RemoteProtocolError, TimeoutException
    from huggingface_hub.utils import tqdm

    failures = 0
    total, had = partial.size, partial.bytes
    with tqdm(total=total, initial=had, desc=name, unit="B", unit_scale=True, disable=None) as bar:
        while partial.bytes < total:
            had = partial.bytes
            try:
                with ask(url, start=had) as answer:
                    _receive(answer, partial, bar.update)
                return
            except (NetworkError, RemoteProtocolError, TimeoutException, StatusError) as error:
                failures = 0 if partial.bytes - had >= PROGRESS_BYTES else failures + 1
                if isinstance(error, StatusError) and error.status == NOT_SATISFIABLE:
                    raise ContentError("the hub has no more than what is here of it, which is removed") from error
                final = isinstance(error, StatusError) and error.status not in RETRIED
                if final or failures == ATTEMPTS:
                    raise
                say(f"{name}: {one_line(error)}; asking again from {format_bytes(partial.bytes)}")
                time.sleep(WAIT_S)


def _receive(answer: Answer, partial: "_Partial", update: Callable[[int], object]) -> None:
    """Take one answer's body: the rest, or all of it where the server does not send parts."""
    if answer.status == 200 and partial.bytes:
        update(-partial.bytes)
        partial.restart()
    elif answer.status == 206:
        given = answer.headers.get("Content-Range", "")
        expected = (partial.bytes, partial.size - 1, partial.size)
        found = CONTENT_RANGE.fullmatch(given)
        if found is None or tuple(map(int, found.groups())) != expected:
            asked = "bytes {}-{}/{}".format(*expected)
            raise ContentError(f"the hub sends the range {given[:80]!r}; expected {asked!r}; what came is removed")
    for piece in answer.body:
        partial.write(piece)
        update(len(piece))


class _Partial:
    """The beginning of a file, on disk, and the hash of it.

    Attributes:
        bytes: that are here.
        size: of the whole file.
    """

    def __init__(self, path: Path, size: int, digest: Digest) -> None:
        self.path, self.size, self._digest = path, size, digest
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        self._file = os.fdopen(handle, "r+b")
        state = os.fstat(handle)
        if not stat.S_ISREG(state.st_mode):
            self._file.close()
            raise OSError(f"{path}: not a regular file")
        if state.st_size > size:
            self.restart()
            return
        self.bytes, self._hash = 0, new_hash(digest.kind, size)
        while piece := self._file.read(CHUNK_BYTES):
            self.bytes += len(piece)
            self._hash.update(piece)

    def restart(self) -> None:
        """Begin again with nothing."""
        self._file.seek(0)
        self._file.truncate()
        self.bytes, self._hash = 0, new_hash(self._digest.kind, self.size)

    def write(self, piece: bytes) -> None:
        """Append, up to the size of the file.

        Raises:
            ContentError: there is more.
        """
        if self.bytes + len(piece) > self.size:
            raise ContentError(f"the hub sends more than the {self.size} bytes it states; what came is removed")
        self._file.write(piece)
        self._hash.update(piece)
        self.bytes += len(piece)

    def check(self) -> None:
        """Hold it against its size and digest, and see that it is on the disk.

        Raises:
            ContentError: it differs.
        """
        if self.bytes != self.size:
            raise ContentError(f"{self.bytes} bytes; expected {self.size}, as the hub states; what came is removed")
        given = self._hash.hexdigest()
        if given != self._digest.value:
            raise ContentError(f"{self._digest.kind} {given}; expected {self._digest.value}; what came is removed")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Keep the bytes for the next pull; remove an empty file."""
        self._file.close()
        if not self.bytes and self.size:
            self.path.unlink(missing_ok=True)


def _link(blob: Path, path: Path, fetched: bool) -> None:
    """Give a blob its name in the snapshot: by a link, else by moving it, or by a copy where others may use it."""
    path.unlink(missing_ok=True)  # a link whose blob was removed
    if links_allowed():
        try:
            path.symlink_to(os.path.relpath(blob, path.parent))
            return
        except FileExistsError:
            return  # another program was faster
        except OSError:
            pass  # a file system without links
    if fetched:
        os.replace(blob, path)
        return
    scratch = blob.with_name(blob.name + PARTIAL)
    shutil.copyfile(blob, scratch)
    os.replace(scratch, path)


def note_branch(repository: str, branch: str, commit: str) -> None:
    """Tell huggingface_hub which commit a branch is, so that others find it offline. A known commit stays."""
    path = repository_folder(repository) / "refs" / branch
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "x", encoding="ascii") as file:
            file.write(commit)

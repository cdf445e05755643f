"""A commit's folder in huggingface_hub's cache, and the files in it."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from kvant import files
from kvant.errors import WeightsError
from kvant.weights.digest import GIT_BLOB, new_hash
from kvant.weights.lock import Verified
from kvant.weights.settings import repository_folder

SUFFIXES = (".safetensors", ".json", ".jinja", ".tiktoken")
NAMES = ("tokenizer.model", "merges.txt", "vocab.txt")
SECOND_COPY = "consolidated"  # Mistral's own format, all the weights again
TEMPLATES = "additional_chat_templates"  # the one subfolder that a tokenizer's loader reads; it is not pulled
CHUNK_BYTES = 1 << 20


def is_wanted(name: str) -> bool:
    """Whether a repository's file is pulled: weights as safetensors, JSON, tokenizers and templates, all at its top.

    Never a pickle or Python: nothing of a model folder is executed.
    """
    if "/" in name or name.startswith(SECOND_COPY):
        return False
    return name.endswith(SUFFIXES) or name in NAMES


def snapshot_folder(repository: str, commit: str) -> Path:
    """Where huggingface_hub keeps a commit's files."""
    return repository_folder(repository) / "snapshots" / commit


def real_file(folder: Path, name: str) -> Path:
    """The regular file behind a name, by the rules of :func:`kvant.files.open_file`.

    Raises:
        WeightsError: no such file, one elsewhere, or one that is no regular file.
    """
    path = folder / name
    if not path.exists():
        raise WeightsError(f"{path}: no such file; pull it again")
    return files.real_file(path, folder, WeightsError)


def measure(folder: Path, name: str) -> Verified:
    """Read a file whole: its bytes, its time and its digest.

    Raises:
        WeightsError: no such file, one that cannot be read, or one that was written or replaced meanwhile.
    """
    with _unchanging(folder, name) as (file, state):
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Verified(state.st_size, state.st_mtime_ns, digest)


def git_blob_id(folder: Path, name: str) -> str:
    """The id git gives a file's content; errors are those of :func:`measure`."""
    with _unchanging(folder, name) as (file, state):
        found = new_hash(GIT_BLOB, state.st_size)
        while piece := file.read(CHUNK_BYTES):
            found.update(piece)
    return found.hexdigest()


@contextmanager
def _unchanging(folder: Path, name: str) -> Iterator[tuple[BufferedReader, os.stat_result]]:
    """A file and its state. After reading it must still be the same file, with the same size and time."""
    path = folder / name
    try:
        real_file(folder, name)
        with files.open_file(path, folder, WeightsError) as file:
            before = os.fstat(file.fileno())
            yield file, before
            after, there = os.fstat(file.fileno()), real_file(folder, name).stat()
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}") from error
    if not _identity(before) == _identity(after) == _identity(there):
        raise WeightsError(f"{path}: written to or replaced while it was read")


def _identity(state: os.stat_result) -> tuple[int, ...]:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def is_unchanged(folder: Path, name: str, recorded: Verified) -> bool:
    """Whether a file has the size and the time it had when its digest was computed.

    Raises:
        WeightsError: no such file.
    """
    state = real_file(folder, name).stat()
    return (state.st_size, state.st_mtime_ns) == (recorded.bytes, recorded.mtime_ns)


def refuse_others(folder: Path, names: Iterable[str]) -> None:
    """Refuse a file that would be read from the folder and is none of ``names``.

    Raises:
        WeightsError: there is one.
    """
    known = set(names)
    others = sorted(path.name for path in folder.iterdir() if path.name not in known and _is_read(path.name))
    if others:
        raise WeightsError(f"{folder / others[0]}: not among the files that were pulled and verified; remove it")


def _is_read(name: str) -> bool:
    """Whether a loader may read an entry of this name; on some disks capital letters do not count."""
    return is_wanted(name.lower()) or name.lower() == TEMPLATES

"""huggingface_hub's settings and cache, a commit's folder in it, and the files there."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from types import ModuleType

from kvant import files
from kvant.digests import hash_file
from kvant.errors import WeightsError

SUFFIXES = (".safetensors", ".json", ".jinja", ".tiktoken")
NAMES = ("tokenizer.model", "merges.txt", "vocab.txt")
SECOND_COPY = "consolidated"  # Mistral's own format, all the weights again
TEMPLATES = "additional_chat_templates"  # the one subfolder that a tokenizer's loader reads; it is not pulled
CHUNK_BYTES = 1 << 20
# huggingface_hub fails on its import where one is odd
SECONDS = ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT")
MAX_SECONDS = 86_400


@dataclass(frozen=True, slots=True)
class Verified:
    """A file as it was when its digest was computed; while size and time stay, it counts as unchanged."""

    bytes: int
    mtime_ns: int
    sha256: str


def cache_folder() -> Path:
    """The folder of huggingface_hub's downloads: HF_HUB_CACHE, else under HF_HOME, else its default."""
    return Path(constants().HF_HUB_CACHE).expanduser().resolve()


def repository_folder(repository: str) -> Path:
    """A repository's place in that cache."""
    return cache_folder() / f"models--{repository.replace('/', '--')}"


def constants() -> ModuleType:
    """huggingface_hub's own module of settings. The import takes a tenth of a second, so it comes late."""
    for name in SECONDS:
        text = os.environ.get(name)
        if text is not None and not _is_seconds(text):
            raise WeightsError(
                f"{name} is {text[:80]!r}; expected a whole number of seconds, at most {MAX_SECONDS}"
            )
    # it would ask what else runs here, and tell the hub
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import constants as found

    return found


def _is_seconds(text: str) -> bool:
    try:
        return 0 <= int(text) <= MAX_SECONDS
    except ValueError:
        return False


def is_pulled(name: str) -> bool:
    """Whether a repository's file is pulled: weights as safetensors, JSON, tokenizers and templates, all at
    its top.

    Never a pickle or Python: nothing of a model folder is executed.
    """
    if "/" in name or name.startswith(SECOND_COPY):
        return False
    return name.endswith(SUFFIXES) or name in NAMES


def snapshot_folder(repository: str, commit: str) -> Path:
    """Where huggingface_hub keeps a commit's files."""
    return repository_folder(repository) / "snapshots" / commit


def real_file(folder: Path, name: str) -> Path:
    """The regular file behind a name, by the rules of :func:`kvant.files.open_file`."""
    path = folder / name
    if not path.exists():
        raise WeightsError(f"{path}: no such file; pull it again")
    return files.real_file(path, folder, WeightsError)


def measure(folder: Path, name: str) -> Verified:
    """Read a file whole: its bytes, its time and its digest. One that is written to meanwhile is refused."""
    with _unchanging(folder, name) as (file, state):
        digest = hash_file(folder / name, file)
    return Verified(state.st_size, state.st_mtime_ns, digest)


def git_blob_id(folder: Path, name: str) -> str:
    """The id git gives a file's content. Git hashes a header before it.

    Source: https://git-scm.com/book/en/v2/Git-Internals-Git-Objects.
    """
    with _unchanging(folder, name) as (file, state):
        found = hashlib.sha1(b"blob %d\0" % state.st_size, usedforsecurity=False)
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
            after = os.fstat(file.fileno())
            there = real_file(folder, name).stat()
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}") from error
    if not _identity(before) == _identity(after) == _identity(there):
        raise WeightsError(f"{path}: written to or replaced while it was read")


def _identity(state: os.stat_result) -> tuple[int, ...]:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def is_unchanged(folder: Path, name: str, recorded: Verified) -> bool:
    """Whether a file has the size and the time it had when its digest was computed."""
    state = real_file(folder, name).stat()
    return (state.st_size, state.st_mtime_ns) == (recorded.bytes, recorded.mtime_ns)


def refuse_others(folder: Path, names: Iterable[str]) -> None:
    """Refuse a file that would be read from the folder and is none of ``names``."""
    for name in sorted({path.name for path in folder.iterdir()} - set(names)):
        if name.startswith("._"):  # what macOS puts beside a file on a disk that cannot hold its attributes
            continue
        if is_pulled(name.lower()) or name.lower() == TEMPLATES:  # on some disks capital letters do not count
            raise WeightsError(
                f"{folder / name}: not among the files that were pulled and verified; remove it"
            )

"""huggingface_hub's settings and cache, and a commit's folder and files in it."""

import hashlib
import os
import re
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
SECOND_COPY = "consolidated"  # Mistral's own format, which repeats all weights
TEMPLATES = "additional_chat_templates"  # the only subfolder that tokenizers are loaded from; not pulled
# the only file in a subfolder that is pulled: how an embedding model pools, by sentence-transformers
POOLING = re.compile(r"[0-9]{1,2}_[Pp]ooling/config\.json")
CHUNK_BYTES = 1 << 20
# huggingface_hub cannot be imported if one of these is malformed
SECONDS = ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT")
MAX_SECONDS = 86_400


@dataclass(frozen=True, slots=True)
class Verified:
    """A file's state when it was hashed. It counts as unchanged while size and time are the same."""

    bytes: int
    mtime_ns: int
    sha256: str


def cache_folder() -> Path:
    """Return huggingface_hub's cache: HF_HUB_CACHE, else a folder in HF_HOME, else the default."""
    return Path(constants().HF_HUB_CACHE).expanduser().resolve()


def repository_folder(repository: str) -> Path:
    """Return a repository's folder in that cache."""
    return cache_folder() / f"models--{repository.replace('/', '--')}"


def constants() -> ModuleType:
    """Import huggingface_hub's settings late, because that takes a tenth of a second."""
    for name in SECONDS:
        text = os.environ.get(name)
        if text is not None and not _is_seconds(text):
            raise WeightsError(
                f"{name} is {text[:80]!r}; expected a whole number of seconds, at most {MAX_SECONDS}"
            )
    # without this, huggingface_hub would look for what else runs here and tell the hub
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import constants as module

    return module


def _is_seconds(text: str) -> bool:
    try:
        return 0 <= int(text) <= MAX_SECONDS
    except ValueError:
        return False


def is_pulled(name: str) -> bool:
    """Whether kvant pulls a file: safetensors, JSON, tokenizers and templates at the repository's top, and
    the settings of an embedding model's pooling.

    Never a pickle or Python: nothing in a model folder is executed.
    """
    if POOLING.fullmatch(name):
        return True
    if "/" in name or name.startswith(SECOND_COPY):
        return False
    return name.endswith(SUFFIXES) or name in NAMES


def snapshot_folder(repository: str, commit: str) -> Path:
    """Return the folder in which huggingface_hub stores a commit's files."""
    return repository_folder(repository) / "snapshots" / commit


def real_file(folder: Path, name: str) -> Path:
    """Resolve a name to a regular file by the rules of :func:`kvant.files.open_file`."""
    path = folder / name
    if not path.exists():
        raise WeightsError(f"{path}: no such file; pull it again")
    return files.real_file(path, folder, WeightsError)


def measure(folder: Path, name: str) -> Verified:
    """Read a whole file and return its size, time and digest; refuse one that changes meanwhile."""
    with _unchanging(folder, name) as (file, state):
        digest = hash_file(folder / name, file)
    return Verified(state.st_size, state.st_mtime_ns, digest)


def git_blob_id(folder: Path, name: str) -> str:
    """Return git's id of a file's content, which git hashes with a header.

    Source: https://git-scm.com/book/en/v2/Git-Internals-Git-Objects.
    """
    with _unchanging(folder, name) as (file, state):
        digest = hashlib.sha1(b"blob %d\0" % state.st_size, usedforsecurity=False)
        while piece := file.read(CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def _unchanging(folder: Path, name: str) -> Iterator[tuple[BufferedReader, os.stat_result]]:
    """Open a file; afterwards it must still be the same file with the same size and time."""
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
    """Whether a file's size and time are those recorded with its digest."""
    state = real_file(folder, name).stat()
    return (state.st_size, state.st_mtime_ns) == (recorded.bytes, recorded.mtime_ns)


def refuse_others(folder: Path, names: Iterable[str]) -> None:
    """Refuse files in the folder that a loader would read but that are not among ``names``."""
    pooling = {str(path.relative_to(folder)) for path in folder.glob("*_*/config.json")}
    for name in sorted(({path.name for path in folder.iterdir()} | pooling) - set(names)):
        if name.startswith("._"):  # macOS creates these on disks that cannot store its attributes
            continue
        if is_pulled(name.lower()) or name.lower() == TEMPLATES:  # some disks ignore case
            raise WeightsError(
                f"{folder / name}: not among the files that were pulled and verified; remove it"
            )

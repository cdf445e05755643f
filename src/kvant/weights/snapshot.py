"""A commit's folder in huggingface_hub's cache: where it is, and what its files really are."""

import hashlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from kvant.errors import WeightsError
from kvant.weights.lock import Verified

SUFFIXES = (".safetensors", ".json", ".jinja", ".tiktoken")
NAMES = ("tokenizer.model", "merges.txt", "vocab.txt")
SECOND_COPY = "consolidated"  # Mistral's own format, all the weights again


def is_wanted(name: str) -> bool:
    """Whether a repository's file is pulled: weights as safetensors, JSON, tokenizers and templates, all at its top.

    Never a pickle or Python: nothing of a model folder is executed.
    """
    if "/" in name or name.startswith(SECOND_COPY):
        return False
    return name.endswith(SUFFIXES) or name in NAMES


def snapshot_folder(repository: str, commit: str) -> Path:
    """Where huggingface_hub keeps a commit's files: under HF_HUB_CACHE, HF_HOME, or its default."""
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = Path(HF_HUB_CACHE).expanduser().resolve()
    return cache / f"models--{repository.replace('/', '--')}" / "snapshots" / commit


def real_file(folder: Path, name: str) -> Path:
    """The regular file behind a name; symlinks are followed within what the cache itself makes.

    A snapshot's files are links to the repository's blobs, which may be links to blobs that repositories share.

    Raises:
        WeightsError: no such file, one elsewhere, or one that is no regular file.
    """
    path = folder / name
    try:
        real = path.resolve(strict=True)
        roots = (folder, folder.parents[1] / "blobs", folder.parents[2] / "blobs")  # as models.files has them
    except (OSError, RuntimeError) as error:
        raise WeightsError(f"{path}: no such file; pull it again") from error
    if not any(real.is_relative_to(root) for root in roots):
        raise WeightsError(f"{path}: a link to {real}, outside the repository's folder")
    if not stat.S_ISREG(real.stat().st_mode):
        raise WeightsError(f"{path}: not a regular file")
    return real


def measure(folder: Path, name: str) -> Verified:
    """Read a file whole: its bytes, its time and its digest.

    Raises:
        WeightsError: no such file, or one that was written meanwhile.
        OSError: it cannot be read.
    """
    with open(real_file(folder, name), "rb") as file:
        before = os.fstat(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        after = os.fstat(file.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise WeightsError(f"{folder / name}: written to while it was read")
    return Verified(after.st_size, after.st_mtime_ns, digest)


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
    others = sorted(path.name for path in folder.iterdir() if is_wanted(path.name) and path.name not in set(names))
    if others:
        raise WeightsError(f"{folder / others[0]}: not among the files that were pulled and verified; remove it")

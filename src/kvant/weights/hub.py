"""What the hub is asked, through huggingface_hub, and its errors in a line each."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvant.errors import WeightsError, one_line
from kvant.weights.reference import COMMIT
from kvant.weights.snapshot import is_wanted

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

LOG_IN = "`hf auth login` lets you in, if you have access"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FILE_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,200}", re.ASCII)


class UnreachableError(WeightsError):
    """The hub cannot be asked: no network, or its offline mode."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A file as the hub describes it; sha256 where it states one, which it does for large files."""

    bytes: int
    sha256: str | None


@dataclass(frozen=True, slots=True)
class Listing:
    """A commit and those of its files that are pulled, by name."""

    commit: str
    files: dict[str, Listed]


def list_files(repository: str, revision: str | None) -> Listing:
    """What a commit, branch, tag or (None) the default branch holds; nothing is downloaded.

    Raises:
        WeightsError: the hub refuses or cannot be reached, or lists what cannot be.
    """
    with _errors_in_one_line(repository, revision):
        from huggingface_hub import HfApi

        info = HfApi(library_name="kvant").model_info(repository, revision=revision, files_metadata=True, timeout=30)
        siblings, commit = info.siblings or [], info.sha or ""
    if not COMMIT.fullmatch(commit) or (revision and COMMIT.fullmatch(revision) and revision != commit):
        raise WeightsError(f"{repository}: the hub answers for commit {commit[:80]!r}; asked for {revision or 'main'}")
    files = {}
    for file in sorted(siblings, key=lambda file: file.rfilename):
        name = file.rfilename
        if _is_hostile(name) or (is_wanted(name) and not FILE_NAME.fullmatch(name)):
            raise WeightsError(f"{repository}: the hub lists a file named {name[:200]!r}; refused")
        if is_wanted(name):
            if file.size is None:
                raise WeightsError(f"{repository}: the hub states no size of {name}")
            files[name] = Listed(file.size, file.lfs.sha256 if file.lfs else None)
    if "config.json" not in files or not any(name.endswith(".safetensors") for name in files):
        raise WeightsError(f"{repository}: no config.json and safetensors at {commit}; kvant reads nothing else")
    return Listing(commit, files)


def download(repository: str, commit: str, name: str, folder: Path) -> None:
    """Bring one file into ``folder``, its snapshot in huggingface_hub's cache; one that is there stays as it is.

    File by file and in this thread: huggingface_hub's snapshot_download waits for its threads' files when interrupted.

    Raises:
        WeightsError: it cannot be had.
    """
    with _errors_in_one_line(repository, commit, name):
        from huggingface_hub import hf_hub_download

        path = hf_hub_download(repository, name, revision=commit, library_name="kvant")
    if Path(path) != folder / name:
        raise WeightsError(f"{repository}: the hub sent {name} of another commit than {commit}")


def _is_hostile(name: str) -> bool:
    """A name that is no path inside a repository: it would be joined to a folder's."""
    parts = name.split("/")
    return not name.isprintable() or "\\" in name or any(part in ("", ".", "..") for part in parts)


@contextmanager
def _errors_in_one_line(repository: str, revision: str | None, name: str | None = None) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # huggingface_hub, httpx2 and hf_xet share no base
        raise _explained(error, repository, revision, name) from error


def _explained(error: Exception, repository: str, revision: str | None, name: str | None) -> WeightsError:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # why the hub could not be asked for a file
    what = repository if name is None else f"{repository}, {name}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return UnreachableError(f"{what} is not here, and HF_HUB_OFFLINE keeps it from being pulled")
    if isinstance(error, errors.HfHubHTTPError):
        return WeightsError(f"{what}: {_refusal(error, revision)}")
    if isinstance(error, OSError) and error.errno in NO_SPACE:
        return WeightsError(f"{what}: no space for it in {constants.HF_HUB_CACHE}: {error.strerror}")
    if type(error).__module__.split(".")[0] in ("httpx2", "httpcore2"):
        return UnreachableError(f"{what} is not here, and {constants.ENDPOINT} cannot be reached: {one_line(error)}")
    return WeightsError(f"{what}: cannot be pulled: {one_line(error)}")


def _refusal(error: "HfHubHTTPError", revision: str | None) -> str:
    from huggingface_hub import errors

    status = error.response.status_code
    if isinstance(error, errors.GatedRepoError):
        return f"gated ({status}): accept its terms on its page; then {LOG_IN}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"no revision {revision or 'main'!r} ({status})"
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return f"no such file at {revision} ({status})"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"no such repository, or a private one ({status}); {LOG_IN}"
    reasons = {
        401: f"the hub does not accept the login (401); {LOG_IN}",
        403: f"the hub forbids it (403); {LOG_IN}",
        429: "too many requests (429): try again later; who is logged in is allowed more",
    }
    return reasons.get(status, f"the hub answered {status}: {one_line(error)}")

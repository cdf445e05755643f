"""The hub, asked by huggingface_hub: a commit's files into the cache it shares with others. Errors are a line each."""

import errno
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvant.errors import WeightsError, one_line
from kvant.fields import shown
from kvant.weights.reference import COMMIT
from kvant.weights.snapshot import cache_folder, constants, is_wanted, repository_folder

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

LOG_IN = "`hf auth login` lets you in, if you have access"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
STATUSES = {
    401: f"the hub does not accept the login (401); {LOG_IN}",
    403: f"the hub forbids it (403); {LOG_IN}",
    429: "too many requests (429): try again later; who is logged in is allowed more",
}
MAX_FILE_BYTES = 2**40
FILE_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,200}", re.ASCII)
HEXADECIMAL = re.compile("[0-9a-f]+")
STALE_S = 86_400  # since the last write to a partial file: nobody is at work on it


class UnreachableError(WeightsError):
    """The hub cannot be asked: no network, or its offline mode."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A file as the hub describes it. It states no digest of some."""

    bytes: int
    sha256: str | None = None  # of a large file's content
    git_blob: str | None = None  # git's id of any other file's content


@dataclass(frozen=True, slots=True)
class Listing:
    """A commit and those of its files that are pulled, by name."""

    commit: str
    files: dict[str, Listed]


def list_files(repository: str, revision: str | None) -> Listing:
    """The files of a commit, branch, tag or (None) the default branch; nothing is downloaded."""
    with _errors_in_one_line(repository, revision):
        timeout = float(constants().HF_HUB_DOWNLOAD_TIMEOUT)  # before the import, which fails where that is none
        from huggingface_hub import HfApi

        api = HfApi(library_name="kvant")
        found = api.model_info(repository, revision=revision, files_metadata=True, timeout=timeout)
    return _checked(repository, revision, found)


def download(repository: str, commit: str, name: str) -> None:
    """Bring a commit's file into huggingface_hub's cache, unless it is there. What comes is not checked here."""
    with _errors_in_one_line(repository, commit, name):
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import tqdm

        class Bar(tqdm):
            """Has the file's name, and is drawn on the terminal itself: the command's standard error is escaped."""

            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options | {"desc": name, "file": sys.__stderr__})  # type: ignore[no-untyped-call]

        place = cache_folder()
        hf_hub_download(repository, name, revision=commit, cache_dir=place, library_name="kvant", tqdm_class=Bar)


def note_branch(repository: str, branch: str, commit: str) -> None:
    """Tell huggingface_hub which commit a branch is, so that others find it offline. A known commit stays."""
    path = repository_folder(repository) / "refs" / branch
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "x", encoding="ascii") as file:
            file.write(commit)


def remove_partials(repository: str) -> None:
    """Remove what killed downloads left: huggingface_hub never goes on with it."""
    with suppress(OSError):
        for path in (repository_folder(repository) / "blobs").glob("*.incomplete"):
            if time.time() - path.lstat().st_mtime > STALE_S:
                path.unlink(missing_ok=True)


def _checked(repository: str, revision: str | None, found: "ModelInfo") -> Listing:
    """The listing. Nothing in it is believed before it is checked: names become parts of paths."""
    commit, files = found.sha, dict[str, Listed]()
    wanted = revision if revision and COMMIT.fullmatch(revision) else commit
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit) or commit != wanted:
        asked = revision or "main"
        raise WeightsError(f"{repository}: the hub answers for commit {shown(commit)}; asked for {asked}")
    for entry in found.siblings or ():
        name = entry.rfilename
        if isinstance(name, str) and not is_wanted(name):
            continue
        if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
            raise WeightsError(f"{repository}: the hub lists a file named {shown(name)}; refused")
        if any(name.lower() == other.lower() for other in files):  # one file where capital letters do not count
            raise WeightsError(f"{repository}: the hub lists {name} twice")
        if type(entry.size) is not int or not 0 <= entry.size <= MAX_FILE_BYTES:
            expected = f"expected 0 to {MAX_FILE_BYTES} bytes"
            raise WeightsError(f"{repository}: the hub lists {name} with the size {shown(entry.size)}; {expected}")
        what = f"{repository}: the hub lists {name}"
        if entry.lfs is None:
            files[name] = Listed(entry.size, git_blob=_digits(what, "git blob id", entry.blob_id, 40))
        else:  # its blob is a pointer, whose id says nothing of the content
            files[name] = Listed(entry.size, sha256=_digits(what, "sha256", entry.lfs.sha256, 64))
    if "config.json" not in files or not any(name.endswith(".safetensors") for name in files):
        raise WeightsError(f"{repository}: no config.json and safetensors at {commit}; kvant reads nothing else")
    return Listing(commit, dict(sorted(files.items())))


def _digits(what: str, kind: str, value: object, count: int) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or len(value) != count or not HEXADECIMAL.fullmatch(value):
        raise WeightsError(f"{what} with {kind} {shown(value)}; expected {count} hexadecimal digits")
    return value


@contextmanager
def _errors_in_one_line(repository: str, revision: str | None, name: str | None = None) -> Iterator[None]:
    what = repository if name is None else f"{repository}, {name}"
    try:
        yield
    except WeightsError:
        raise
    except Exception as error:  # huggingface_hub, httpx2 and filelock share no base
        from huggingface_hub.errors import LocalEntryNotFoundError

        cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else None
        raise _explained(cause or error, what, revision or "main") from error


def _explained(error: BaseException, what: str, revision: str) -> WeightsError:
    from huggingface_hub import errors

    if isinstance(error, errors.OfflineModeIsEnabled):
        return UnreachableError(f"{what} is not here, and HF_HUB_OFFLINE keeps it from being pulled")
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        if isinstance(error, errors.GatedRepoError):
            said = f"gated ({status}): accept its terms on its page; then {LOG_IN}"
        elif isinstance(error, errors.RevisionNotFoundError):
            said = f"no revision {revision!r} ({status})"
        elif isinstance(error, errors.RemoteEntryNotFoundError):
            said = f"no such file at {revision} ({status})"
        elif isinstance(error, errors.RepositoryNotFoundError):
            said = f"no such repository, or a private one ({status}); {LOG_IN}"
        else:
            said = STATUSES.get(status) or f"the hub answered {status}: {one_line(error)[:200]}"
        return WeightsError(f"{what}: {said}")
    if isinstance(error, OSError) and error.errno in NO_SPACE:
        return WeightsError(f"{what}: no space for it in {cache_folder()}: {error.strerror}")
    if type(error).__module__.split(".")[0] in ("httpx2", "httpcore2"):
        return UnreachableError(f"{what} is not here, and {constants().ENDPOINT} cannot be reached: {one_line(error)}")
    return WeightsError(f"{what}: cannot be pulled: {one_line(error)}")

"""Questions to the hub, and its errors in a line each."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from kvant.errors import WeightsError, one_line
from kvant.weights.answer import AnswerError, StatusError, ask
from kvant.weights.digest import Digest
from kvant.weights.download import Say, download_file
from kvant.weights.listing import Listing, parse_listing
from kvant.weights.settings import cache_folder, endpoint

LOG_IN = "`hf auth login` lets you in, if you have access"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MAX_LISTING_BYTES = 8 * 1024 * 1024  # of some 20,000 files
REFUSALS = {
    "GatedRepo": f"gated ({{status}}): accept its terms on its page; then {LOG_IN}",
    "RevisionNotFound": "no revision {revision!r} ({status})",
    "EntryNotFound": "no such file at {revision} ({status})",
    "RepoNotFound": f"no such repository, or a private one ({{status}}); {LOG_IN}",
    401: f"the hub does not accept the login (401); {LOG_IN}",
    403: f"the hub forbids it (403); {LOG_IN}",
    429: "too many requests (429): try again later; who is logged in is allowed more",
}


class UnreachableError(WeightsError):
    """The hub cannot be asked: no network, or its offline mode."""


def list_files(repository: str, revision: str | None) -> Listing:
    """The files of a commit, branch, tag or (None) the default branch; nothing is downloaded.

    Raises:
        WeightsError: the hub refuses, cannot be reached, or lists something impossible.
    """
    with _errors_in_one_line(repository, revision):
        address = f"{endpoint()}/api/models/{repository}"
        if revision is not None:
            address += f"/revision/{quote(revision, safe='')}"
        data = bytearray()
        with ask(f"{address}?blobs=true") as answer:
            for piece in answer.body:
                data += piece
                if len(data) > MAX_LISTING_BYTES:
                    raise AnswerError(f"the hub's listing has more than {MAX_LISTING_BYTES} bytes")
    return parse_listing(repository, revision, bytes(data))


def download(repository: str, commit: str, path: Path, size: int, digest: Digest, say: Say) -> None:
    """Bring one file into its snapshot in huggingface_hub's cache; one that is there stays as it is.

    Raises:
        WeightsError: it cannot be had, or other bytes came.
    """
    with _errors_in_one_line(repository, commit, path.name):
        download_file(f"{endpoint()}/{repository}/resolve/{commit}/{path.name}", path, size, digest, say)


@contextmanager
def _errors_in_one_line(repository: str, revision: str | None, name: str | None = None) -> Iterator[None]:
    try:
        yield
    except WeightsError:
        raise
    except Exception as error:  # huggingface_hub, httpx2 and filelock share no base
        raise _explained(error, repository, revision, name) from error


def _explained(error: Exception, repository: str, revision: str | None, name: str | None) -> WeightsError:
    from huggingface_hub.errors import OfflineModeIsEnabled

    what = repository if name is None else f"{repository}, {name}"
    if isinstance(error, AnswerError):
        return WeightsError(f"{what}: {error}")
    if isinstance(error, StatusError):
        return WeightsError(f"{what}: {_refusal(error, revision)}")
    if isinstance(error, OSError) and error.errno in NO_SPACE:
        return WeightsError(f"{what}: no space for it in {cache_folder()}: {error.strerror}")
    if isinstance(error, OfflineModeIsEnabled):
        return UnreachableError(f"{what} is not here, and HF_HUB_OFFLINE keeps it from being pulled")
    if type(error).__module__.split(".")[0] in ("httpx2", "httpcore2"):
        return UnreachableError(f"{what} is not here, and {endpoint()} cannot be reached: {one_line(error)}")
    return WeightsError(f"{what}: cannot be pulled: {one_line(error)}")


def _refusal(error: StatusError, revision: str | None) -> str:
    said = REFUSALS.get(error.code) or REFUSALS.get(error.status)
    if said is None:
        return f"the hub answered {error.status}: {one_line(error)[:200]}"
    return said.format(status=error.status, revision=revision or "main")

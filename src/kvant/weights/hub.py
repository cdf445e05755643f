"""The hub, asked through huggingface_hub: a commit's files into the cache it shares with others.

Nothing that a hub sends is believed. Paths are made of the checked names of a listing, and of nothing in a
header. Whatever is read has a limit. Errors are a line each.
"""

import errno
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import quote, urljoin, urlsplit

from kvant.errors import WeightsError, one_line
from kvant.fields import shown
from kvant.weights.lock import locked
from kvant.weights.reference import COMMIT
from kvant.weights.snapshot import cache_folder, constants, is_pulled, repository_folder, snapshot_folder

if TYPE_CHECKING:
    from httpx2 import Response
    from huggingface_hub import HfFileMetadata
    from huggingface_hub.hf_api import ModelInfo

LOG_IN = "`hf auth login` lets you in, if you have access"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
STATUSES = {
    401: f"the hub does not accept the login (401); {LOG_IN}",
    403: f"the hub forbids it (403); {LOG_IN}",
    429: "too many requests (429): try again later; who is logged in is allowed more",
}
HUGGING_FACE = "https://huggingface.co"
MAX_LISTING_BYTES = 8 * 1024 * 1024  # some 30,000 files of a repository, whatever they are
MAX_FILES = 10_000  # to pull; the largest published models have some 200
MAX_FILE_BYTES = 2**40
MAX_REDIRECTS = 10
MAX_FAILURES = 5  # of a transfer, in a row and without a byte that did not come before
RETRY_S = 1.0  # between a failure and the next attempt
FILE_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,200}", re.ASCII)
DIGEST = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")


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
        url = f"{constants().ENDPOINT}/api/models/{repository}"
        if revision is not None:
            url += f"/revision/{quote(revision, safe='')}"
        data = bytearray()
        with _get(f"{url}?blobs=true") as response:
            for piece in response.iter_bytes():
                data += piece
                if len(data) > MAX_LISTING_BYTES:
                    raise ValueError(f"the hub's listing has more than {MAX_LISTING_BYTES} bytes")
        from huggingface_hub.hf_api import ModelInfo

        found = ModelInfo(**json.loads(data))
    return _checked(repository, revision, found)


def download(repository: str, listing: Listing, name: str) -> None:
    """Bring a listed file into huggingface_hub's cache, unless it is there. The caller checks its digest.

    The file's headers are compared with the listing before any of its content is requested.

    Raises:
        WeightsError: the hub refuses, contradicts its listing, or sends another number of bytes.
    """
    path = snapshot_folder(repository, listing.commit) / name
    if path.exists():
        return
    with _errors_in_one_line(repository, listing.commit, name):
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.file_download import are_symlinks_supported

        url = hf_hub_url(repository, name, revision=listing.commit)
        found = get_hf_file_metadata(url, library_name="kvant", retry_on_errors=True)
        digest = _checked_digest(listing, name, found)
        blob = repository_folder(repository) / "blobs" / digest
        place = blob if are_symlinks_supported(cache_folder()) else path
        blob.parent.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(repository, digest):  # huggingface_hub uses the same lock
            if not place.exists():
                for stale in blob.parent.glob(f"{digest}.*.incomplete"):  # of a process that was killed
                    stale.unlink(missing_ok=True)
                part = blob.with_name(f"{digest}.{os.urandom(4).hex()}.incomplete")
                try:
                    _fetch(part, name, listing.files[name].bytes, url, found)
                    part.replace(place)
                finally:
                    part.unlink(missing_ok=True)
            if not path.exists():
                path.unlink(missing_ok=True)  # a link to a blob that is gone
                path.symlink_to(os.path.relpath(blob, path.parent))


def note_branch(repository: str, branch: str, commit: str) -> None:
    """Tell huggingface_hub which commit a branch is, so that others find it offline. A known commit stays."""
    path = repository_folder(repository) / "refs" / branch
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "x", encoding="ascii") as file:
            file.write(commit)


def _checked(repository: str, revision: str | None, found: "ModelInfo") -> Listing:
    """The listing. Nothing in it is believed before it is checked: names become parts of paths."""
    commit = found.sha
    files: dict[str, Listed] = {}
    names: set[str] = set()
    wanted = revision if revision and COMMIT.fullmatch(revision) else commit
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit) or commit != wanted:
        asked = revision or "main"
        raise WeightsError(f"{repository}: the hub answers for commit {shown(commit)}; asked for {asked}")
    for entry in found.siblings or ():
        name = entry.rfilename
        if isinstance(name, str) and not is_pulled(name):
            continue
        if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
            raise WeightsError(f"{repository}: the hub lists a file named {shown(name)}; refused")
        what = f"{repository}: the hub lists {name}"
        if name.lower() in names:  # one file where capital letters do not count
            raise WeightsError(f"{what} twice")
        names.add(name.lower())
        if len(names) > MAX_FILES:
            raise WeightsError(f"{repository}: the hub lists more than {MAX_FILES} files to pull")
        if type(entry.size) is not int or not 0 <= entry.size <= MAX_FILE_BYTES:
            expected = f"expected 0 to {MAX_FILE_BYTES} bytes"
            raise WeightsError(f"{what} with the size {shown(entry.size)}; {expected}")
        if entry.lfs is None:
            files[name] = Listed(entry.size, git_blob=_digits(what, "git blob id", entry.blob_id, 40))
        else:  # its blob is a pointer, whose id says nothing of the content
            files[name] = Listed(entry.size, sha256=_digits(what, "sha256", entry.lfs.sha256, 64))
    if "config.json" not in files or not any(name.endswith(".safetensors") for name in files):
        raise WeightsError(
            f"{repository}: no config.json and safetensors at {commit}; kvant reads nothing else"
        )
    return Listing(commit, dict(sorted(files.items())))


def _digits(what: str, kind: str, value: object, count: int) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or len(value) != count or not DIGEST.fullmatch(value):
        raise WeightsError(f"{what} with {kind} {shown(value)}; expected {count} hexadecimal digits")
    return value


def _checked_digest(listing: Listing, name: str, found: "HfFileMetadata") -> str:
    """Return the digest that names a file's blob; refuse headers that contradict the listing."""
    listed = listing.files[name]
    stated = listed.sha256 or listed.git_blob
    if found.commit_hash != listing.commit:
        raise ValueError(f"the hub answers for commit {shown(found.commit_hash)}; expected {listing.commit}")
    if found.etag is None or not DIGEST.fullmatch(found.etag) or stated not in (None, found.etag):
        raise ValueError(f"the hub answers with ETag {shown(found.etag)}; expected {stated or 'a digest'}")
    if found.size not in (None, listed.bytes):
        raise ValueError(f"{found.size} bytes; expected {listed.bytes}, as the hub states")
    return found.etag


def _fetch(part: Path, name: str, size: int, url: str, found: "HfFileMetadata") -> None:
    """Write a file's content to ``part``, with a progress bar."""
    from huggingface_hub.file_download import is_xet_available, xet_get
    from huggingface_hub.utils import build_hf_headers, tqdm

    class Bar(tqdm):
        """Has the file's name, and is drawn on the terminal: the command's own standard error is escaped."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            options |= {"desc": name, "file": sys.__stderr__}
            super().__init__(*arguments, **options)  # type: ignore[no-untyped-call]

    # Xet's client compares the size only at the end, however much was sent. So only Hugging Face's hub is
    # trusted with it.
    xet = found.xet_file_data
    if xet is not None and is_xet_available() and constants().ENDPOINT == HUGGING_FACE:
        login = build_hf_headers(library_name="kvant")
        xet_get(incomplete_path=part, xet_file_data=xet, headers=login, expected_size=size, tqdm_class=Bar)
        return
    with open(part, "xb") as file, Bar(total=size, unit="B", unit_scale=True, disable=None) as bar:
        for written in _received(file, size, url):
            bar.update(written - bar.n)


def _received(file: BinaryIO, size: int, url: str) -> Iterator[int]:
    """Write ``size`` bytes and no more to an empty file; yield how many it has. After a broken connection,
    go on.
    """
    import httpx2

    failures = 0
    most = 0  # bytes that one of the attempts reached
    while (start := file.tell()) < size:
        try:
            with _get(url, start) as response:
                if response.status_code != httpx2.codes.PARTIAL_CONTENT:  # the hub begins again
                    file.seek(0)
                    file.truncate()
                for piece in response.iter_bytes():
                    if file.tell() + len(piece) > size:
                        raise ValueError(f"the hub sends more than the {size} bytes that it lists")
                    file.write(piece)
                    yield file.tell()
            if file.tell() < size:
                raise ValueError(f"the hub sends {file.tell()} bytes; expected {size}")
        except (httpx2.NetworkError, httpx2.TimeoutException, httpx2.RemoteProtocolError):
            failures = 0 if file.tell() > most else failures + 1
            most = max(most, file.tell())
            if failures > MAX_FAILURES:
                raise
            time.sleep(RETRY_S)


@contextmanager
def _get(url: str, start: int = 0) -> Iterator["Response"]:
    """Request a file from byte ``start`` on; give the response, its body unread. A refusal is raised.

    Only the hub and huggingface.co get the login, whatever a redirect leads to.
    """
    from httpx2 import Response
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    trusted = [urlsplit(hub)[:2] for hub in (url, HUGGING_FACE)]
    headers = {"Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    timeout = float(constants().HF_HUB_DOWNLOAD_TIMEOUT)
    for _ in range(MAX_REDIRECTS):
        token = None if urlsplit(url)[:2] in trusted else False
        login = build_hf_headers(token=token, library_name="kvant")
        # httpx2 would read the whole body of a redirect, and huggingface_hub that of a refusal. So redirects
        # are followed here, and a response without a body is given to hf_raise_for_status.
        with get_session().stream(
            "GET", url, headers=headers | login, timeout=timeout, follow_redirects=False
        ) as response:
            if not response.has_redirect_location:
                codes = {name: text for name, text in response.headers.items() if name.startswith("x-")}
                hf_raise_for_status(Response(response.status_code, headers=codes, request=response.request))
                yield response
                return
            url = urljoin(url, response.headers["location"])
    raise ValueError(f"the hub redirects more than {MAX_REDIRECTS} times")


@contextmanager
def _errors_in_one_line(repository: str, revision: str | None, name: str | None = None) -> Iterator[None]:
    what = repository if name is None else f"{repository}, {name}"
    try:
        yield
    except WeightsError:
        raise
    except Exception as error:  # huggingface_hub, httpx2 and filelock share no base
        raise _explained(error, what, revision or "main") from error


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
        return UnreachableError(
            f"{what} is not here, and {constants().ENDPOINT} cannot be reached: {one_line(error)}"
        )
    return WeightsError(f"{what}: cannot be pulled: {one_line(error)}")

"""Download a commit's files from the hub, with huggingface_hub, to the cache that it shares with others.

Nothing a hub sends is trusted. Paths are made only from checked names of a listing, never from headers. Reads
are limited. Each error is one line.
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
    429: "too many requests (429): try again later; logged-in users are allowed more",
}
HUGGING_FACE = "https://huggingface.co"
MAX_LISTING_BYTES = 8 * 1024 * 1024  # about 30,000 files of any kind
MAX_FILES = 10_000  # files to pull; the largest published models have about 200
MAX_FILE_BYTES = 2**40
MAX_REDIRECTS = 10
MAX_FAILURES = 5  # of a transfer, in a row and without any new byte
RETRY_S = 1.0  # pause before the next attempt
FILE_NAME = re.compile(r"([0-9]{1,2}_[Pp]ooling/)?[A-Za-z0-9_][\w.-]{0,200}", re.ASCII)
DIGEST = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")


class UnreachableError(WeightsError):
    """The hub cannot be asked: there is no network, or offline mode is on."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A file as the hub describes it; some files have no digest."""

    bytes: int
    sha256: str | None = None  # of a large file's content
    git_blob: str | None = None  # git's id of the content of any other file


@dataclass(frozen=True, slots=True)
class Listing:
    """A commit, and those of its files that kvant pulls, by name."""

    commit: str
    files: dict[str, Listed]


def list_files(repository: str, revision: str | None) -> Listing:
    """List the files of a commit, branch, tag or (None) the default branch, without downloading them."""
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

        info = ModelInfo(**json.loads(data))
    return _checked(repository, revision, info)


def download(repository: str, listing: Listing, name: str) -> None:
    """Download a listed file to huggingface_hub's cache unless it is there. The caller checks its digest.

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
        metadata = get_hf_file_metadata(url, library_name="kvant", retry_on_errors=True)
        digest = _checked_digest(listing, name, metadata)
        blob = repository_folder(repository) / "blobs" / digest
        place = blob if are_symlinks_supported(cache_folder()) else path
        blob.parent.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(repository, digest):  # huggingface_hub uses the same lock
            if not place.exists():
                for stale in blob.parent.glob(f"{digest}.*.incomplete"):  # left by a killed process
                    stale.unlink(missing_ok=True)
                incomplete = blob.with_name(f"{digest}.{os.urandom(4).hex()}.incomplete")
                try:
                    _fetch(incomplete, name, listing.files[name].bytes, url, metadata)
                    incomplete.replace(place)
                finally:
                    incomplete.unlink(missing_ok=True)
            if not path.exists():
                path.unlink(missing_ok=True)  # a link to a missing blob
                path.symlink_to(os.path.relpath(blob, path.parent))


def note_branch(repository: str, branch: str, commit: str) -> None:
    """Record a branch's commit for huggingface_hub, unless known, so that others can load it offline."""
    path = repository_folder(repository) / "refs" / branch
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "x", encoding="ascii") as file:
            file.write(commit)


def _checked(repository: str, revision: str | None, info: "ModelInfo") -> Listing:
    """Check everything in a listing before it is used: names become parts of paths."""
    commit = info.sha
    files: dict[str, Listed] = {}
    names: set[str] = set()
    expected = revision if revision and COMMIT.fullmatch(revision) else commit
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit) or commit != expected:
        asked = revision or "main"
        raise WeightsError(f"{repository}: the hub answers for commit {shown(commit)}; asked for {asked}")
    for entry in info.siblings or ():
        name = entry.rfilename
        if isinstance(name, str) and not is_pulled(name):
            continue
        if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
            raise WeightsError(f"{repository}: the hub lists a file named {shown(name)}; refused")
        what = f"{repository}: the hub lists {name}"
        if name.lower() in names:  # on some disks these are one file
            raise WeightsError(f"{what} twice")
        names.add(name.lower())
        if len(names) > MAX_FILES:
            raise WeightsError(f"{repository}: the hub lists more than {MAX_FILES} files to pull")
        if type(entry.size) is not int or not 0 <= entry.size <= MAX_FILE_BYTES:
            limits = f"expected 0 to {MAX_FILE_BYTES} bytes"
            raise WeightsError(f"{what} with the size {shown(entry.size)}; {limits}")
        if entry.lfs is None:
            files[name] = Listed(entry.size, git_blob=_digits(what, "git blob id", entry.blob_id, 40))
        else:  # its blob is a pointer, whose id does not identify the content
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


def _checked_digest(listing: Listing, name: str, metadata: "HfFileMetadata") -> str:
    """Return the digest that names a file's blob; refuse headers that contradict the listing."""
    listed = listing.files[name]
    stated = listed.sha256 or listed.git_blob
    if metadata.commit_hash != listing.commit:
        answered = shown(metadata.commit_hash)
        raise ValueError(f"the hub answers for commit {answered}; expected {listing.commit}")
    if metadata.etag is None or not DIGEST.fullmatch(metadata.etag) or stated not in (None, metadata.etag):
        raise ValueError(f"the hub answers with ETag {shown(metadata.etag)}; expected {stated or 'a digest'}")
    if metadata.size not in (None, listed.bytes):
        raise ValueError(f"{metadata.size} bytes; expected {listed.bytes}, as the hub states")
    return metadata.etag


def _fetch(target: Path, name: str, size: int, url: str, metadata: "HfFileMetadata") -> None:
    """Write a file's content to ``target``, with a progress bar."""
    from huggingface_hub.file_download import is_xet_available, xet_get
    from huggingface_hub.utils import build_hf_headers, tqdm

    class Bar(tqdm):
        """Shows the file's name, and draws on the real terminal: the command escapes standard error."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            options |= {"desc": name, "file": sys.__stderr__}
            super().__init__(*arguments, **options)  # type: ignore[no-untyped-call]

    # Xet's client compares the size only at the end, however much it receives, so it is used only with
    # Hugging Face's hub.
    xet = metadata.xet_file_data
    if xet is not None and is_xet_available() and constants().ENDPOINT == HUGGING_FACE:
        login = build_hf_headers(library_name="kvant")
        xet_get(incomplete_path=target, xet_file_data=xet, headers=login, expected_size=size, tqdm_class=Bar)
        return
    with open(target, "xb") as file, Bar(total=size, unit="B", unit_scale=True, disable=None) as bar:
        for written in _received(file, size, url):
            bar.update(written - bar.n)


def _received(file: BinaryIO, size: int, url: str) -> Iterator[int]:
    """Write exactly ``size`` bytes to an empty file, resuming broken transfers; yield the bytes so far."""
    import httpx2

    failures = 0
    most = 0  # the furthest byte of all attempts
    while (start := file.tell()) < size:
        try:
            with _get(url, start) as response:
                if response.status_code != httpx2.codes.PARTIAL_CONTENT:  # the hub starts over
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
    """Request a file from byte ``start`` on; yield the response with its body unread; raise on a refusal.

    Only the hub and huggingface.co receive the login, wherever redirects lead.
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
        # are followed here, and hf_raise_for_status gets a response without a body.
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
    except Exception as error:  # huggingface_hub, httpx2 and filelock have no common base
        raise _explained(error, what, revision or "main") from error


def _explained(error: BaseException, what: str, revision: str) -> WeightsError:
    from huggingface_hub import errors

    if isinstance(error, errors.OfflineModeIsEnabled):
        return UnreachableError(f"{what} is not here, and HF_HUB_OFFLINE forbids pulling it")
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        if isinstance(error, errors.GatedRepoError):
            reason = f"gated ({status}): accept its terms on its page; then {LOG_IN}"
        elif isinstance(error, errors.RevisionNotFoundError):
            reason = f"no revision {revision!r} ({status})"
        elif isinstance(error, errors.RemoteEntryNotFoundError):
            reason = f"no such file at {revision} ({status})"
        elif isinstance(error, errors.RepositoryNotFoundError):
            reason = f"no such repository, or a private one ({status}); {LOG_IN}"
        else:
            reason = STATUSES.get(status) or f"the hub answered {status}: {one_line(error)[:200]}"
        return WeightsError(f"{what}: {reason}")
    if isinstance(error, OSError) and error.errno in NO_SPACE:
        return WeightsError(f"{what}: no space for it in {cache_folder()}: {error.strerror}")
    if type(error).__module__.split(".")[0] in ("httpx2", "httpcore2"):
        return UnreachableError(
            f"{what} is not here, and {constants().ENDPOINT} cannot be reached: {one_line(error)}"
        )
    return WeightsError(f"{what}: cannot be pulled: {one_line(error)}")

"""Pull models from the hub to huggingface_hub's cache, verify and record them."""

import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from kvant.errors import WeightsError, one_line
from kvant.files import MAX_CONFIG_BYTES, read_json
from kvant.sizes import format_bytes
from kvant.weights.hub import Listing, UnreachableError, download, list_files, note_branch
from kvant.weights.known import File, known_files
from kvant.weights.local import HUB, compare, differs, find, pinned_commit
from kvant.weights.lock import DEFAULT_BRANCH, Lock, check_writable, locked, read_lock, write_lock
from kvant.weights.reference import Reference, parse_reference
from kvant.weights.snapshot import Verified, git_blob_id, measure, repository_folder, snapshot_folder

HUB_DEFAULT_BRANCH = "main"

Say = Callable[[str], None]  # shows a line to the user


def print_line(line: str) -> None:
    """Print a line to standard error."""
    print(line, file=sys.stderr, flush=True)


def pull(text: str, *, update: bool = False, progress: Say = print_line) -> Path:
    """Download a model, verify every file, and record it. Files that are here are not fetched again.

    A branch or tag is pinned to its commit. If it has moved, another pull keeps the pin and reports the
    change, unless ``update`` is set.

    Args:
        text: a known name, owner/repository or owner/repository@revision.
        update: move the pin to the branch's current commit.
        progress: called with a line to show. If standard error is a terminal, each file has a progress bar.

    Returns:
        The folder to load from.
    """
    reference = parse_reference(text)
    if update and reference.commit is not None:
        raise ValueError(
            f"{reference} is pinned to commit {reference.commit}; only a branch or a tag can be updated"
        )
    lock = read_lock(reference.repository)
    pinned = pinned_commit(reference, lock)
    listing = None
    if reference.commit is None:
        try:
            listing = list_files(reference.repository, reference.revision)
        except UnreachableError as error:
            if pinned is None or (folder := _here(reference)) is None:
                raise
            why = one_line(error.__cause__ or error)
            progress(f"{reference} is here, pinned to {pinned}; whether it moved could not be checked: {why}")
            return folder
        if pinned is not None and listing.commit != pinned:
            if update:
                progress(f"{reference}: updated from {pinned} to {listing.commit}")
            else:
                progress(
                    f"{reference}: upstream moved from {pinned} to {listing.commit}; "
                    f"the old commit stays until `kvant pull {reference} --update`"
                )
                listing = None
    commit = listing.commit if listing else pinned
    assert commit is not None
    if commit == pinned and (folder := _here(reference)) is not None:
        progress(f"{reference} is here, verified")
        return folder
    return _fetch(reference, lock, listing or list_files(reference.repository, commit), progress)


def remote_facts(text: str) -> tuple[Mapping[str, Any], dict[str, int]]:
    """Read what the hub knows about a model without downloading its weights.

    Returns:
        The config.json, and the bytes of every file that :func:`pull` would fetch, by name.
    """
    reference = parse_reference(text)
    lock = read_lock(reference.repository)
    listing = list_files(reference.repository, pinned_commit(reference, lock) or reference.revision)
    size = listing.files["config.json"].bytes
    if size > MAX_CONFIG_BYTES:
        raise WeightsError(f"{reference}: config.json has {size} bytes; expected at most {MAX_CONFIG_BYTES}")
    folder = snapshot_folder(reference.repository, listing.commit)
    _check_listing(reference.repository, listing, lock)
    download(reference.repository, listing, "config.json")
    _verified(reference.repository, listing, "config.json", lock, folder)
    config = read_json(folder / "config.json", error=WeightsError)
    return config, {name: file.bytes for name, file in listing.files.items()}


def _here(reference: Reference) -> Path | None:
    """Return the model's folder if it is complete and verified; otherwise :func:`pull` reports why."""
    try:
        return find(str(reference))
    except WeightsError:
        return None


def _fetch(reference: Reference, lock: Lock, listing: Listing, progress: Say) -> Path:
    repository = reference.repository
    commit = listing.commit
    check_writable()
    folder = snapshot_folder(repository, commit)
    _check_listing(repository, listing, lock)
    missing = [name for name in listing.files if not (folder / name).is_file()]
    _refuse_without_space(reference, listing, missing)
    for name in missing:
        progress(f"fetching {reference}, {name}: {format_bytes(listing.files[name].bytes)}")
        download(repository, listing, name)
    progress(f"verifying {reference}: {len(listing.files)} files")
    verified = {name: _verified(repository, listing, name, lock, folder) for name in listing.files}
    with locked(repository):
        lock = read_lock(repository)  # another pull may have ended meanwhile
        lock.snapshots[commit] = verified
        if reference.commit is None:
            lock.pins[reference.revision or DEFAULT_BRANCH] = commit
        write_lock(lock)
    if reference.commit is None:
        note_branch(repository, reference.revision or HUB_DEFAULT_BRANCH, commit)
    return folder


def _check_listing(repository: str, listing: Listing, lock: Lock) -> None:
    """Refuse a listing that contradicts known facts, or has a file whose digest nobody states."""
    recorded: Mapping[str, Verified | File] = lock.snapshots.get(listing.commit, {})
    lists = f"{repository}@{listing.commit}: the hub lists"
    stated: set[str] = set()
    for name, known in (*recorded.items(), *known_files(repository, listing.commit).items()):
        listed = listing.files.get(name)
        if listed is None:
            raise WeightsError(f"{lists} no {name}; expected it")
        if known.bytes not in (None, listed.bytes):
            raise WeightsError(f"{lists} {name} with {listed.bytes} bytes; expected {known.bytes}")
        if listed.sha256 is not None and known.sha256 not in (None, listed.sha256):
            raise WeightsError(f"{lists} {name} with sha256 {listed.sha256}; expected {known.sha256}")
        stated |= {name} if known.sha256 else set()
    for name, listed in listing.files.items():
        if not (listed.sha256 or listed.git_blob or name in stated):
            raise WeightsError(f"{repository}: the hub states no digest of {name}; it could not be verified")


def _refuse_without_space(reference: Reference, listing: Listing, missing: Iterable[str]) -> None:
    folder = repository_folder(reference.repository)
    needed = 0
    for file in map(listing.files.__getitem__, missing):
        digest = file.sha256 or file.git_blob
        needed += 0 if digest and (folder / "blobs" / digest).is_file() else file.bytes
    place = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise WeightsError(
            f"{reference} needs {format_bytes(needed)} in {place}; {format_bytes(free)} are free"
        )


def _verified(repository: str, listing: Listing, name: str, lock: Lock, folder: Path) -> Verified:
    """Measure a file and compare it with weights.toml, an earlier pull, and the hub."""
    measured = measure(folder, name)
    recorded = lock.snapshots.get(listing.commit, {}).get(name)
    listed = listing.files[name]
    compare(folder, name, measured, recorded, known_files(repository, listing.commit).get(name), listed)
    if listed.git_blob is not None and (blob_id := git_blob_id(folder, name)) != listed.git_blob:
        raise differs(folder, name, f"git blob id {blob_id}", listed.git_blob, HUB)
    return measured

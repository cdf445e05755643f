"""From the hub into huggingface_hub's cache, verified and recorded."""

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvant.errors import WeightsError, one_line
from kvant.files import MAX_CONFIG_BYTES, read_json
from kvant.sizes import format_bytes
from kvant.weights.digest import GIT_BLOB, SHA256, Digest
from kvant.weights.download import Say, bytes_here, locked, note_branch, remove_partials
from kvant.weights.hub import UnreachableError, download, list_files
from kvant.weights.known import File, known_files
from kvant.weights.listing import Listing
from kvant.weights.local import compare, differs, expect, find, pinned_commit
from kvant.weights.lock import DEFAULT_BRANCH, RECORD, Lock, Verified, check_writable, read_lock, write_lock
from kvant.weights.reference import Reference, parse_reference
from kvant.weights.snapshot import git_blob_id, measure, snapshot_folder

HUB_DEFAULT_BRANCH = "main"


def print_line(line: str) -> None:
    """To standard error."""
    print(line, file=sys.stderr, flush=True)


def pull(text: str, revision: str | None = None, *, update: bool = False, progress: Say = print_line) -> Path:
    """Download a model, verify every file, record it. A file that is here already is not fetched again.

    A branch or tag is pinned to its commit. After it moved, another pull keeps the pin and reports the change, unless
    ``update`` is set.

    Args:
        text: a known name, owner/repository or owner/repository@revision.
        revision: a commit, branch or tag; default: a known model's own, else the default branch.
        update: move the pin to where the branch is now.
        progress: called with a line for a person. Each file has a bar where standard error is a terminal.

    Returns:
        The folder to load from.

    Raises:
        WeightsError: it cannot be had, or wrong bytes came; then nothing of it can be loaded.
        ValueError: text that cannot name a model, or update of a fixed commit.
        OSError: the lock cannot be written.
    """
    reference = parse_reference(text, revision)
    if update and reference.commit is not None:
        raise ValueError(f"{reference} is pinned to commit {reference.commit}; only a branch or a tag can be updated")
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
            progress(f"{reference} is here, pinned to {pinned}; whether it moved cannot be asked: {why}")
            return folder
        if pinned is not None and listing.commit != pinned:
            if update:
                progress(f"{reference}: updated from {pinned} to {listing.commit}")
            else:
                progress(
                    f"{reference}: upstream moved from {pinned} to {listing.commit}; "
                    f"the former stays until `kvant pull {reference} --update`"
                )
                listing = None
    commit = listing.commit if listing else pinned
    assert commit is not None
    if commit == pinned and (folder := _here(reference)) is not None:
        progress(f"{reference} is here, verified")
        return folder
    return _fetch(reference, lock, listing or list_files(reference.repository, commit), progress)


def remote_facts(text: str, revision: str | None = None) -> tuple[Mapping[str, Any], dict[str, int]]:
    """The facts of a model that the hub tells before its weights are downloaded.

    Returns:
        Its config.json, and the bytes of every file that :func:`pull` would bring, by name.

    Raises:
        WeightsError: the hub refuses or cannot be reached, or the config is none.
        ValueError: text that cannot name a model.
    """
    reference = parse_reference(text, revision)
    lock = read_lock(reference.repository)
    listing = list_files(reference.repository, pinned_commit(reference, lock) or reference.revision)
    size = listing.files["config.json"].bytes
    if size > MAX_CONFIG_BYTES:
        raise WeightsError(f"{reference}: config.json has {size} bytes; expected at most {MAX_CONFIG_BYTES}")
    folder = snapshot_folder(reference.repository, listing.commit)
    digest = _digest(reference.repository, listing, "config.json", lock)
    download(reference.repository, listing.commit, folder / "config.json", size, digest, print_line)
    _verified(reference.repository, listing, "config.json", lock, folder)
    config = read_json(folder / "config.json", error=WeightsError)
    return config, {name: file.bytes for name, file in listing.files.items()}


def _here(reference: Reference) -> Path | None:
    """Its folder, if all of it is there and verified. pull reports a file that changed or is gone."""
    try:
        return find(str(reference))
    except WeightsError:
        return None


def _fetch(reference: Reference, lock: Lock, listing: Listing, progress: Say) -> Path:
    repository, commit = reference.repository, listing.commit
    check_writable()
    folder = snapshot_folder(repository, commit)
    _refuse_contradictions(repository, listing, lock)
    missing = [name for name in listing.files if not (folder / name).is_file()]
    digests = {name: _digest(repository, listing, name, lock) for name in missing}
    here = sum(bytes_here(folder / name, digest) for name, digest in digests.items())
    _refuse_without_space(reference, folder, sum(listing.files[name].bytes for name in missing) - here)
    for name, digest in digests.items():
        size = listing.files[name].bytes
        progress(f"fetching {reference}, {name}: {format_bytes(size)}")
        download(repository, commit, folder / name, size, digest, progress)
    progress(f"verifying {reference}: {len(listing.files)} files")
    verified = {name: _verified(repository, listing, name, lock, folder) for name in listing.files}
    with locked(folder.parents[1].name, RECORD, lambda: None):
        lock = read_lock(repository)  # again: another pull may have ended since
        lock.snapshots[commit] = verified
        if reference.commit is None:
            lock.pins[reference.revision or DEFAULT_BRANCH] = commit
        write_lock(lock)
    if reference.commit is None:
        note_branch(repository, reference.revision or HUB_DEFAULT_BRANCH, commit)
    remove_partials(repository)
    return folder


def _digest(repository: str, listing: Listing, name: str, lock: Lock) -> Digest:
    """The digest a file must have: the hub's, else that of weights.toml, else that of an earlier pull."""
    listed = listing.files[name].digest
    if listed is not None:
        return listed
    known = known_files(repository, listing.commit).get(name)
    recorded = lock.snapshots.get(listing.commit, {}).get(name)
    for source in (known, recorded):
        if source is not None and source.sha256 is not None:
            return Digest(SHA256, source.sha256)
    raise WeightsError(f"{repository}: the hub states no digest of {name}; nothing else could tell what came")


def _refuse_contradictions(repository: str, listing: Listing, lock: Lock) -> None:
    """Refuse a listing that contradicts the known facts of the commit, before a byte is fetched."""
    recorded: Mapping[str, Verified | File] = lock.snapshots.get(listing.commit, {})
    lists = f"{repository}@{listing.commit}: the hub lists"
    for name, known in {**recorded, **known_files(repository, listing.commit)}.items():
        listed = listing.files.get(name)
        if listed is None:
            raise WeightsError(f"{lists} no {name}; expected it")
        if known.bytes not in (None, listed.bytes):
            raise WeightsError(f"{lists} {name} with {listed.bytes} bytes; expected {known.bytes}")
        if listed.sha256 is not None and known.sha256 not in (None, listed.sha256):
            raise WeightsError(f"{lists} {name} with sha256 {listed.sha256}; expected {known.sha256}")


def _refuse_without_space(reference: Reference, folder: Path, needed: int) -> None:
    place = next(parent for parent in folder.parents if parent.is_dir())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise WeightsError(f"{reference} needs {format_bytes(needed)} in {place}; {format_bytes(free)} are free")


def _verified(repository: str, listing: Listing, name: str, lock: Lock, folder: Path) -> Verified:
    """A file's digest, compared with weights.toml, an earlier pull, and the hub."""
    measured = measure(folder, name)
    recorded = lock.snapshots.get(listing.commit, {}).get(name)
    compare(folder, name, measured, recorded, known_files(repository, listing.commit).get(name))
    listed = listing.files[name]
    expect(folder, name, measured, listed.bytes, listed.sha256, "as the hub states")
    if listed.digest is not None and listed.digest.kind == GIT_BLOB:
        given, expected = git_blob_id(folder, name), listed.digest.value
        if given != expected:
            raise differs(folder, name, f"git blob id {given}", expected, "as the hub states")
    return measured

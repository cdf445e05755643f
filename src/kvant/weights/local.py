"""Models that were pulled: found, checked, listed and removed without the network."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvant.errors import WeightsError
from kvant.weights.hub import Listed
from kvant.weights.known import File, known_files
from kvant.weights.lock import DEFAULT_BRANCH, Lock, locked, read_lock, read_locks, write_lock
from kvant.weights.reference import Reference, parse_reference
from kvant.weights.snapshot import (
    Verified,
    cache_folder,
    is_unchanged,
    measure,
    real_file,
    refuse_others,
    repository_folder,
    snapshot_folder,
)

HUB = "as the hub states"


@dataclass(frozen=True, slots=True)
class Pulled:
    """A commit that was pulled.

    Attributes:
        references: names that load it: its name in weights.toml, or the repository with the revisions pinned
            to it.
        problem: None, or why it cannot be loaded as it is; sizes and times are compared, nothing is hashed.
    """

    references: tuple[str, ...]
    repository: str
    revision: str
    folder: Path
    files: dict[str, Verified]
    problem: str | None


@dataclass(frozen=True, slots=True)
class Removal:
    """What is to be removed, before it is.

    Attributes:
        references: names under which the model is loaded; all of them go.
        bytes: that will be free: files that another commit or another repository needs stay, and do not
            count.
    """

    references: tuple[str, ...]
    repository: str
    commit: str
    bytes: int
    _strategy: Any  # huggingface_hub's plan of files that nothing else needs; None: no file is left

    def run(self) -> None:
        """Remove it. The record goes first: what is left of a removal that is cut short is loaded by
        nobody.
        """
        with locked(self.repository):
            lock = read_lock(self.repository)
            lock.snapshots.pop(self.commit, None)
            lock.pins = {pin: commit for pin, commit in lock.pins.items() if commit != self.commit}
            write_lock(lock)
        folder = snapshot_folder(self.repository, self.commit)
        if self._strategy is not None:
            self._strategy.execute()
        if folder.exists():
            raise WeightsError(f"{folder}: its files could not be removed; kvant no longer loads them")


def find(text: str, revision: str | None = None) -> Path:
    """The folder of a model that was pulled and verified.

    Sizes and times are compared with those of the verified files. A file with another time is hashed again.
    """
    lock, commit = _find(text, revision)
    folder = snapshot_folder(lock.repository, commit)
    recorded = lock.snapshots[commit]
    known = known_files(lock.repository, commit)
    checked = {name: _check(folder, name, file, known.get(name)) for name, file in recorded.items()}
    refuse_others(folder, recorded)
    if checked != recorded:
        lock.snapshots[commit] = checked
        with suppress(OSError):  # a cache that cannot be written costs a digest next time
            write_lock(lock)
    return folder


def verify(text: str | None = None, progress: Callable[[str], None] = print) -> list[str | None]:
    """Compute the digests of a model's files, or (None) of all that was pulled: what is wrong with each,
    or None.
    """
    commits = (
        [(lock, commit) for lock in read_locks() for commit in lock.snapshots]
        if text is None
        else [_find(text)]
    )
    problems = []
    for lock, commit in commits:
        folder = snapshot_folder(lock.repository, commit)
        known = known_files(lock.repository, commit)
        for name, recorded in lock.snapshots[commit].items():
            progress(f"verifying {lock.repository}@{commit[:12]}, {name}")
            problems.append(_problem(_check, folder, name, recorded, known.get(name), True))
        if others := _problem(refuse_others, folder, lock.snapshots[commit]):
            problems.append(others)
    return problems


def pulled() -> list[Pulled]:
    """Everything that was pulled; sizes and times are compared, nothing is hashed."""
    return [
        Pulled(
            references=references(lock, commit),
            repository=lock.repository,
            revision=commit,
            folder=(folder := snapshot_folder(lock.repository, commit)),
            files=files,
            problem=_problem(_glance, folder, files),
        )
        for lock in read_locks()
        for commit, files in lock.snapshots.items()
    ]


def removal(text: str) -> Removal:
    """The removal of a model that was pulled."""
    reference = parse_reference(text)
    lock = read_lock(reference.repository)
    commit = pinned_commit(reference, lock)
    if commit is None or commit not in lock.snapshots:
        raise WeightsError(
            f"{reference} was not pulled by kvant; nothing to remove (`kvant models` lists what was)"
        )
    strategy = None
    size = 0
    if snapshot_folder(reference.repository, commit).is_dir():
        from huggingface_hub import scan_cache_dir

        found = scan_cache_dir(cache_folder())
        # A copy of a repository has the same commits, and the plan is made by commit alone.
        ours = frozenset(
            repo for repo in found.repos if (repo.repo_type, repo.repo_id) == ("model", reference.repository)
        )
        strategy = replace(found, repos=ours).delete_revisions(commit)
        for blob in strategy.blobs:  # another program may have made the links
            if not blob.is_relative_to(repository_folder(reference.repository)):
                raise WeightsError(
                    f"{blob}: outside of the cache, but a link of the model leads there; remove the link"
                )
        size = strategy.expected_freed_size
    return Removal(references(lock, commit), reference.repository, commit, size, strategy)


def pinned_commit(reference: Reference, lock: Lock) -> str | None:
    """The commit a reference means here, or None if it was never pulled."""
    return reference.commit or lock.pins.get(reference.revision or DEFAULT_BRANCH)


def compare(folder: Path, name: str, measured: Verified, *stated: Verified | File | Listed | None) -> None:
    """Compare a file with its record, with weights.toml and, while it is pulled, with the hub."""
    for own, source in zip(stated, ("as when it was pulled", "as weights.toml says", HUB), strict=False):
        if own is not None and own.bytes not in (None, measured.bytes):
            raise differs(folder, name, f"{measured.bytes} bytes", own.bytes, source)
        if own is not None and own.sha256 not in (None, measured.sha256):
            raise differs(folder, name, f"sha256 {measured.sha256}", own.sha256, source)


def differs(folder: Path, name: str, given: str, expected: object, source: str) -> WeightsError:
    """The error for a file that is not the expected one."""
    return WeightsError(
        f"{folder / name}: {given}; expected {expected}, {source}; nothing was deleted; "
        f"remove {real_file(folder, name)} and pull again to fetch it anew"
    )


def _find(text: str, revision: str | None = None) -> tuple[Lock, str]:
    """The lock and the commit of something that was pulled."""
    reference = parse_reference(text, revision)
    lock = read_lock(reference.repository)
    commit = pinned_commit(reference, lock)
    if (
        commit is None
        or commit not in lock.snapshots
        or not snapshot_folder(reference.repository, commit).is_dir()
    ):
        raise WeightsError(f"{reference} is not here; `kvant pull {reference}` fetches it")
    return lock, commit


def _check(folder: Path, name: str, recorded: Verified, known: File | None, hashes: bool = False) -> Verified:
    """The file as it is. Unless ``hashes``, one of the same size and time is not read."""
    measured = recorded if not hashes and is_unchanged(folder, name, recorded) else measure(folder, name)
    compare(folder, name, measured, recorded, known)
    return measured


def _glance(folder: Path, recorded: dict[str, Verified]) -> None:
    for name, file in recorded.items():
        if not is_unchanged(folder, name, file):
            raise WeightsError(f"{folder / name}: changed since it was verified")
    refuse_others(folder, recorded)


def references(lock: Lock, commit: str) -> tuple[str, ...]:
    """The names that load a commit."""
    pins = [pin for pin, pinned in lock.pins.items() if pinned == commit] or [commit]
    written = [lock.repository if pin == DEFAULT_BRANCH else f"{lock.repository}@{pin}" for pin in pins]
    return tuple(dict.fromkeys(str(parse_reference(text)) for text in written))


def _problem(check: Callable[..., object], *arguments: object) -> str | None:
    try:
        check(*arguments)
    except (WeightsError, OSError) as error:
        return str(error)
    return None

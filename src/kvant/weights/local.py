"""Find, check, list and remove pulled models without the network."""

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
        references: names that load it: its name in weights.toml, or the repository with each revision pinned
            to it.
        problem: why it cannot be loaded as it is, or None; compares sizes and times, not digests.
    """

    references: tuple[str, ...]
    repository: str
    revision: str
    folder: Path
    files: dict[str, Verified]
    problem: str | None


@dataclass(frozen=True, slots=True)
class Removal:
    """A removal that can be shown before it is run.

    Attributes:
        references: names that load the model; all of them will be unknown.
        bytes: bytes that will be freed, without files that another commit or repository needs.
    """

    references: tuple[str, ...]
    repository: str
    commit: str
    bytes: int
    _strategy: Any  # huggingface_hub's plan to delete files that nothing else needs; None: no files exist

    def run(self) -> None:
        """Remove the model. The record goes first, so that an interrupted removal leaves nothing loadable."""
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
    """Return the folder of a model that was pulled and verified.

    Sizes and times are compared with the record; a file with another time is hashed again.
    """
    lock, commit = _find(text, revision)
    folder = snapshot_folder(lock.repository, commit)
    recorded = lock.snapshots[commit]
    known = known_files(lock.repository, commit)
    checked = {name: _check(folder, name, file, known.get(name)) for name, file in recorded.items()}
    refuse_others(folder, recorded)
    if checked != recorded:
        lock.snapshots[commit] = checked
        with suppress(OSError):  # a cache that cannot be written costs another hash next time
            write_lock(lock)
    return folder


def verify(text: str | None = None, progress: Callable[[str], None] = print) -> list[str | None]:
    """Hash a model's files, or (None) everything that was pulled; return each file's problem or None."""
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
    """Return everything that was pulled; compares sizes and times, not digests."""
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
    """Prepare the removal of a model that was pulled."""
    reference = parse_reference(text)
    lock = read_lock(reference.repository)
    commit = pinned_commit(reference, lock)
    if commit is None or commit not in lock.snapshots:
        raise WeightsError(
            f"{reference} was not pulled by kvant; there is nothing to remove (`kvant models` lists what was)"
        )
    strategy = None
    size = 0
    if snapshot_folder(reference.repository, commit).is_dir():
        from huggingface_hub import scan_cache_dir

        scan = scan_cache_dir(cache_folder())
        # Copies of a repository have the same commits, and the strategy goes by commit only.
        ours = frozenset(
            repo for repo in scan.repos if (repo.repo_type, repo.repo_id) == ("model", reference.repository)
        )
        strategy = replace(scan, repos=ours).delete_revisions(commit)
        for blob in strategy.blobs:  # another program may have created the links
            if not blob.is_relative_to(repository_folder(reference.repository)):
                raise WeightsError(
                    f"{blob}: outside the cache, but a link of the model leads there; remove the link"
                )
        size = strategy.expected_freed_size
    return Removal(references(lock, commit), reference.repository, commit, size, strategy)


def pinned_commit(reference: Reference, lock: Lock) -> str | None:
    """Return the commit to which a reference is pinned here, or None if it was never pulled."""
    return reference.commit or lock.pins.get(reference.revision or DEFAULT_BRANCH)


def compare(folder: Path, name: str, measured: Verified, *stated: Verified | File | Listed | None) -> None:
    """Compare a file with its record, with weights.toml and, during a pull, with the hub."""
    for expected, source in zip(stated, ("as when it was pulled", "as weights.toml says", HUB), strict=False):
        if expected is not None and expected.bytes not in (None, measured.bytes):
            raise differs(folder, name, f"{measured.bytes} bytes", expected.bytes, source)
        if expected is not None and expected.sha256 not in (None, measured.sha256):
            raise differs(folder, name, f"sha256 {measured.sha256}", expected.sha256, source)


def differs(folder: Path, name: str, actual: str, expected: object, source: str) -> WeightsError:
    """Return the error for a file that is not the expected one."""
    return WeightsError(
        f"{folder / name}: {actual}; expected {expected}, {source}; nothing was deleted; "
        f"remove {real_file(folder, name)} and pull again to fetch it anew"
    )


def _find(text: str, revision: str | None = None) -> tuple[Lock, str]:
    """Return the lock and the commit of a pulled model."""
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
    """Check a file; unless ``hashes``, do not read it if its size and time are unchanged."""
    measured = recorded if not hashes and is_unchanged(folder, name, recorded) else measure(folder, name)
    compare(folder, name, measured, recorded, known)
    return measured


def _glance(folder: Path, recorded: dict[str, Verified]) -> None:
    for name, file in recorded.items():
        if not is_unchanged(folder, name, file):
            raise WeightsError(f"{folder / name}: changed since it was verified")
    refuse_others(folder, recorded)


def references(lock: Lock, commit: str) -> tuple[str, ...]:
    """Return the names that load a commit."""
    pins = [pin for pin, pinned in lock.pins.items() if pinned == commit] or [commit]
    written = [lock.repository if pin == DEFAULT_BRANCH else f"{lock.repository}@{pin}" for pin in pins]
    return tuple(dict.fromkeys(str(parse_reference(text)) for text in written))


def _problem(check: Callable[..., object], *arguments: object) -> str | None:
    try:
        check(*arguments)
    except (WeightsError, OSError) as error:
        return str(error)
    return None

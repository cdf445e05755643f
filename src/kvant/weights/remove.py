"""A pulled model taken away: kvant's record of it, and its files in huggingface_hub's cache."""

from dataclasses import dataclass, replace
from typing import Any

from kvant.errors import WeightsError
from kvant.weights.hub import remove_partials
from kvant.weights.local import pinned_commit, references
from kvant.weights.lock import locked, read_lock, remove_lock, write_lock
from kvant.weights.reference import parse_reference
from kvant.weights.snapshot import cache_folder, snapshot_folder


@dataclass(frozen=True, slots=True)
class Removal:
    """What is to be removed, before it is.

    Attributes:
        references: names under which the model is loaded; all of them go.
        bytes: that will be free: files that another commit or another repository needs stay, and do not count.
    """

    references: tuple[str, ...]
    repository: str
    commit: str
    bytes: int
    _strategy: Any  # huggingface_hub's; None: no file is left

    def run(self) -> None:
        """Remove it. The record goes first: what is left of a removal that is cut short is loaded by nobody."""
        with locked(self.repository):
            lock = read_lock(self.repository)
            lock.snapshots.pop(self.commit, None)
            lock.pins = {pin: commit for pin, commit in lock.pins.items() if commit != self.commit}
            write_lock(lock) if lock.snapshots else remove_lock(self.repository)
        remove_partials(self.repository)
        folder = snapshot_folder(self.repository, self.commit)
        if self._strategy is not None:
            self._strategy.execute()
        if folder.exists():
            raise WeightsError(f"{folder}: its files could not be removed; kvant no longer loads them")


def removal(text: str) -> Removal:
    """The removal of a model that was pulled."""
    reference = parse_reference(text)
    lock = read_lock(reference.repository)
    commit = pinned_commit(reference, lock)
    if commit is None or commit not in lock.snapshots:
        raise WeightsError(f"{reference} was not pulled by kvant; nothing to remove (`kvant models` lists what was)")
    names = references(lock, commit)
    strategy = (
        _strategy(reference.repository, commit) if snapshot_folder(reference.repository, commit).is_dir() else None
    )
    return Removal(names, reference.repository, commit, strategy.expected_freed_size if strategy else 0, strategy)


def _strategy(repository: str, commit: str) -> Any:
    """huggingface_hub's plan: which files of a commit no other commit and no other repository needs."""
    from huggingface_hub import scan_cache_dir

    found = scan_cache_dir(cache_folder())
    # A copy of a repository has the same commits, and the plan is made by commit alone.
    ours = frozenset(repo for repo in found.repos if (repo.repo_type, repo.repo_id) == ("model", repository))
    return replace(found, repos=ours).delete_revisions(commit)

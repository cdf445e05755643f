"""The hub's list of a commit's files. Nothing in it is believed before it is checked."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvant.errors import WeightsError, one_line
from kvant.weights.digest import GIT_BLOB, SHA256, Digest
from kvant.weights.reference import COMMIT
from kvant.weights.snapshot import is_wanted

MAX_FILE_BYTES = 2**40
FILE_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,200}", re.ASCII)
GIVEN, EXPECTED = "the hub's listing is", "expected an object with sha and siblings"


@dataclass(frozen=True, slots=True)
class Listed:
    """A file as the hub describes it.

    Attributes:
        digest: of its content: a large file's sha256, any other's git blob id; None: the hub states none.
    """

    bytes: int
    digest: Digest | None

    @property
    def sha256(self) -> str | None:
        """The digest where it is one."""
        return self.digest.value if self.digest and self.digest.kind == SHA256 else None


@dataclass(frozen=True, slots=True)
class Listing:
    """A commit and those of its files that are pulled, by name."""

    commit: str
    files: dict[str, Listed]


def parse_listing(repository: str, revision: str | None, data: bytes) -> Listing:
    """Read the hub's answer to a question for a revision's files.

    Raises:
        WeightsError: it answers for another commit, or lists something impossible.
    """
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{repository}: {GIVEN} not JSON: {one_line(error)}") from error
    if not isinstance(answer, dict):
        raise WeightsError(f"{repository}: {GIVEN} {_shown(answer)}; {EXPECTED}")
    commit, siblings = answer.get("sha"), answer.get("siblings")
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        raise WeightsError(f"{repository}: the hub answers for commit {_shown(commit)}; asked for {revision or 'main'}")
    if revision and COMMIT.fullmatch(revision) and revision != commit:
        raise WeightsError(f"{repository}: the hub answers for commit {commit}; asked for {revision}")
    if not isinstance(siblings, list):
        raise WeightsError(f"{repository}: the hub lists files as {_shown(siblings)}; expected a list")
    files: dict[str, Listed] = {}
    for entry in siblings:
        name = _name(repository, entry)
        if is_wanted(name):
            if any(name.lower() == other.lower() for other in files):  # one file where capital letters do not count
                raise WeightsError(f"{repository}: the hub lists {name} twice")
            files[name] = _listed(f"{repository}: the hub lists {name}", entry)
    if "config.json" not in files or not any(name.endswith(".safetensors") for name in files):
        raise WeightsError(f"{repository}: no config.json and safetensors at {commit}; kvant reads nothing else")
    return Listing(commit, dict(sorted(files.items())))


def _name(repository: str, entry: object) -> str:
    """The checked name of an entry: it will be a part of a path."""
    name = entry.get("rfilename") if isinstance(entry, dict) else entry
    if not isinstance(name, str) or not isinstance(entry, dict):
        raise WeightsError(f"{repository}: the hub lists a file as {_shown(name)}; expected an object with its name")
    parts = name.split("/")
    hostile = not name.isprintable() or "\\" in name or any(part in ("", ".", "..") for part in parts)
    if hostile or (is_wanted(name) and not FILE_NAME.fullmatch(name)):
        raise WeightsError(f"{repository}: the hub lists a file named {name[:200]!r}; refused")
    return name


def _listed(what: str, entry: Mapping[str, Any]) -> Listed:
    size, blob_id, large = entry.get("size"), entry.get("blobId"), entry.get("lfs")
    if size is None:
        raise WeightsError(f"{what} without a size")
    if type(size) is not int or not 0 <= size <= MAX_FILE_BYTES:
        raise WeightsError(f"{what} with the size {_shown(size)}; expected 0 to {MAX_FILE_BYTES} bytes")
    if large is not None and not isinstance(large, dict):
        raise WeightsError(f"{what} with lfs {_shown(large)}; expected an object with sha256")
    blob = _digest(what, GIT_BLOB, blob_id)
    # A large file's blob is a pointer: its id says nothing of the content.
    return Listed(size, blob if large is None else _digest(what, SHA256, large.get("sha256")))


def _digest(what: str, kind: str, value: object) -> Digest | None:
    if value is None:
        return None
    digits = {SHA256: 64, GIT_BLOB: 40}[kind]
    if not isinstance(value, str) or not re.fullmatch(rf"[0-9a-f]{{{digits}}}", value):
        raise WeightsError(f"{what} with {kind} {_shown(value)}; expected {digits} hexadecimal digits")
    return Digest(kind, value)


def _shown(value: object) -> str:
    """A JSON value in a message: short, and of a container only its kind."""
    if isinstance(value, (dict, list)):
        return f"a JSON {'object' if isinstance(value, dict) else 'list'}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."

"""The two digests that name a file's content: sha256, and the id git gives it."""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hashlib import _Hash

SHA256, GIT_BLOB = "sha256", "git blob id"


@dataclass(frozen=True, slots=True)
class Digest:
    """A digest that a content must have: its kind and its hexadecimal digits."""

    kind: str
    value: str


def new_hash(kind: str, size: int) -> "_Hash":
    """A hash of one kind, before the first byte of a content of ``size`` bytes.

    Git hashes a header before the content: https://git-scm.com/book/en/v2/Git-Internals-Git-Objects.
    """
    if kind == SHA256:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)

"""Compute digests that identify a model and a tokenizer. They cover every byte of the files."""

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from kvant.cache import Identity
from kvant.digests import FileState, file_sha256, state_of
from kvant.files import read_bytes
from kvant.models.adapter import CONFIG_FILE, TENSORS_FILE
from kvant.models.tensors import tensor_files

MAX_TOKENIZER_BYTES = 64 * 1024 * 1024


def identify(folder: Path, adapter: Path | None = None, *, head: bool = False) -> Identity:
    """Return the identity of a model folder: config.json, tokenizer.json, weights, and an adapter's files.

    Call it before loading the weights. They are hashed when the model's digest is first read, unless
    :mod:`kvant.digests` remembers them. That raises a CheckpointError if a file changed since this call.
    ``head``: include the head for drafts.

    Raises:
        ModelError: tokenizer.json or the index of the weights cannot be read.
    """
    files = [folder / "config.json", *tensor_files(folder, head=head)]
    if adapter is not None:
        files += [adapter / CONFIG_FILE, adapter / TENSORS_FILE]
    states = {path: state_of(path) for path in files}
    return Identity(partial(_digest, states), tokenizer_digest(folder), folder)


def tokenizer_digest(folder: Path) -> str:
    """Return the digest of a folder's tokenizer.json, 64 hexadecimal digits."""
    return hashlib.sha256(read_bytes(folder / "tokenizer.json", MAX_TOKENIZER_BYTES)).hexdigest()


def _digest(files: Mapping[Path, FileState]) -> str:
    """Return the digest of the files' names and contents, in order."""
    listed = [[path.name, file_sha256(path, state)] for path, state in files.items()]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()

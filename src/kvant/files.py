"""Open files of a model folder safely, since a stranger may have made it."""

import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader, BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

from kvant.errors import KvantError, ModelError, one_line

POCKET = "pocket"  # the embedded model: its name, and its folder in the package
MAX_CONFIG_BYTES = 4 * 1024 * 1024
CODE_KEYS = ("auto_map", "model_file")  # transformers' key, and mlx-lm's


def check_file(path: Path, folder: Path | None = None) -> Path:
    """Return the path if :func:`open_file` can open it; arguments and errors are the same."""
    with open_file(path, folder):
        return path


@contextmanager
def open_file(
    path: Path, folder: Path | None = None, error: type[ModelError] = ModelError
) -> Iterator[BufferedReader]:
    """Open a regular file of the model folder after checking it.

    The opened file itself is checked, so replacing the name afterwards has no effect. A link created between
    check and opening is not followed. A pipe does not block.

    A link may lead to a file in the same folder. In the Hugging Face cache it may lead to a blob:
    models--owner--name/snapshots/<commit>/file links to models--owner--name/blobs/<digest>, which may link to
    blobs/<..>/<digest> next to the repositories, a blob that they share.

    Args:
        folder: the model folder; default: the file's folder.
        error: raised if the file is missing or not regular, or a link leads out of the folder.
    """
    with open_regular(real_file(path, path.parent if folder is None else folder, error), path, error) as file:
        yield file


@contextmanager
def open_regular(real: Path, shown: Path, error: type[KvantError]) -> Iterator[BufferedReader]:
    """Open a regular file without following a link or blocking on a pipe; messages call it ``shown``."""
    try:
        descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError) as failed:  # a NUL
        reason = getattr(failed, "strerror", None) or one_line(failed)
        raise error(f"{shown}: cannot be read: {reason}") from failed
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # checked first: open() of a folder would leak it
        os.close(descriptor)
        raise error(f"{shown}: not a regular file")
    with open(descriptor, "rb") as file:
        yield file


def real_file(path: Path, folder: Path, error: type[ModelError] = ModelError) -> Path:
    """Resolve a path in the folder to a regular file. Arguments and errors: :func:`open_file`."""
    try:
        real = path.resolve(strict=True)
        root = folder.resolve(strict=True)
    except FileNotFoundError as missing:
        if path.is_symlink():
            raise error(f"{path}: a link to {os.readlink(path)}, which is not there") from missing
        raise error(
            f"{path}: no such file; a model folder holds config.json, tokenizer files and safetensors"
        ) from None
    except (OSError, RuntimeError, ValueError) as failed:  # a loop of links, a name too long, a NUL
        raise error(f"{path}: cannot be read: {one_line(failed)}") from failed
    roots = [root]
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        repository = root.parent.parent
        roots += [repository / "blobs", repository.parent / "blobs"]
    if not any(real.is_relative_to(allowed) for allowed in roots):
        raise error(f"{path}: a link out of the model folder, to {real}; expected the file itself")
    if not os.path.isfile(real):  # do not even open a device
        raise error(f"{path}: not a regular file")
    return real


def read_bytes(
    path: Path, limit: int, folder: Path | None = None, error: type[ModelError] = ModelError
) -> bytes:
    """Read a file of the folder of at most ``limit`` bytes; other arguments: :func:`open_file`."""
    with open_file(path, folder, error) as file:
        return _content(file, path, limit, error)


@contextmanager
def open_user_file(path: str | Path, error: type[KvantError] = KvantError) -> Iterator[BufferedReader]:
    """Open a regular file that the user named. Links are followed, and ``~`` is the user's home.

    A pipe or a device raises ``error`` without being opened: a pipe would block.
    """
    shown = Path(os.path.expanduser(path))
    try:
        real = shown.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as failed:  # nothing there, a loop of links, a NUL
        raise error(
            f"{shown}: cannot be read: {getattr(failed, 'strerror', None) or one_line(failed)}"
        ) from failed
    if not os.path.isfile(real):  # do not even open a device
        raise error(f"{shown}: not a regular file")
    with open_regular(real, shown, error) as file:
        yield file


def read_user_file(path: str | Path, limit: int, error: type[KvantError] = KvantError) -> bytes:
    """Read a file that the user named; refuse more than ``limit`` bytes."""
    with open_user_file(path, error) as file:
        return _content(file, Path(os.path.expanduser(path)), limit, error)


def _content(file: BufferedReader, shown: Path, limit: int, error: type[KvantError]) -> bytes:
    size = os.fstat(file.fileno()).st_size
    if size <= limit:
        try:
            data = file.read(limit + 1)
        except OSError as failed:
            raise error(f"{shown}: cannot be read: {one_line(failed)}") from failed
        if len(data) <= limit:
            return data
        size = len(data)  # it has grown, and may still grow
    raise error(f"{shown}: {size} bytes; expected at most {limit}")


def read_text(
    path: Path, limit: int, folder: Path | None = None, error: type[ModelError] = ModelError
) -> str:
    """Read a file of the folder as UTF-8, at most ``limit`` bytes; other arguments: :func:`open_file`.

    Lines end with a newline, as in Python's text files.
    """
    data = read_bytes(path, limit, folder, error)
    try:
        return TextIOWrapper(BytesIO(data), encoding="utf-8").read()
    except UnicodeDecodeError as failed:
        raise error(f"{path}: not text: {one_line(failed)}") from failed


def read_json(
    path: Path, limit: int = MAX_CONFIG_BYTES, error: type[ModelError] = ModelError
) -> Mapping[str, Any]:
    """Read a file of the folder that contains a JSON object."""
    return parse_json(read_bytes(path, limit, error=error), path, error)


def parse_json(data: bytes, shown: object, error: type[ModelError] = ModelError) -> dict[str, Any]:
    """Parse a JSON object without duplicate keys, about which readers disagree."""
    try:
        raw = json.loads(data.decode(), object_pairs_hook=unique_keys)
    except UnicodeDecodeError as failed:
        raise error(f"{shown}: not text: {one_line(failed)}") from failed
    except (ValueError, RecursionError) as failed:
        raise error(f"{shown}: not JSON: {one_line(failed)}") from failed
    if not isinstance(raw, dict):
        raise error(f"{shown}: a JSON {type(raw).__name__}; expected an object")
    return raw


def read_optional(path: Path) -> Mapping[str, Any]:
    """Do the same as :func:`read_json`, or return an empty object if the file does not exist."""
    return read_json(path) if os.path.lexists(path) else {}


def user_cache() -> Path:
    """Return kvant's folder in the user's cache. As specified, a relative XDG_CACHE_HOME is ignored."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache")) / "kvant"


def unique_keys(
    pairs: Iterable[tuple[str, Any]], what: str = "", error: type[Exception] = ValueError
) -> dict[str, Any]:
    """Convert pairs to a dict; a duplicate key raises ``error`` with a message that begins with ``what``."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise error(f"{what}{key[:80]!r} is there twice")
        result[key] = value
    return result


def refuse_code(raw: Mapping[str, Any], file: str) -> None:
    """Refuse a model that needs its own code: kvant never executes it, and without it the model differs."""
    for key in CODE_KEYS:
        if raw.get(key):
            raise ModelError(
                f"{file}: {key} names code in the model folder, {raw[key]!r}; kvant executes none"
            )

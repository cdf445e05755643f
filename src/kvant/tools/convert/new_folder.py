"""A new model folder beside an old one. It appears whole or not at all. Unchanged files are carried over."""

import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from kvant.errors import ConvertError, one_line
from kvant.files import check_file
from kvant.sizes import format_bytes
from kvant.text.folder import TEMPLATES

CARRIED = (  # to the new folder, byte for byte
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model"),
    *("chat_template.jinja", "chat_template.json"),
)
MARKER = "kvant.lock"  # in a part folder of kvant's; the process that writes the folder holds a lock on it
TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)  # rename's errors for a destination in use


def check_new(dest: Path) -> Path:
    """The absolute path of a folder to make."""
    try:
        dest = dest.expanduser().absolute()
        if dest.is_symlink() or (dest.exists() and not (dest.is_dir() and not any(dest.iterdir()))):
            raise ConvertError(f"{dest}: is there already; expected a new folder's path or an empty folder")
        if not dest.parent.is_dir():
            raise ConvertError(f"{dest.parent}: no such folder; expected one to put {dest.name} into")
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, a user who does not exist, a NUL
        raise ConvertError(f"{str(dest)[:200]}: cannot be a folder: {one_line(error)}") from error
    return dest


def check_space(folder: Path, needed: float) -> None:
    """Refuse to write more bytes than the disk of the folder has left."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConvertError(f"{folder}: {format_bytes(int(needed))} are needed, {format_bytes(free)} are free")


def carried_files(source: Path) -> list[Path]:
    """The files of :data:`CARRIED` that the folder has, and its further chat templates."""
    files = [source / name for name in CARRIED if os.path.lexists(source / name)]
    files += sorted((source / TEMPLATES).glob("[!.]*.jinja"))
    return [check_file(path, source) for path in files]


@contextmanager
def appearing(dest: Path) -> Iterator[Path]:
    """A folder to write into. It becomes ``dest`` when all went well, and is gone when not.

    It is written inside a part folder of this process alone: ``.NAME.xxxxxxxx.part`` beside ``dest``, which
    :func:`check_new` has returned. An empty folder is replaced; anything else is left as it is.
    """
    try:
        with part_folder(dest) as part:
            folder = part / "folder"
            folder.mkdir()  # with the usual mode: the part folder's is the owner's alone
            yield folder
            try:
                folder.rename(dest)
            except OSError as error:
                if error.errno in TAKEN:
                    raise ConvertError(
                        f"{dest}: is there already; it appeared during the conversion"
                    ) from error
                raise
    except (OSError, RuntimeError) as error:  # MLX's writer raises the latter
        raise ConvertError(f"{dest}: cannot be written: {one_line(error)}") from error


@contextmanager
def part_folder(dest: Path) -> Iterator[Path]:
    """A folder beside ``dest`` that is gone afterwards; :func:`remove_leftovers` removes that of a killed
    process.
    """
    made = TemporaryDirectory(".part", f".{dest.name}.", dest.parent, ignore_cleanup_errors=True)
    with made as part, _lock(Path(part)):
        yield Path(part)


def remove_leftovers(dest: Path) -> list[Path]:
    """Remove the part folders of ``dest`` left by killed processes, whose marker is not locked; return
    their paths.
    """
    with suppress(OSError, RuntimeError, ValueError):  # a path that check_new refuses
        dest = dest.expanduser().absolute()
        ours = re.compile(rf"\.{re.escape(dest.name)}\.[a-z0-9_]{{8}}\.part")  # the random part is mkdtemp's
        parts = sorted(
            path for path in dest.parent.iterdir() if ours.fullmatch(path.name) and not path.is_symlink()
        )
        return [part for part in parts if _remove_dead(part)]
    return []


def _remove_dead(part: Path) -> bool:
    try:
        # Not blocking: the marker may be a pipe of somebody else.
        with open(os.open(part / MARKER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as marker:
            if not stat.S_ISREG(os.fstat(marker.fileno()).st_mode):
                return False
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(part)
    except OSError:  # there is none, or it is locked, or not ours to remove
        return False
    return True


@contextmanager
def _lock(part: Path) -> Iterator[None]:
    """Mark the part folder as this process's. The marker gets its name when it is locked, never before."""
    new = part / "new"
    with new.open("xb") as marker:
        with suppress(OSError):  # a file system without locks: nobody else removes this folder
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(part / MARKER)
        yield

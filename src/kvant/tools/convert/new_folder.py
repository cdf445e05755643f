"""Create a model folder next to an old one, complete or not at all, with its unchanged files copied."""

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

CARRIED = (  # copied to the new folder byte for byte
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model"),
    *("chat_template.jinja", "chat_template.json"),
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
)
MARKER = "kvant.lock"  # a file in kvant's temporary folders, locked by the process that writes there
IN_USE = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)  # rename's errors for a destination in use


def check_new(dest: Path) -> Path:
    """Return the absolute path of a folder to create; refuse one that has contents."""
    try:
        dest = dest.expanduser().absolute()
        if dest.is_symlink() or (dest.exists() and not (dest.is_dir() and not any(dest.iterdir()))):
            raise ConvertError(f"{dest}: exists already; expected a new folder's path or an empty folder")
        if not dest.parent.is_dir():
            raise ConvertError(f"{dest.parent}: no such folder; expected one to put {dest.name} into")
    except (OSError, RuntimeError, ValueError) as error:  # too long, an unknown ~user, or with a NUL
        raise ConvertError(f"{str(dest)[:200]}: cannot be a folder: {one_line(error)}") from error
    return dest


def check_space(folder: Path, needed: float) -> None:
    """Raise a ConvertError if the folder's disk has fewer than ``needed`` free bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConvertError(f"{folder}: {format_bytes(int(needed))} are needed, {format_bytes(free)} are free")


def carried_files(source: Path) -> list[Path]:
    """Return the folder's files that are in :data:`CARRIED`, its chat templates, and how it pools."""
    files = [source / name for name in CARRIED if os.path.lexists(source / name)]
    files += sorted((source / TEMPLATES).glob("[!.]*.jinja"))
    files += sorted(source.glob("[0-9]_Pooling/config.json"))
    return [check_file(path, source) for path in files]


@contextmanager
def appearing(dest: Path) -> Iterator[Path]:
    """Yield a folder to write to, which becomes ``dest`` on success and is removed on failure.

    It is inside a temporary folder ``.NAME.xxxxxxxx.part`` next to ``dest``, which must come from
    :func:`check_new`. An empty folder is replaced; anything else is left alone.
    """
    try:
        with part_folder(dest) as temporary:
            folder = temporary / "folder"
            folder.mkdir()  # with the usual mode; only the owner can enter the temporary folder
            yield folder
            try:
                folder.rename(dest)
            except OSError as error:
                if error.errno in IN_USE:
                    raise ConvertError(
                        f"{dest}: exists already; it appeared during the conversion"
                    ) from error
                raise
    except (OSError, RuntimeError) as error:  # MLX's writer raises the latter
        raise ConvertError(f"{dest}: cannot be written: {one_line(error)}") from error


@contextmanager
def part_folder(dest: Path) -> Iterator[Path]:
    """Yield a temporary folder next to ``dest``; :func:`remove_leftovers` removes a killed process's."""
    made = TemporaryDirectory(".part", f".{dest.name}.", dest.parent, ignore_cleanup_errors=True)
    with made as name, _lock(Path(name)):
        yield Path(name)


def remove_leftovers(dest: Path) -> list[Path]:
    """Remove the temporary folders of ``dest`` that killed processes left; return their paths."""
    with suppress(OSError, RuntimeError, ValueError):  # a path that check_new refuses
        dest = dest.expanduser().absolute()
        ours = re.compile(rf"\.{re.escape(dest.name)}\.[a-z0-9_]{{8}}\.part")  # as mkdtemp names them
        parts = sorted(
            path for path in dest.parent.iterdir() if ours.fullmatch(path.name) and not path.is_symlink()
        )
        return [folder for folder in parts if _remove_dead(folder)]
    return []


def _remove_dead(folder: Path) -> bool:
    try:
        # Without blocking: the marker may be somebody's pipe.
        with open(os.open(folder / MARKER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as marker:
            if not stat.S_ISREG(os.fstat(marker.fileno()).st_mode):
                return False
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
    except OSError:  # there is no marker, or it is locked, or we may not remove it
        return False
    return True


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lock a temporary folder for this process. The marker gets its name only after it is locked."""
    new = folder / "new"
    with new.open("xb") as marker:
        with suppress(OSError):  # on a file system without locks nobody removes leftovers
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(folder / MARKER)
        yield

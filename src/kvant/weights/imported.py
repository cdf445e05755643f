"""Models imported from a file: folders by name in the user's data, such as those of ``kvant import``."""

import re
import shutil
from pathlib import Path

from kvant.errors import WeightsError
from kvant.files import POCKET
from kvant.weights.known import known_models, packaged_models

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}", re.ASCII)


def imports_folder() -> Path:
    """Return the folder of all imported models. It may not exist yet."""
    from platformdirs import user_data_path  # only for a name that is no folder's

    return user_data_path("kvant") / "models"


def imported_models() -> dict[str, Path]:
    """Return the folder of every imported model by name, in alphabetical order."""
    found = imports_folder()
    folders = sorted(found.iterdir()) if found.is_dir() else []
    return {folder.name: folder for folder in folders if NAME.fullmatch(folder.name) and folder.is_dir()}


def model_names() -> list[str]:
    """Return the names of all models, known or imported, but the embedded one's, in alphabetical order."""
    return sorted({*known_models(), *packaged_models(), *imported_models()})


def find_imported(name: str) -> Path | None:
    """Return an imported model's folder; None if there is none of that name."""
    return imported_models().get(name)


def place_for(name: str) -> Path:
    """Return the folder for a model to import, which is not there yet.

    Raises:
        ValueError: a name that is not one, or that another model has.
    """
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{name[:100]!r} is no name; expected letters, digits, dots, dashes and underscores, 96 at most"
        )
    if name == POCKET or name in known_models():
        raise ValueError(f"{name!r} is another model's name; expected one of its own")
    folder = imports_folder() / name
    if folder.exists() or folder.is_symlink():
        raise ValueError(f"{name!r} is imported already; `kvant rm {name}` removes it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder


def remove_imported(folder: Path) -> None:
    """Remove an imported model.

    Raises:
        WeightsError: its files could not be removed.
    """
    if folder.is_symlink():
        folder.unlink()
        return
    doomed = folder.with_name(f".{folder.name}.removed")  # from now on nobody loads a half of it
    try:
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        raise WeightsError(f"{folder}: cannot be removed: {error.strerror}") from error


def size_of(folder: Path) -> int:
    """Return the bytes of a model folder's files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

"""Models imported from files, such as those of ``kvant import``: folders by name in the user's data."""

import re
import shutil
from pathlib import Path

from kvant.errors import WeightsError
from kvant.files import POCKET
from kvant.weights.known import known_models, packaged_models

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}", re.ASCII)


def imports_folder() -> Path:
    """Return the folder of all imported models. It may not exist yet."""
    from platformdirs import user_data_path  # rarely needed

    return user_data_path("kvant") / "models"


def imported_models() -> dict[str, Path]:
    """Return the folder of every imported model by name, in alphabetical order."""
    parent = imports_folder()
    folders = sorted(parent.iterdir()) if parent.is_dir() else []
    return {folder.name: folder for folder in folders if NAME.fullmatch(folder.name) and folder.is_dir()}


def model_names() -> list[str]:
    """Return the names of all known or imported models except the embedded one, in alphabetical order."""
    return sorted({*known_models(), *packaged_models(), *imported_models()})


def find_imported(name: str) -> Path | None:
    """Return an imported model's folder, or None."""
    return imported_models().get(name)


def place_for(name: str) -> Path:
    """Return the path for the folder of a model to import.

    Raises:
        ValueError: the name is invalid or taken.
    """
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{name[:100]!r} is not a name; expected at most 96 letters, digits, dots, dashes and underscores"
        )
    if name == POCKET or name in known_models():
        raise ValueError(f"{name!r} is another model's name; expected a new one")
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
    doomed = folder.with_name(f".{folder.name}.removed")  # so that nobody loads a half-deleted model
    try:
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        raise WeightsError(f"{folder}: cannot be removed: {error.strerror}") from error


def size_of(folder: Path) -> int:
    """Return the size of a model folder's files in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

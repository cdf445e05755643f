"""weights.toml: the models kvant knows by name."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

FILE = "weights.toml"
# In a wheel it lies beside this file; in a checkout, and so in an editable install, at the top.
PLACES = (Path(__file__).parent / FILE, Path(__file__).parents[3] / FILE)


@dataclass(frozen=True, slots=True)
class File:
    """A file of a repository. None stands for an unknown value."""

    name: str
    bytes: int | None
    sha256: str | None  # of its content, 64 hexadecimal digits


@dataclass(frozen=True, slots=True)
class KnownModel:
    """An entry of weights.toml.

    Attributes:
        repository: owner/repository on the hub.
        revision: the full commit it is pinned to.
        license: its SPDX identifier, in lower case as the hub writes it.
        files: the known ones; the repository may have more.
        config: the keys of its config.json that decide its shape.
    """

    name: str
    repository: str
    revision: str
    license: str
    files: tuple[File, ...]
    config: Mapping[str, Any]


@cache
def known_models() -> Mapping[str, KnownModel]:
    """The models of weights.toml by name, in its order."""
    place = next(place for place in PLACES if place.is_file())
    models = tomllib.loads(place.read_text(encoding="utf-8"))["models"]
    return MappingProxyType({name: _model(name, entry) for name, entry in models.items()})


def known_files(repository: str, revision: str) -> dict[str, File]:
    """The files of a commit by name, as weights.toml has them; empty for a commit it does not list."""
    for model in known_models().values():
        if (model.repository, model.revision) == (repository, revision):
            return {file.name: file for file in model.files}
    return {}


def _model(name: str, entry: Mapping[str, Any]) -> KnownModel:
    files = tuple(File(file["name"], file.get("bytes"), file.get("sha256")) for file in entry["files"])
    config = MappingProxyType(entry["config"])
    return KnownModel(name, entry["repository"], entry["revision"], entry["license"], files, config)

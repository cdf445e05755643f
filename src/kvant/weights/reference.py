"""A model as a user names it: a known name, or owner/repository[@revision]."""

import re
from dataclasses import dataclass

from kvant.errors import WeightsError, did_you_mean
from kvant.fields import shown
from kvant.weights.known import known_models, packaged_models

# The hub's own rules, and lengths that fit a file name.
REPOSITORY = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
REFUSED = re.compile(r"\.\.|--|(\.|-|\.git)(/|$)")  # in an owner's or a repository's name
REVISION = re.compile(r"[A-Za-z0-9_][\w./-]{0,127}", re.ASCII)  # a commit, branch or tag
COMMIT = re.compile(r"[0-9a-f]{40}")
OLLAMA = "ollama:"  # before the name of a model that Ollama downloaded


@dataclass(frozen=True, slots=True)
class Reference:
    """A model on the hub.

    Attributes:
        name: its name in weights.toml, or None.
        repository: owner/repository.
        revision: a commit, branch or tag; a listed model's commit where none was given; None: the default
            branch.
    """

    name: str | None
    repository: str
    revision: str | None

    @property
    def commit(self) -> str | None:
        """The revision where it is a full commit."""
        return self.revision if self.revision and COMMIT.fullmatch(self.revision) else None

    def __str__(self) -> str:
        """As a user would write it."""
        return self.name or (f"{self.repository}@{self.revision}" if self.revision else self.repository)


def parse_reference(text: str, revision: str | None = None) -> Reference:
    """A known name, ``owner/repository`` or ``owner/repository@revision``.

    A repository of weights.toml without another revision means the listed model: pinned, with its digests.

    Raises:
        ValueError: the text is neither.
        WeightsError: it names a model of Ollama's, which has to be imported first.
    """
    if text.startswith(OLLAMA):
        name = text[:100]
        raise WeightsError(f"{name} is a model of Ollama's; `kvant import {name}` makes a model folder of it")
    repository, at, written = text.partition("@")
    if at and revision is not None and written != revision:
        raise ValueError(f"{shown(text)} has a revision of its own, but revision is {shown(revision)}")
    wanted = written if at else revision
    model = known_models().get(repository)
    if model is not None:
        repository = model.repository
    elif not REPOSITORY.fullmatch(repository) or REFUSED.search(repository):
        near = did_you_mean(repository, [*known_models(), *packaged_models()])
        expected = near or "; expected one that `kvant models` lists, or owner/repository[@revision]"
        raise ValueError(f"{shown(text)} is no known model{expected}")
    if wanted is not None and not is_revision(wanted):
        raise ValueError(f"revision is {shown(wanted)}; expected a commit, a branch or a tag")
    for listed in known_models().values():
        if listed.repository == repository and wanted in (None, listed.revision):
            return Reference(listed.name, repository, listed.revision)
    return Reference(None, repository, wanted)


def is_revision(text: str) -> bool:
    """Whether it can name a commit, a branch or a tag."""
    odd = ".." in text or "//" in text or text.endswith(("/", "."))
    return not odd and REVISION.fullmatch(text) is not None

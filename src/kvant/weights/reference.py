"""How a user names a model: a known name, or owner/repository[@revision]."""

import re
from dataclasses import dataclass

from kvant.errors import WeightsError, did_you_mean
from kvant.fields import shown
from kvant.weights.known import known_models, packaged_models

# The hub's rules, with lengths that fit a file name.
REPOSITORY = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
REFUSED = re.compile(r"\.\.|--|(\.|-|\.git)(/|$)")  # in an owner's or a repository's name
REVISION = re.compile(r"[A-Za-z0-9_][\w./-]{0,127}", re.ASCII)  # a commit, branch or tag
COMMIT = re.compile(r"[0-9a-f]{40}")
OLLAMA = "ollama:"  # prefix of models that Ollama downloaded


@dataclass(frozen=True, slots=True)
class Reference:
    """A model on the hub.

    Attributes:
        name: the name in weights.toml, or None.
        repository: owner/repository.
        revision: a commit, branch or tag; without one, a listed model's commit; None: the default branch.
    """

    name: str | None
    repository: str
    revision: str | None

    @property
    def commit(self) -> str | None:
        """The revision if it is a full commit."""
        return self.revision if self.revision and COMMIT.fullmatch(self.revision) else None

    def __str__(self) -> str:
        """Write the reference as a user would."""
        return self.name or (f"{self.repository}@{self.revision}" if self.revision else self.repository)


def parse_reference(text: str, revision: str | None = None) -> Reference:
    """Parse a known name, ``owner/repository`` or ``owner/repository@revision``.

    A repository of weights.toml without another revision means the listed model, with its pin and digests.

    Raises:
        ValueError: the text is neither.
        WeightsError: it names a model of Ollama, which has to be imported first.
    """
    if text.startswith(OLLAMA):
        name = text[:100]
        raise WeightsError(f"{name} is a model of Ollama; `kvant import {name}` makes a model folder of it")
    repository, at, written = text.partition("@")
    if at and revision is not None and written != revision:
        raise ValueError(f"{shown(text)} contains a revision, but revision is {shown(revision)}")
    requested = written if at else revision
    model = known_models().get(repository)
    if model is not None:
        repository = model.repository
    elif not REPOSITORY.fullmatch(repository) or REFUSED.search(repository):
        near = did_you_mean(repository, [*known_models(), *packaged_models()])
        expected = near or "; expected one that `kvant models` lists, or owner/repository[@revision]"
        raise ValueError(f"{shown(text)} is not a known model{expected}")
    if requested is not None and not is_revision(requested):
        raise ValueError(f"revision is {shown(requested)}; expected a commit, a branch or a tag")
    for listed in known_models().values():
        if listed.repository == repository and requested in (None, listed.revision):
            return Reference(listed.name, repository, listed.revision)
    return Reference(None, repository, requested)


def is_revision(text: str) -> bool:
    """Whether a text can name a commit, a branch or a tag."""
    odd = ".." in text or "//" in text or text.endswith(("/", "."))
    return not odd and REVISION.fullmatch(text) is not None

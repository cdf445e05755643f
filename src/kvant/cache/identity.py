"""The identity of the model and tokenizer that a cache's tokens belong to."""

from collections.abc import Callable
from pathlib import Path


class Identity:
    """Digests of a model's files; :mod:`kvant.models.identity` computes them and explains what they cover.

    Attributes:
        tokenizer: the digest of the tokenizer's files; 64 hexadecimal digits.
        folder: the folder of the files, ignored in comparisons; None: unknown.
    """

    def __init__(self, model: str | Callable[[], str], tokenizer: str, folder: Path | None = None) -> None:
        """``model``: the model's digest, or a function that computes it from every byte of the weights."""
        self._model = model
        self.tokenizer = tokenizer
        self.folder = folder

    @property
    def model(self) -> str:
        """Return the digest of config.json, the weights and the adapter; 64 hexadecimal digits.

        The first use may compute it, and raises a CheckpointError if the files changed since loading.
        """
        if not isinstance(self._model, str):
            self._model = self._model()
        return self._model

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identity):
            return NotImplemented
        return self is other or (self.tokenizer == other.tokenizer and self.model == other.model)

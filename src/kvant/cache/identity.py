"""Which model and tokenizer a cache's tokens belong to."""

from collections.abc import Callable
from pathlib import Path


class Identity:
    """Digests of a model's files; :mod:`kvant.models.identity` computes them and says what they cover.

    Attributes:
        tokenizer: of its files; 64 hexadecimal digits.
        folder: that they were read from; it does not count in a comparison. None: not known.
    """

    def __init__(self, model: str | Callable[[], str], tokenizer: str, folder: Path | None = None) -> None:
        """``model``: the model's digest, or a function that computes it from every byte of the weights."""
        self._model = model
        self.tokenizer = tokenizer
        self.folder = folder

    @property
    def model(self) -> str:
        """The digest of config.json, the weights and the adapter; 64 hexadecimal digits.

        The first use may compute it, and raises a CheckpointError if the files were changed since they were
        loaded.
        """
        if not isinstance(self._model, str):
            self._model = self._model()
        return self._model

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identity):
            return NotImplemented
        return self is other or (self.tokenizer == other.tokenizer and self.model == other.model)

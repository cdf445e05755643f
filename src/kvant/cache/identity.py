"""Which model and tokenizer a cache's tokens belong to."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Identity:
    """Digests of a model's files; :mod:`kvant.models.identity` computes them and says what they cover.

    Attributes:
        model: of config.json, the weights and the adapter; 64 hexadecimal digits.
        tokenizer: of its files; 64 hexadecimal digits.
        folder: that they were read from; it does not count in a comparison. None: not known.
    """

    model: str
    tokenizer: str
    folder: Path | None = field(default=None, compare=False)

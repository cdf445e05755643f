"""Which model and tokenizer a cache's tokens belong to."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """Digests of a model's files; :mod:`kvant.models.identity` computes them and says what they cover.

    Attributes:
        model: of config.json, the weights and the adapter; 64 hexadecimal digits.
        tokenizer: of its files; 64 hexadecimal digits.
    """

    model: str
    tokenizer: str

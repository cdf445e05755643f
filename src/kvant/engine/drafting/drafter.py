"""What proposes the tokens that may follow."""

from collections.abc import Sequence
from typing import Protocol


class Drafter(Protocol):
    """Proposes tokens of one sequence, greedily.

    Attributes:
        is_free: a proposal takes next to no time.
        match: tokens that the next proposal rests on; a model's drafter: 0.
    """

    is_free: bool
    match: int

    def extend(self, tokens: Sequence[int]) -> None:
        """Take tokens of the sequence that are sure: first the prompt's, then the answer's."""

    def propose(self, count: int) -> list[int]:
        """At most ``count`` tokens that may follow; none where it has no guess."""


def known_part(draft: list[int], vocab_size: int) -> list[int]:
    """A draft up to the first token that a model does not have: a prompt's file may hold such."""
    return draft[: next((n for n, token in enumerate(draft) if not 0 <= token < vocab_size), len(draft))]

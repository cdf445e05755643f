"""What a request asks of drafts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from kvant.cache import ModelCache
from kvant.cache.pool import Pool
from kvant.engine.drafting.choice import MOST, Drafter
from kvant.engine.drafting.suffix import SuffixDrafter
from kvant.errors import ArgumentError

Source = Literal["none", "prompt"]
ServedSource = Literal["none", "prompt", "model"]  # where a server may have a draft model


@dataclass(frozen=True, slots=True)
class Drafts:
    """Where drafts come from.

    Attributes:
        source: "prompt": from what the sequence holds so far; "model": from a model.
        side_by_side: whether answers can draft; else :meth:`beside` makes what can.
    """

    side_by_side: ClassVar[bool] = True

    source: str = "prompt"

    @property
    def asked(self) -> tuple[str, str]:
        """The argument that asks for them, and its value in words; for a refusal."""
        return "draft", f"is {self.source!r}"

    @property
    def most(self) -> int:
        """Tokens that are drafted a step, at most."""
        return MOST

    def beside(self, pool: Pool | ModelCache) -> "Drafts":
        """For the sequences of a pool."""
        return self

    def for_answer(self, salt: bytes, tokens: int) -> Drafter:
        """A drafter for an answer, of so many tokens at most, to a request of this salt. It must be released."""
        return SuffixDrafter()

    def propose(self, drafters: Sequence[Any], counts: Sequence[int]) -> list[list[int]] | None:
        """At most ``counts`` tokens that may follow each sequence; None: a step was made that had to be before."""
        return [drafter.propose(count) for drafter, count in zip(drafters, counts, strict=True)]


def drafts_of(draft: object) -> Drafts | None:
    """What ``draft="prompt"`` or "none" asks for; None: no drafts."""
    if draft not in get_args(Source):
        raise ArgumentError("draft", f"is {draft!r}; expected {' or '.join(map(repr, get_args(Source)))}")
    return None if draft == "none" else Drafts()

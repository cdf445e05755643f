"""Draft with the model's head, whose layer is part of the cache of each answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

from kvant.cache.pool import Pool, PoolSequence
from kvant.engine.drafts import Drafter, Drafts, Source
from kvant.errors import ArgumentError, one_line
from kvant.models.mtp import HeadedModel

DEFAULT_HEAD_TOKENS = 3  # of a draft; later tokens depend on the head's output


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadDrafts(Drafts):
    """Drafts with the head of a model."""

    asked = "draft", "is 'mtp'"

    model: HeadedModel
    most: int = DEFAULT_HEAD_TOKENS

    @classmethod
    def of(cls, model: Any, num_draft_tokens: int | None = None) -> "HeadDrafts":
        """Return the drafts of a model; raise an ArgumentError if it was loaded without a head."""
        if not isinstance(model, HeadedModel):
            raise ArgumentError(
                "draft", "is 'mtp'; the model was loaded without its head: load(..., mtp=True) loads it"
            )
        return cls(model=model, most=num_draft_tokens or DEFAULT_HEAD_TOKENS)

    def for_pool(self, pool: Pool) -> "HeadDrafts":
        cast(Any, self.model).check_pool(pool)
        return self

    def for_answer(self, salt: bytes, tokens: int, sequence: PoolSequence) -> "HeadDrafter":
        return HeadDrafter(sequence)

    def propose(self, drafters: Sequence["HeadDrafter"], counts: Sequence[int]) -> list[list[int]] | None:
        """Draft for all sequences together, one token a step; see :meth:`Drafts.propose`."""
        sequences = [drafter.sequence for drafter in drafters]
        try:
            drafted = self.model.draft(
                [drafter.last for drafter in drafters],
                max(counts),
                sequences[0].pool.batch(sequences),
            )
            ids = cast(list[list[int]], drafted.tolist())
        except Exception as error:
            for drafter in drafters:
                drafter.ended = f"the head failed: {one_line(error)}"
            return [[] for _ in drafters]
        return [draft[:count] for draft, count in zip(ids, counts, strict=True)]


class HeadDrafter(Drafter):
    """The drafting state of an answer: its sequence, which includes the head's rows, and its last token."""

    is_free = False

    def __init__(self, sequence: PoolSequence) -> None:
        self.sequence = sequence
        self.last = 0  # the next token to feed

    def extend(self, tokens: Sequence[int]) -> None:
        self.last = tokens[-1] if tokens else self.last


def drafts_of(draft: object, model: object, num_draft_tokens: int | None = None) -> Drafts | None:
    """Return the drafts that ``draft="prompt"``, "mtp" or "none" stands for; None: no drafts."""
    if draft not in get_args(Source):
        raise ArgumentError("draft", f"is {draft!r}; expected {' or '.join(map(repr, get_args(Source)))}")
    if draft == "mtp":
        return HeadDrafts.of(model, num_draft_tokens)
    return None if draft == "none" else Drafts()

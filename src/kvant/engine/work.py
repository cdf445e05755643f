"""Requests under way in a scheduler, and their answers."""

from dataclasses import dataclass, field

from kvant.cache.pool import PoolSequence
from kvant.engine.drafting.batch_choice import AnswerDrafts
from kvant.engine.draw import Sampler
from kvant.engine.request import CheckedRequest
from kvant.engine.row_sampling import Row
from kvant.text.grammar import Matcher


@dataclass(eq=False, slots=True)
class Work:
    """A request under way.

    Attributes:
        open: the numbers of the answers that have not ended.
        sequences: reserved for its answers until they run; the first is fed.
        cached: tokens at the beginning that a shared prefix had.
        exact: tokens at the beginning that whole chunks of 128 computed, here or in the request they are shared with.
    """

    checked: CheckedRequest
    open: set[int]
    sequences: list[PoolSequence] = field(default_factory=list)
    cached: int = 0
    exact: int = 0

    @property
    def left(self) -> int:
        """Tokens of the prompt that are to be fed."""
        return len(self.checked.ids) - self.sequences[0].length

    def release(self) -> None:
        """Give its pages back."""
        for sequence in self.sequences:
            sequence.release()
        self.sequences.clear()


@dataclass(eq=False, slots=True)
class Answer:
    """An answer that gets a token every step.

    Attributes:
        tokens: of the cache, the prompt and the answer.
        matcher: where the answer follows a grammar.
        drafts: where it drafts.
    """

    work: Work
    number: int
    sampler: Sampler
    sequence: PoolSequence
    tokens: list[int]
    matcher: Matcher | None = None
    drafts: AnswerDrafts | None = None

    def row(self, *, ahead: int = 0, mask: bytes | None = None) -> Row:
        """How its next token is sampled.

        Args:
            ahead: tokens before it that are not known yet.
            mask: of its grammar.
        """
        position = len(self.tokens) + ahead
        return Row(self.sampler, self.work.checked.processors, position, self.tokens, mask)

    @property
    def left(self) -> int:
        """Tokens that it may still get."""
        checked = self.work.checked
        return len(checked.ids) + checked.limit - len(self.tokens)

    @property
    def room(self) -> int:
        """Tokens of a step that its sequence has room for."""
        return self.sequence.max_tokens - self.sequence.length

    def release(self) -> None:
        """Give its pages back, and what it drafts with."""
        self.sequence.release()
        if self.drafts is not None:
            self.drafts.release()

    @property
    def sees_tokens(self) -> bool:
        """Whether something has to see its tokens before the next one is sampled."""
        checked = self.work.checked
        return checked.calls_out or bool(checked.processors) or self.matcher is not None

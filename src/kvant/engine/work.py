"""Requests under way in a scheduler, and their answers."""

from dataclasses import dataclass, field

from kvant.cache.pool import PoolSequence
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
    """

    work: Work
    number: int
    sampler: Sampler
    sequence: PoolSequence
    tokens: list[int]
    matcher: Matcher | None  # where the answer follows a grammar

    def row(self, *, is_unread: bool = False, mask: bytes | None = None) -> Row:
        """How its next token is sampled.

        Args:
            is_unread: the token before it is not known yet.
            mask: of its grammar.
        """
        position = len(self.tokens) + is_unread
        return Row(self.sampler, self.work.checked.processors, position, self.tokens, mask)

    @property
    def left(self) -> int:
        """Tokens that it may still get."""
        checked = self.work.checked
        return len(checked.ids) + checked.limit - len(self.tokens)

    @property
    def sees_tokens(self) -> bool:
        """Whether something has to see its tokens before the next one is sampled."""
        checked = self.work.checked
        return checked.calls_out or bool(checked.processors) or self.matcher is not None

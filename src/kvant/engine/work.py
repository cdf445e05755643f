"""Requests under way in a scheduler, and their answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from kvant.cache.pool import PoolSequence
from kvant.cache.single import SingleSequence
from kvant.engine.drafting.choice import AnswerDrafts
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
        start: tokens at the beginning that a shared prefix had, or the request's own cache.
        cached: of these, those of the prompt.
        exact: tokens at the beginning that whole chunks of 128 computed, here or in the request they are shared with.
    """

    checked: CheckedRequest
    open: set[int]
    sequences: list[PoolSequence | SingleSequence] = field(default_factory=list)
    start: int = 0
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
    sequence: PoolSequence | SingleSequence
    tokens: list[int]
    matcher: Matcher | None = None
    drafts: AnswerDrafts | None = None
    _seen: mx.array | None = None  # the tokens that processors were given last

    def row(self, after: Sequence[int] | mx.array = (), *, mask: bytes | None = None) -> Row:
        """How its next token is sampled.

        Args:
            after: tokens behind those that it has; in an array they need not be known yet.
            mask: of its grammar.
        """
        tokens: Sequence[int] | mx.array = self.tokens
        processors, position = self.work.checked.processors, len(self.tokens) + len(after)
        if processors and isinstance(after, mx.array):
            known = self._seen if self._seen is not None and self._seen.size == len(tokens) else mx.array(self.tokens)
            tokens = self._seen = mx.concatenate([known, after.astype(known.dtype)])
        elif processors:
            tokens = [*tokens, *after]
        return Row(self.sampler, processors, position, tokens, mask)

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
        self.end_drafts()

    def end_drafts(self) -> None:
        """Draft no more."""
        drafts, asked = self.drafts, self.work.checked.request.drafts
        self.drafts = None
        if drafts is not None and asked is not None:
            asked.release(drafts.drafter)

    @property
    def sees_tokens(self) -> bool:
        """Whether something may look at its tokens one by one: it must not see any that is taken back."""
        return self.work.checked.calls_out or self.matcher is not None

    @property
    def waits(self) -> bool:
        """Whether its token has to be known before the next one is sampled.

        Of several answers a caller's functions are called apart, so that an error is nobody else's, and kvant's own
        processors look tokens up in Python.
        """
        alone = isinstance(self.sequence, SingleSequence)
        return self.matcher is not None or (not alone and bool(self.sees_tokens or self.work.checked.processors))

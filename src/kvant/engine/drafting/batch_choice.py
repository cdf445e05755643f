"""How many tokens the answers of a batch draft: they share its steps, so they decide together."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from kvant.engine.drafting.choice import SIZES, Balance, DraftCounts, StepCosts, costs_of
from kvant.engine.drafting.drafter import known_part
from kvant.engine.drafting.drafts import Drafts

READ_AT_ONCE = 2048  # tokens that a drafter reads in a step: a long prompt holds nobody up
UNKNOWN = 1.25  # a step whose cost is not known yet, in steps of the next smaller size: so few texts pay for measuring
EXACT_ROWS = 8  # sequences, up to which the cost of a step is kept for each number


class AnswerDrafts:
    """What an answer drafts.

    Attributes:
        match: tokens that its next draft rests on.
        off: why it drafts no more; None: it does, where that pays.
        most: tokens that it drafts a step, at most.
        drafter: what drafts.
    """

    def __init__(self, drafts: Drafts, salt: bytes, tokens: int) -> None:
        """Arguments as those of :meth:`kvant.engine.drafting.drafts.Drafts.for_answer`."""
        self.off: str | None = None
        self.most = drafts.most
        self._drafts = drafts
        self.drafter = drafts.for_answer(salt, tokens)
        self._choice = drafts.choice()
        self._read = 0

    @property
    def match(self) -> int:
        """Tokens that its next draft rests on."""
        return self.drafter.match

    @property
    def by_model(self) -> bool:
        """Whether a model drafts for it."""
        return self.off is None and not self.drafter.is_free

    def read(self, tokens: Sequence[int]) -> bool:
        """Take the sequence's tokens that are new. Returns whether all of them are known now."""
        if self.off is None and self._read < len(tokens):
            new = tokens[self._read : self._read + READ_AT_ONCE]
            self._choice.learn(self.drafter, new)
            self._read += len(new)
        return self.off is None and self._read == len(tokens)

    def expected(self, match: int) -> list[float]:
        """Tokens that a draft after a match of this length is expected to add, of none, of one, of two..."""
        return self._choice.expected(match, SIZES[-1])

    def verified(self, drafted: int, accepted: int) -> None:
        """Of a model's draft so many tokens were accepted. What is free to draft learns from every token read."""
        if not self.drafter.is_free:
            self._choice.saw_draft(drafted, accepted)

    def propose(self, most: int, vocab_size: int) -> list[int]:
        """At most so many tokens that may follow, of those that the model knows."""
        return known_part(self.drafter.propose(most), vocab_size) if most > 0 else []

    def release(self) -> None:
        """Give back what it drafts with; nothing is drafted any more."""
        self._drafts.release(self.drafter)


class StepKind(NamedTuple):
    """What the cost of a step goes with, beside its size.

    Attributes:
        at_once: no answer has to see a token before the next one is sampled.
        drafter: the name of the model that drafts for some of its answers; "": none does.
    """

    at_once: bool
    drafter: str = ""


class BatchChoice:
    """Decides for the answers of a batch how many tokens a step has.

    The number is taken with which they are expected to get the most tokens in the time of a step. A step of S tokens
    feeds S of every answer, of one that does not draft too, so the drafts of few have to pay for all.

    Attributes:
        counts: of all steps.
    """

    def __init__(self, model: object, kind: Hashable) -> None:
        """``kind``: of the pool, for the record of costs that is kept with the model."""
        self.counts = DraftCounts()
        self._model, self._kind = model, kind
        self._balance = Balance()

    def may_draft(self, rows: int, drafting: Sequence[AnswerDrafts], *, kind: StepKind) -> bool:
        """Whether anything would be drafted after the next token, whatever it is.

        Args:
            rows: answers of the step.
            drafting: those of them that may draft.
            kind: of the steps.
        """
        best = []
        for each in drafting:  # the next match is one longer, or shorter
            matches = {(1 << bits) >> 1 for bits in range(1, (each.match + 1).bit_length() + 1)}
            if each.by_model:
                matches = {each.match}
            options = [each.expected(match) for match in matches]
            best.append([max(of_size) for of_size in zip(*options, strict=True)])
        return self._size(self._costs(rows, kind), rows, best, _sizes(drafting), SIZES[-1]) > 0

    def size(self, rows: int, drafting: Sequence[tuple[AnswerDrafts, int]], most: int, *, kind: StepKind) -> int:
        """Tokens to draft at most: 0, one of 1, 3 and 7, or the most that a model drafts.

        Args:
            rows, kind: as in :meth:`may_draft`.
            drafting: answers that may draft, and how many tokens they propose.
            most: tokens that may be drafted, by the room that every answer has.
        """
        gains = [each.expected(each.match)[: count + 1] for each, count in drafting]
        return self._size(self._costs(rows, kind), rows, gains, _sizes([each for each, _ in drafting]), most)

    def stepped(self, rows: int, seconds: float, *, kind: StepKind, ahead: bool) -> str | None:
        """A step of one token of each answer took so long; ``ahead``: it was begun while the one before it ran.

        Returns why drafts are off, if they are now: waiting for what might be drafted costs time too.
        """
        costs = self._costs(rows, kind)
        if ahead or not kind.at_once:
            costs.add_single(seconds)
            return self._stepped(0.0)
        costs.add(0, seconds)
        return self._stepped(min(0.0, 1 - (costs.get(0) or 1.0)))

    def verified(self, rows: int, size: int, tokens: int, seconds: float | None, *, kind: StepKind) -> str | None:
        """A step in which up to ``size`` tokens were drafted gave so many. Returns why drafts are off, if they are now.

        ``seconds``: that it took; None: they are not known.
        """
        costs = self._costs(rows, kind)
        if seconds is not None:
            costs.add(size + 1, seconds)
        self.counts.off = None  # it was of answers before these
        return self._stepped(tokens / rows - (costs.get(size + 1) or 1.0))

    def _stepped(self, gained: float) -> str | None:
        self._balance.add(gained)
        lost = self._balance.loss(self.counts)
        if lost is not None:
            self.counts.off, self._balance = lost, Balance()
        return lost

    def _costs(self, rows: int, kind: StepKind) -> StepCosts:
        rows = rows if rows <= EXACT_ROWS else 1 << (rows - 1).bit_length()
        return costs_of(self._model, (self._kind, rows, kind))

    @staticmethod
    def _size(costs: StepCosts, rows: int, gains: Sequence[Sequence[float]], sizes: Sequence[int], most: int) -> int:
        """The number of drafted tokens that gives the most tokens in the time of a step.

        ``gains``: of each answer that drafts the tokens that are expected of none, one, two... drafted ones.
        """

        def tokens(size: int) -> float:
            return 1 + sum(gain[min(size, len(gain) - 1)] for gain in gains) / rows

        return costs.best([size for size in sizes if size <= most], tokens, UNKNOWN)


def _sizes(drafting: Sequence[AnswerDrafts]) -> list[int]:
    """The numbers of tokens that are tried."""
    return sorted({*SIZES, *(each.most for each in drafting)})

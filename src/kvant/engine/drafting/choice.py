"""How many tokens are drafted: as many as matched, while that pays."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

MOST = 7  # tokens of a draft
START, LAST = 2, 6  # levels: at level n a draft needs a match of 2^n tokens; at the last one nothing is drafted
LOSS = 2.0  # steps of one token that drafts may cost before they need a longer match
RETRY = 128  # steps times 2^level, after which a match half as long is tried again
SAMPLES = 9  # of the time of a step, of which the lower quartile counts


@dataclass(slots=True)
class DraftCounts:
    """What drafts did, for one answer or for all of a scheduler."""

    # of the model whose tokens were handed out; the first token comes from the prompt and needs none. One of several
    # answers counts for each
    steps: int = 0
    tokens: int = 0  # that were handed out after the first
    drafted: int = 0  # tokens that were drafted
    accepted: int = 0  # of these, tokens that are in the text
    off: str | None = None  # why nothing is drafted any more; None: it is, if it pays

    @property
    def tokens_a_step(self) -> float:
        """Tokens that a step gave, on average; 1.0 before the first."""
        return self.tokens / self.steps if self.steps else 1.0

    def describe(self) -> str:
        """In a line: what was accepted, and why nothing is drafted any more."""
        share = f", {100 * self.accepted / self.drafted:.0f} %" if self.drafted else ""
        text = f"drafts: {self.accepted} of {self.drafted} tokens accepted{share}"
        return text if self.off is None else f"drafts off: {self.off}{share}"


class Drafter:
    """What an answer drafts with.

    Attributes:
        is_free: a proposal takes next to no time.
        match: tokens that the next proposal rests on; a model's drafter: 0.
        ended: why it proposes nothing any more; None: it may.
    """

    is_free: bool = True
    match: int = 0
    ended: str | None = None

    def extend(self, tokens: Sequence[int]) -> None:
        """Take tokens of the sequence that are sure: first the prompt's, then the answer's."""
        raise NotImplementedError

    def release(self) -> None:
        """Give back what it holds; it drafts no more."""


class DraftChoice:
    """Decides for the answers of a scheduler, which share its steps, how many tokens are drafted.

    A draft from the text is as long as its match, up to 7 tokens (as SuffixDecoding has it: Oliaro et al. 2024,
    arXiv:2411.04975); a model drafts as many as it was asked for. Gains and losses are counted in the time of a plain
    step. Once drafts cost two of these, a match has to be twice as long; a model drafts no more. After 128 steps times
    the length of that match the shorter one is tried again. So drafts are never slower for long.

    Attributes:
        counts: of all answers.
    """

    def __init__(self) -> None:
        self.counts = DraftCounts()
        self._level, self._balance, self._steps = START, 0.0, 0
        # Seconds of steps: of one token begun while the one before ran, of one token not so begun, with drafts.
        self._plain, self._alone, self._drafted = (deque[float](maxlen=SAMPLES) for _ in range(3))

    def count(self, drafter: Drafter, most: int, *, longer: int = 0) -> int:
        """Tokens to draft, at most ``most``.

        Args:
            longer: tokens that the match may grow by before.
        """
        if len(self._plain) < 2 or self._level == LAST:
            return 0
        if not drafter.is_free:
            return most if self._level <= START else 0
        match = drafter.match + longer
        return min(match, most) if match >= 1 << self._level else 0

    def stepped(self, seconds: float, *, ahead: bool) -> None:
        """A step of one token of each answer took so long.

        Args:
            ahead: it was begun while the one before it ran. If not, what might have been drafted cost time.
        """
        if ahead:
            self._plain.append(seconds)
            self._count(0.0)
        else:
            self._count(min(0.0, 1 - self._cost(self._alone, seconds)))

    def verified(self, tokens: float, seconds: float | None) -> None:
        """A step with drafts gave so many tokens an answer, in so many seconds; None: they are not known."""
        if self._level <= START:
            self.counts.off = None
        if seconds is not None:
            self._count(tokens - self._cost(self._drafted, seconds))

    def _cost(self, times: deque[float], seconds: float) -> float:
        """A step's time in steps of one token, by the last ones of its kind: the first takes longer, others wait."""
        times.append(seconds)
        return _quartile(times) / _quartile(self._plain) if self._plain and len(times) > 1 else 1.0

    def _count(self, gained: float) -> None:
        self._steps += 1
        self._balance = min(self._balance + gained, LOSS)
        counts = self.counts
        if self._balance < -LOSS:
            self._level, self._steps, self._balance = min(self._level + 1, LAST), 0, 0.0
            counts.off = f"they took longer; {counts.accepted} of {counts.drafted} were accepted"
        elif self._level > START and self._steps >= RETRY << self._level:
            self._level, self._steps, self._balance = self._level - 1, 0, 0.0
            if self._level == START:
                counts.off = None


def _quartile(times: Collection[float]) -> float:
    return sorted(times)[len(times) // 4]

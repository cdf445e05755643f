"""Drafts: tokens that may follow, proposed cheaply and verified several per step."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from kvant.cache.pool import Pool, PoolSequence

Source = Literal["none", "prompt", "mtp"]  # mtp: the model's own head
ServedSource = Literal["none", "prompt", "mtp", "model"]  # where a server may have a draft model
MOST = 7  # tokens of a draft
MOST_TOKENS = 65_536  # that a drafter from the text remembers
# levels: at level n a draft needs a match of 2^n tokens; at the last one nothing is drafted
START = 2
LAST = 6
LOSS = 2.0  # steps of one token that drafts may cost before they need a longer match
RETRY = 128  # steps times 2^level, after which a match half as long is tried again
SAMPLES = 9  # of the time of a step, of which the lower quartile counts
# suffixes of which a new token becomes the latest place: a bound, for a text of one token repeated
RENEWED = 8
READ_AT_ONCE = 2048  # tokens that a drafter reads in a step: a long prompt delays nobody


@dataclass(slots=True)
class DraftCounts:
    """Counts of drafts, for one answer or for all of a scheduler."""

    # of the model whose tokens were handed out; the first token comes from the prompt and needs none. One of
    # several answers counts for each
    steps: int = 0
    tokens: int = 0  # that were handed out after the first
    drafted: int = 0  # tokens that were drafted
    accepted: int = 0  # of these, tokens that are in the text
    off: str | None = None  # why nothing is drafted any more; None: it is, if it pays

    @property
    def tokens_a_step(self) -> float:
        """Return the average number of tokens per step; 1.0 before the first."""
        return self.tokens / self.steps if self.steps else 1.0

    def describe(self) -> str:
        """Return a line with the accepted tokens, and the reason if drafting has stopped."""
        share = f", {100 * self.accepted / self.drafted:.0f} %" if self.drafted else ""
        text = f"drafts: {self.accepted} of {self.drafted} tokens accepted{share}"
        return text if self.off is None else f"drafts off: {self.off}{share}"


class Drafter:
    """Proposes the tokens that may follow an answer."""

    is_free: bool = True  # a proposal takes next to no time
    match: int = 0  # tokens that the next proposal rests on; a model's drafter: 0
    ended: str | None = None  # why it proposes nothing any more; None: it may

    def extend(self, tokens: Sequence[int]) -> None:
        """Add accepted tokens of the sequence: first the prompt's, then the answer's."""
        raise NotImplementedError

    def release(self) -> None:
        """Free its resources; it drafts no more."""


class SuffixDrafter(Drafter):
    """A suffix automaton of prompt and answer (Blumer et al. 1985): the longest suffix that occurred before.

    A token takes amortized constant time and about 0.45 kB. At ``most_tokens`` the older half is forgotten,
    and the newer one read again. A dictionary of where the last three tokens occurred took 0.5 to 3.7 % more
    steps (measured on code and prose, and edited copies of them).
    """

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        """``most_tokens``: tokens that are remembered, at least 2."""
        self._most = most_tokens
        self._clear()

    def _clear(self) -> None:
        self.match = 0
        self._tokens: list[int] = []
        # Of each state: transitions, suffix link, longest length, and the place where it ended last.
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._place = [-1]
        self._last = 0
        self._follows = 0  # the place of the token that followed the match

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens[-self._most :]:
            if len(self._tokens) == self._most:
                newer = self._tokens[self._most // 2 :]
                self._clear()
                self.extend(newer)
            self._add(token)

    def _add(self, token: int) -> None:
        transitions = self._next
        link = self._link
        length = self._length
        place = self._place
        here = len(self._tokens)
        self._tokens.append(token)
        state = self._last
        new = len(transitions)
        transitions.append({})
        length.append(length[state] + 1)
        place.append(here)
        link.append(0)
        while state != -1 and token not in transitions[state]:
            transitions[state][token] = new
            state = link[state]
        suffix = 0 if state == -1 else transitions[state][token]
        if state != -1 and length[state] + 1 != length[suffix]:
            original = suffix
            suffix = new + 1  # a state for the shorter strings of the original one
            transitions.append(dict(transitions[original]))
            length.append(length[state] + 1)
            place.append(place[original])
            link.append(link[original])
            while state != -1 and transitions[state].get(token) == original:
                transitions[state][token] = suffix
                state = link[state]
            link[original] = suffix
        link[new] = suffix
        self._last = new
        self.match = length[suffix]
        self._follows = place[suffix] + 1
        for _ in range(RENEWED):
            if suffix <= 0:
                break
            place[suffix] = here
            suffix = link[suffix]

    def propose(self, count: int) -> list[int]:
        """Return tokens that may follow, none without a match. A copy past the end repeats itself."""
        if not self.match:
            return []
        period = len(self._tokens) - self._follows
        draft = self._tokens[self._follows : self._follows + count]
        while len(draft) < count:
            draft.append(draft[-period])
        return draft


class DraftChoice:
    """Decides for the answers of a scheduler, which share its steps, how many tokens are drafted.

    A draft from the text is as long as its match, up to 7 tokens (as SuffixDecoding has it: Oliaro et al.
    2024, arXiv:2411.04975); a model drafts as many as it was asked for. Gains and losses are counted in the
    time of a plain step. Once drafts cost two of these, a match has to be twice as long; a model drafts no
    more. After 128 steps times the length of that match the shorter one is tried again. So drafts are never
    slower for long.
    """

    def __init__(self) -> None:
        self.counts = DraftCounts()  # of all answers
        self._level = START
        self._balance = 0.0
        self._steps = 0
        # Seconds of steps: of one token begun while the one before ran, of one token not so begun, with
        # drafts.
        self._plain, self._serial, self._drafted = (deque[float](maxlen=SAMPLES) for _ in range(3))

    def count(self, drafter: Drafter, most: int, *, longer: int = 0) -> int:
        """Return how many tokens to draft, up to ``most``; the match may grow by ``longer`` tokens first."""
        if len(self._plain) < 2 or self._level == LAST:
            return 0
        if not drafter.is_free:
            return most if self._level <= START else 0
        match = drafter.match + longer
        return min(match, most) if match >= 1 << self._level else 0

    def stepped(self, seconds: float, *, is_lookahead: bool) -> None:
        """Note the time of a step without drafts; ``is_lookahead``: it was begun while the one before ran."""
        if is_lookahead:
            self._plain.append(seconds)
            self._count(0.0)
        else:  # only the chance to draft cost time
            self._count(min(0.0, 1 - self._cost(self._serial, seconds)))

    def verified(self, tokens: float, seconds: float | None) -> None:
        """Note a step with drafts: its tokens per answer, and its seconds if known."""
        if self._level <= START:
            self.counts.off = None
        if seconds is not None:
            self._count(tokens - self._cost(self._drafted, seconds))

    def _cost(self, times: deque[float], seconds: float) -> float:
        """Return a step's cost in plain steps, by recent ones of its kind; 1.0 for the first, slow one."""
        times.append(seconds)
        return _quartile(times) / _quartile(self._plain) if self._plain and len(times) > 1 else 1.0

    def _count(self, gained: float) -> None:
        self._steps += 1
        self._balance = min(self._balance + gained, LOSS)
        counts = self.counts
        if self._balance < -LOSS:
            self._level = min(self._level + 1, LAST)
            self._steps = 0
            self._balance = 0.0
            counts.off = f"they took longer; {counts.accepted} of {counts.drafted} were accepted"
        elif self._level > START and self._steps >= RETRY << self._level:
            self._level = self._level - 1
            self._steps = 0
            self._balance = 0.0
            if self._level == START:
                counts.off = None


def _quartile(times: Collection[float]) -> float:
    return sorted(times)[len(times) // 4]


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts from the sequence's own tokens."""

    # by which argument, and its value; for a refusal
    asked: ClassVar[tuple[str, str]] = "draft", "is 'prompt'"

    most: int = MOST  # tokens that are drafted a step, at most

    def for_pool(self, pool: Pool) -> Self:
        """Return the drafts for the sequences of a pool."""
        return self

    def for_answer(self, salt: bytes, tokens: int, sequence: PoolSequence) -> Drafter:
        """Return a drafter for an answer of at most ``tokens`` tokens in a sequence. It must be released."""
        return SuffixDrafter()

    def propose(self, drafters: Sequence[Any], counts: Sequence[int]) -> list[list[int]] | None:
        """Return at most ``counts`` tokens that may follow each sequence, or None after a preparing step."""
        return [drafter.propose(count) for drafter, count in zip(drafters, counts, strict=True)]


class Drafting:
    """The drafting of one answer: the source of drafts, and the drafter's progress in its tokens."""

    def __init__(self, source: Drafts, salt: bytes, tokens: int, sequence: PoolSequence) -> None:
        """Make it for an answer of at most ``tokens`` tokens in a sequence, to a request with this salt."""
        self.source = source
        self.drafter = source.for_answer(salt, tokens, sequence)
        self._num_read = 0

    def update(self, tokens: Sequence[int]) -> bool:
        """Pass new tokens to the drafter, a bounded number per step; return whether it has all of them."""
        new = tokens[self._num_read : self._num_read + READ_AT_ONCE]
        self.drafter.extend(new)
        self._num_read += len(new)
        return self._num_read == len(tokens)

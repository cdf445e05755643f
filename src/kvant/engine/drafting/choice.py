"""How many tokens to draft: as many as pay, by what was accepted before and what steps cost on this device."""

from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from kvant.engine.drafting.drafter import Drafter

SIZES = (1, 3, 7)
CLASSES = 7  # of match lengths: 0, 1, 2 to 3, 4 to 7, ... 32 and more
DECAY = 0.95  # of what an older observation counts, for each newer one
LEAST_GAIN = 1.15  # tokens expected of a draft in the time of one; in a batch all pay for a wrong estimate
SAMPLES = 9  # of a step's cost, of which the lower quartile counts
LIFE = 128  # steps after which the oldest sample of each size is forgotten
LOSS, LOSS_SHARE = 2, 0.01  # what drafts may lose: so many steps of one token, and a share of the run's steps


@dataclass(slots=True)
class DraftCounts:
    """What drafts did for a run.

    Attributes:
        steps: of the model whose tokens were handed out; the first token comes from the prompt and needs none.
        tokens: that were handed out after the first.
        drafted: tokens that were drafted.
        accepted: of these, tokens that are in the text.
        off: why nothing is drafted any more; None: it is, where it pays.
    """

    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    off: str | None = None

    @property
    def tokens_a_step(self) -> float:
        """Tokens that a step gave, on average; 1.0 before the first."""
        return self.tokens / self.steps if self.steps else 1.0

    def describe(self) -> str:
        """In a line: what was accepted, and why nothing is drafted any more."""
        share = f", {100 * self.accepted / self.drafted:.0f} %" if self.drafted else ""
        text = f"drafts: {self.accepted} of {self.drafted} tokens accepted{share}"
        return text if self.off is None else f"drafts off: {self.off}{share}"


class StepCosts:
    """What a step of S tokens costs in steps of one, measured while texts are generated.

    A model's are kept with it in this process. A step is compared with the plain ones just before it, because a
    machine's load and the cache's length change.
    """

    def __init__(self) -> None:
        self._singles: deque[float] = deque(maxlen=SAMPLES)  # seconds
        self._ratios: dict[int, deque[float]] = {}
        self._age = 0

    def add_single(self, seconds: float) -> None:
        """A step of one token took so long, in the plain loop."""
        self._grow_old()
        self._singles.append(seconds)

    def add(self, num_tokens: int, seconds: float) -> None:
        """A step of S = ``num_tokens`` took so long, with the drafting. 0: one of one token, not begun in advance."""
        self._grow_old()
        if self.is_known:
            ratios = self._ratios.setdefault(num_tokens, deque(maxlen=SAMPLES))
            ratios.append(seconds / _quartile(self._singles))

    def _grow_old(self) -> None:
        """Forget the oldest samples now and then: a cost measured too high, and not paid since, would stay."""
        self._age += 1
        if self._age % LIFE == 0:
            for ratios in self._ratios.values():
                if ratios:
                    ratios.popleft()

    @property
    def is_known(self) -> bool:
        """Whether steps of one token were measured."""
        return len(self._singles) > 1

    def get(self, num_tokens: int) -> float | None:
        """A quarter of the last steps cost less: first steps take longer, and others wait. None before the second."""
        ratios = self._ratios.get(num_tokens, ())
        return _quartile(ratios) if len(ratios) > 1 else None

    def best(self, sizes: Sequence[int], tokens: Callable[[int], float], unknown: float = 1.0) -> int:
        """The number of drafted tokens that gives the most tokens in the time of a step; 0: no draft pays.

        Args:
            sizes: numbers to choose from, ascending.
            tokens: of a number, the tokens that a step is expected to give.
            unknown: what a step costs that was not measured yet, in steps of the next smaller size.
        """
        if not self.is_known:
            return 0
        best, most, known = 0, LEAST_GAIN, 1.0
        for size in sizes:
            cost = self.get(size + 1)
            known = max(known, unknown * known if cost is None else cost)
            if (rate := tokens(size) / known) > most:
                best, most = size, rate
            if cost is None:
                break  # a larger one waits for this one's measurement
        return best


class Balance:
    """What drafts gained so far, in steps of one token. Where that is less than they may lose, they are switched off.

    Attributes:
        steps: that were counted.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._gained = 0.0

    def add(self, gained: float) -> None:
        """Count a step."""
        self.steps += 1
        self._gained += gained

    def loss(self, counts: DraftCounts) -> str | None:
        """Why drafts are switched off; None: they are not."""
        if self._gained >= -(LOSS + LOSS_SHARE * self.steps):
            return None
        return f"they cost the time of {-self._gained:.1f} steps; {counts.accepted} of {counts.drafted} were accepted"


_costs: WeakKeyDictionary[object, dict[Hashable, StepCosts]] = WeakKeyDictionary()


def costs_of(model: object, kind: Hashable) -> StepCosts:
    """The costs of a model's steps of one kind: of a cache's format, of a way to sample and to draft."""
    return _costs.setdefault(model, {}).setdefault(kind, StepCosts())


class Choice:
    """How likely a drafted token is right, by what was right before.

    A drafted token of which ``match`` tokens matched before it is accepted with a probability that is a decayed mean
    over tokens whose match was about as long; a further one has a match one longer. So the tokens that a draft is
    expected to give follow. For a drafter that is free every token is an observation, the prompt's too, whether
    anything was drafted or not; each place in the draft of another has a record of its own.
    """

    def __init__(self, *, is_free: bool = True) -> None:
        # One refusal is counted in advance; of a drafter that is not free, which is only seen at work, one acceptance.
        self._hits = [0.0 if is_free else 1.0] * CLASSES
        self._tries = [1.0] * CLASSES
        self._seen = [not is_free] * CLASSES
        self._each: list[float] | None = None  # how likely a guess of each class is, until something is learnt
        self._expected: dict[tuple[int, int], list[float]] = {}  # likewise, by the match and the most tokens

    def saw(self, match: int, *, hit: bool) -> None:
        """A guess that rested on ``match`` tokens was right, or not."""
        each = min(match.bit_length(), CLASSES - 1)
        self._hits[each] = self._hits[each] * DECAY + hit
        self._tries[each] = self._tries[each] * DECAY + 1
        self._seen[each] = True
        self._each = None

    def saw_draft(self, drafted: int, accepted: int) -> None:
        """Of a draft that rested on no match so many tokens were right."""
        for place in range(min(drafted, accepted + 1)):
            self.saw(place, hit=place < accepted)

    def learn(self, drafter: Drafter, tokens: Sequence[int]) -> None:
        """Give a drafter tokens that are sure. The guesses of a free one are compared with them."""
        if not drafter.is_free:
            drafter.extend(tokens)
            return
        for token in tokens:
            guess = drafter.propose(1)
            if guess:
                self.saw(drafter.match, hit=guess[0] == token)
            drafter.extend((token,))

    def expected(self, match: int, most: int) -> list[float]:
        """Tokens that are expected to be accepted of none, one, two and up to ``most`` tokens drafted after a match."""
        if self._each is None:
            self._each = [self._likely(each) for each in range(CLASSES)]
            self._expected.clear()
        each, last = self._each, CLASSES - 1
        match = min(match, 1 << last >> 1)  # longer ones are of the last class too
        if (match, most) not in self._expected:
            found, likely, total = [0.0], 1.0, 0.0
            for length in range(match, match + most):
                likely *= each[min(length.bit_length(), last)]
                total += likely
                found.append(total)
            self._expected[match, most] = found
        return self._expected[match, most]

    def _likely(self, each: int) -> float:
        """The probability that a guess of a class is right; of one not seen, that of the next shorter matches."""
        while each and not self._seen[each]:
            each -= 1
        return self._hits[each] / self._tries[each]


def _quartile(values: Collection[float]) -> float:
    return sorted(values)[len(values) // 4]

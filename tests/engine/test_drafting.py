"""What is proposed, and how many tokens of it."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from support.drafts import KnownDrafts
from support.runs import Run

from kvant.engine.drafts import LOSS, DraftChoice, Drafter, SuffixDrafter
from kvant.engine.speculation import Speculation, SpeculativeStep
from kvant.engine.step import Step
from kvant.models import Decoder


def _longest_match(text: Sequence[int]) -> int:
    """Of the text's suffixes that occur in it before, the longest one's length."""
    for length in range(len(text) - 1, 0, -1):
        if any(text[i : i + length] == text[len(text) - length :] for i in range(len(text) - length)):
            return length
    return 0


@pytest.mark.parametrize("alphabet", [1, 2, 3, 20])
def test_the_longest_suffix_that_occurred(alphabet: int) -> None:
    rng = random.Random(alphabet)
    drafter, text = SuffixDrafter(), list[int]()
    for _ in range(60):
        new = [rng.randrange(alphabet) for _ in range(rng.randint(1, 3))]
        drafter.extend(new)
        text += new
        assert drafter.match == _longest_match(text)
        draft = drafter.propose(5)
        if not drafter.match:
            assert draft == []
            continue
        # What follows some earlier occurrence of the match; a copy that reaches the text's end goes on with
        # itself.
        suffix = text[len(text) - drafter.match :]
        followed = []
        for end in range(drafter.match, len(text)):
            if text[end - drafter.match : end] == suffix:
                whole = text + [0] * 5
                for place in range(5):
                    whole[len(text) + place] = whole[end + place]
                followed.append(whole[len(text) :])
        assert draft in followed
        assert drafter.propose(2) == draft[:2]


def test_the_latest_occurrence_is_continued_and_old_tokens_are_forgotten() -> None:
    drafter = SuffixDrafter()
    drafter.extend([1, 2, 3, 9, 1, 2, 4, 9, 1, 2])
    assert drafter.propose(1) == [4]
    drafter, rng = SuffixDrafter(most_tokens=100), random.Random(0)
    text = [rng.randrange(50) for _ in range(1000)]
    for token in text:
        drafter.extend([token])
        assert len(drafter._tokens) <= 100
    drafter.extend(text[-30:-10])
    assert drafter.match == 20
    assert drafter.propose(3) == text[-10:-7]
    drafter.extend(text[:20])
    assert drafter.match < 5


def test_one_token_repeated_takes_linear_time() -> None:
    """Its suffixes are all one another's: a walk along them for each token would not end."""
    drafter = SuffixDrafter()
    drafter.extend([7] * 30_000)
    assert drafter.match == 29_999
    assert drafter.propose(3) == [7, 7, 7]


class Proposer(Drafter):
    """Proposes nothing: what a choice asks of it."""

    def __init__(self, match: int = 0) -> None:
        self.is_free, self.match = match > 0, match


MODEL = Proposer()


def _measured() -> DraftChoice:
    """Plain steps take a second."""
    choice = DraftChoice()
    for _ in range(2):
        assert choice.count(Proposer(30), 7) == choice.count(MODEL, 3) == 0
        choice.stepped(1.0, is_lookahead=True)
    return choice


def _counts(choice: DraftChoice) -> list[int]:
    return [choice.count(Proposer(match), 7) for match in (3, 4, 6, 8, 16, 32, 1000)]


def test_a_draft_is_as_long_as_its_match() -> None:
    choice = _measured()
    assert _counts(choice) == [0, 4, 6, 7, 7, 7, 7]
    assert [choice.count(Proposer(4), most) for most in (2, 0)] == [2, 0]
    assert choice.count(Proposer(3), 7, longer=1) == 4
    assert choice.count(MODEL, 3) == 3


@pytest.mark.parametrize("waits", [False, True], ids=["verified", "waited for"])
def test_what_does_not_pay_is_left_until_it_is_tried_again(waits: bool) -> None:
    """After a loss of two plain steps a match has to be twice as long; after some time half of that is
    tried.
    """
    choice = _measured()
    choice.verified(1.0, 90.0)  # the first of a kind takes longer and does not count
    choice.stepped(90.0, is_lookahead=False)

    def lose() -> None:
        """Half a step at a time, until less is drafted."""
        before, lost = _counts(choice), 0.0
        while _counts(choice) == before:
            assert lost <= LOSS
            lost += 0.5
            if waits:
                choice.stepped(1.5, is_lookahead=False)
            else:
                choice.verified(1.5, 2.0)

    levels = []
    for _ in range(4):
        assert choice.counts.off is None or levels
        levels.append(_counts(choice))
        lose()
        assert str(choice.counts.off).startswith("they took longer")
        assert choice.count(MODEL, 3) == 0
    assert levels[1:] == [[0, 0, 0, 7, 7, 7, 7], [0, 0, 0, 0, 7, 7, 7], [0, 0, 0, 0, 0, 7, 7]]
    assert _counts(choice) == [0] * 7
    for length, level in zip((64, 32, 16, 8), reversed(levels), strict=True):
        for step in range(128 * length):
            assert choice.counts.off is not None
            assert _counts(choice) != level, step
            choice.stepped(1.0, is_lookahead=True)
        assert _counts(choice) == level
    assert choice.counts.off is None
    assert choice.count(MODEL, 3) == 3


def test_what_pays_goes_on() -> None:
    """Also where single steps take long."""
    choice = _measured()
    for number in range(200):
        choice.verified(2.0, 50.0 if number % 9 == 0 else 1.5)
        choice.stepped(3.0 if number % 9 == 0 else 1.0, is_lookahead=False)
        choice.verified(1.0, None)  # of which the time is not known
        assert choice.count(MODEL, 3) == 3, number
    assert choice.counts.off is None
    for _ in range(5):  # what was gained before does not make up for more
        choice.verified(0.5, 1.5)
    assert choice.count(MODEL, 3) == 0


@pytest.mark.parametrize("pays", [True, False])
def test_a_run_drafts_while_it_pays(
    pocket: tuple[Decoder, Any], monkeypatch: pytest.MonkeyPatch, pays: bool
) -> None:
    """A step takes a second, or one for every token. A third of what is drafted is wrong."""
    model, finish, clock = pocket[0], Speculation.finish, 0.0

    def took(self: Speculation, step: Step, following: Step | None) -> None:
        nonlocal clock
        drafted = max(map(len, step.drafts)) if isinstance(step, SpeculativeStep) else 0
        clock += 1 + (0 if pays else drafted)
        finish(self, step, following)

    monkeypatch.setattr(Speculation, "finish", took)
    monkeypatch.setattr("kvant.engine.speculation.time", SimpleNamespace(perf_counter=lambda: clock))
    plain = [token for token, _ in Run(model, [5, 6, 7], model.make_cache(128), max_tokens=100)]
    drafts = KnownDrafts(text=[5, 6, 7, *plain], mistakes=0.33)
    run = Run(model, [5, 6, 7], model.make_cache(128), max_tokens=100, drafts=drafts)
    from_draft = []
    for token, _ in run:
        assert token == plain[len(from_draft)]
        from_draft.append(run.from_draft)
    counts = run.drafts
    assert counts is not None
    assert not any(from_draft[:3])  # until plain steps are measured
    assert counts.accepted == sum(from_draft)
    assert (counts.tokens, counts.off is None) == (99, pays)
    assert counts.tokens_a_step > 2 if pays else 0 < counts.drafted < 30

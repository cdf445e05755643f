"""What is proposed, and how many tokens of it."""

import random
from collections.abc import Sequence

import pytest
from kvant.engine.drafting.batch_choice import BatchChoice, StepKind

from kvant.engine.drafting.choice import Choice, StepCosts, costs_of
from kvant.engine.drafting.suffix import SuffixDrafter


class Model:
    pass


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
        # What follows some earlier occurrence of the match; a copy that reaches the text's end goes on with itself.
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


def _costs(costs: dict[int, float]) -> StepCosts:
    known = StepCosts()
    for _ in range(9):
        known.add_single(0.01)
    for size, ratio in costs.items():
        for _ in range(5):
            known.add(size, 0.01 * ratio)
    return known


def _with_rate(choice: Choice, match: int, rate: float) -> None:
    rng = random.Random(5)
    for _ in range(300):
        choice.saw(match, hit=rng.random() < rate)


@pytest.mark.parametrize(
    ("rate", "costs", "expected"),
    [
        (0.0, {2: 1.1, 4: 1.2, 8: 1.4}, 0),
        (1.0, {2: 1.1, 4: 1.2, 8: 1.4}, 7),
        (1.0, {2: 2.0, 4: 3.9, 8: 4.3}, 7),  # MLX's quantized product on a CPU: only the longest pays
        (0.6, {2: 1.1, 4: 1.2, 8: 9.0}, 3),
        (0.2, {2: 1.3, 4: 1.6, 8: 1.9}, 0),
        (1.0, {2: 2.2, 4: 4.4, 8: 8.8}, 0),
        (1.0, {}, 1),  # the first steps are the measurement, the smallest first
        (1.0, {2: 1.1}, 3),
        (1.0, {2: 1.1, 4: 9.0}, 1),
    ],
)
def test_as_many_as_pay(rate: float, costs: dict[int, float], expected: int) -> None:
    choice = Choice(_costs(costs))
    _with_rate(choice, 4, rate)
    assert choice.count(4, 7) == expected
    assert choice.count(4, 2) == min(expected, 1)
    assert choice.may_draft(4) == bool(expected)


def test_what_was_seen_of_matches() -> None:
    """Nothing is drafted before plain steps are measured. Longer matches go by their own record."""
    choice = Choice(StepCosts())
    _with_rate(choice, 4, 1.0)
    assert choice.count(4, 7) == 0
    choice = Choice(_costs({2: 1.2, 4: 1.4, 8: 1.8}))
    _with_rate(choice, 1, 0.05)
    _with_rate(choice, 10, 0.95)
    assert [choice.count(match, 7) for match in (1, 10, 40)] == [0, 7, 7]  # 40 as the next shorter ones
    assert [choice.may_draft(match) for match in (1, 10)] == [False, True]


def test_a_free_drafter_is_judged_without_drafting() -> None:
    choice, drafter = Choice(_costs({2: 1.2, 4: 1.4, 8: 1.8})), SuffixDrafter()
    rng = random.Random(3)
    text = [rng.randrange(1000) for _ in range(50)]
    choice.learn(drafter, text)
    assert choice.count(drafter.match, 7) == 0
    choice.learn(drafter, text[:40])
    assert choice.count(drafter.match, 7) == 7
    assert choice.counts.drafted == 0


def test_drafts_that_do_not_pay_are_switched_off() -> None:
    choice = Choice(_costs({2: 1.5, 4: 2.0, 8: 3.0}))
    _with_rate(choice, 4, 1.0)
    tried = 0
    while choice.count(4, 7):
        choice.verified(7, 0, 0.03)
        tried += 1
        assert tried < 4
    assert choice.counts.off is not None
    assert "cost the time of" in choice.counts.off
    assert not choice.may_draft(1000)
    drafter = SuffixDrafter()
    choice.learn(drafter, [1, 2, 1, 2])  # nobody asks it any more
    assert not drafter.propose(1)


def test_waiting_for_drafts_that_never_come_is_switched_off() -> None:
    """A step that waits for the token before it costs time too, where nothing is drafted after all."""
    choice = Choice(_costs({0: 1.5, 2: 1.5, 4: 2.0, 8: 3.0}))
    _with_rate(choice, 4, 1.0)
    _with_rate(choice, 1, 0.0)
    waited = 0
    while choice.may_draft(4):
        assert choice.count(1, 7) == 0
        choice.stepped(0.015, alone=True)
        waited += 1
        assert waited < 10
    assert choice.counts.off is not None


def test_costs_stay_with_the_model_and_grow_old() -> None:
    model = Model()
    costs = costs_of(model, "kind")
    assert costs_of(model, "kind") is costs
    assert costs_of(model, "another") is not costs
    assert costs_of(Model(), "kind") is not costs
    for _ in range(2):
        costs.add_single(0.01)
    for _ in range(3):
        costs.add(8, 0.5)  # a machine that was busy just then
    assert costs.get(8) == 50
    for _ in range(1000):
        costs.add_single(0.01)
    assert costs.get(8) is None


def test_later_answers_draft_where_earlier_ones_were_switched_off() -> None:
    """The counts do not say that drafts are off while tokens are drafted."""

    choice, kind = BatchChoice(Model(), "pool"), StepKind(at_once=True)
    for _ in range(3):
        choice.stepped(2, 0.01, kind=kind, ahead=True)
    while choice.verified(2, 7, 2, 0.09, kind=kind) is None:
        pass
    assert "cost the time of" in str(choice.counts.off)
    assert choice.verified(2, 7, 16, 0.09, kind=kind) is None
    assert choice.counts.off is None

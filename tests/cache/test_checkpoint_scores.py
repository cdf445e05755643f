"""Which checkpoint goes where there are too many."""

import random

import pytest

from kvant.cache.checkpoints import Checkpoint, Checkpoints
from kvant.cache.prefix import as_text

SYSTEM = list(range(100))
ANSWERED = [*SYSTEM, *[7] * 20]  # a question
ANSWER = [*ANSWERED, *[8] * 30]


def _keep(
    kept: Checkpoints, ids: list[int], asked: int | None = None, *, is_head: bool = False
) -> list[bytes]:
    """Keep a text under itself; the others that went for it."""
    text = as_text(ids, b"")
    kept.use(text)
    return kept.keep(text, Checkpoint(text, len(as_text(ids[:asked], b"")), is_head))


def _left(kept: Checkpoints, *texts: list[int]) -> list[bool]:
    return [as_text(ids, b"") in kept for ids in texts]


def test_a_superseded_one_goes_first_and_an_answer_does_not_supersede_its_question() -> None:
    kept = Checkpoints(3)
    _keep(kept, SYSTEM, is_head=True)
    _keep(kept, ANSWERED)
    _keep(kept, ANSWER, len(ANSWERED))
    kept.use(as_text(ANSWER, b""), by_prompt=True)
    _keep(kept, following := [*ANSWER, *[9] * 5])
    assert _left(kept, SYSTEM, ANSWERED, ANSWER, following) == [True, False, True, True]
    _keep(kept, [*following, 1])
    assert _left(kept, SYSTEM, ANSWER, following) == [True, False, True]


def test_an_answer_that_the_next_prompt_has_in_another_way_is_superseded() -> None:
    kept = Checkpoints(3)
    _keep(kept, SYSTEM, is_head=True)
    _keep(kept, ANSWERED)
    _keep(kept, ANSWER, len(ANSWERED))
    kept.use(as_text(ANSWERED, b""), by_prompt=True)
    _keep(kept, [*ANSWERED, *[9] * 5])
    assert _left(kept, SYSTEM, ANSWERED, ANSWER) == [True, True, False]
    _keep(kept, [*ANSWERED, *[9] * 9])
    assert _left(kept, SYSTEM, ANSWERED) == [True, False]


def test_what_saves_least_goes_and_old_ones_go_in_time() -> None:
    kept, other = Checkpoints(3), [[50 + number] * 20 for number in range(30)]
    _keep(kept, SYSTEM)
    for number, text in enumerate(other):
        _keep(kept, text)
        assert _left(kept, text) == [True]
        if number in (5, 29):
            assert _left(kept, SYSTEM) == [number == 5]
    _keep(kept, SYSTEM)
    assert _keep(kept, [1] * 3, 2), "an answer that saves less than the others is not kept"
    assert _left(kept, [1] * 3, SYSTEM) == [False, True]


def test_texts_of_others_supersede_nothing() -> None:
    kept = Checkpoints(3)
    _keep(kept, SYSTEM)
    _keep(kept, small := [4] * 10)
    text = as_text([*SYSTEM, *[1] * 500], b"another client's")
    kept.keep(text, Checkpoint(text, len(text)))
    _keep(kept, [3] * 50)
    assert _left(kept, SYSTEM, small) == [True, False]


@pytest.mark.parametrize("most", [1, 2, 3, 6])
def test_of_a_sequence_the_second_goes(most: int) -> None:
    """The first is a head: the end of the system prompt. Lengths are found, and go with the tokens."""
    rng = random.Random(most)
    kept = Checkpoints(most)
    expected: list[int] = []
    length = 0
    for _ in range(200):
        if rng.random() < 0.3:
            length = rng.choice([0, *range(0, length + 1, 3)])
            kept.drop_after(length)
            expected = [each for each in expected if each <= length]
        else:
            length += rng.randint(1, 9)
            text = as_text([number % 7 for number in range(length)], b"")
            kept.keep(text, Checkpoint(text, len(text), is_head=not kept))
            expected.append(length)
            if len(expected) > most:
                del expected[min(1, most - 1)]
        every = [each for each in range(length + 1) if kept.at(each) is not None]
        assert every == expected
        assert kept.last_before(length) == max((each for each in expected if each < length), default=0)

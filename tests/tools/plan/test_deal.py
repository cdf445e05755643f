"""The deal of layers against every other one."""

import random
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
from support.counts import count
from support.deals import every_deal

from kvant.errors import ModelError
from kvant.tools.plan.deal import deal

Used = Callable[[int, int, int], int]


def fullest(dealt: Sequence[range], limits: Sequence[int], used: Used) -> Fraction:
    """The largest part of a limit that is used."""
    return max(
        Fraction(used(rank, own.start, own.stop), limit)
        for rank, (own, limit) in enumerate(zip(dealt, limits, strict=True))
    )


def best(layers: int, limits: Sequence[int], used: Used) -> list[range]:
    """The rule of :func:`deal`, by looking at all deals, and again at all of what is before the last rank."""
    if not limits:
        return []
    *_, last = min(every_deal(layers, len(limits)), key=lambda dealt: (fullest(dealt, limits, used), dealt[-1].start))
    return [*best(last.start, limits[:-1], used), last]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_no_deal_is_better(ranks: int) -> None:
    rnd = random.Random(ranks)
    for _ in range(count(40, 1000)):
        layers = rnd.randint(ranks, 9)
        limits = [rnd.choice([rnd.randint(1, 40), 10**11 + rnd.randint(0, 9)]) for _ in range(ranks)]
        if rnd.random() < 0.3:  # alike, so that there are ties
            limits = [24] * ranks
        sizes = [rnd.randint(1, rnd.choice([1, 3, 30])) for _ in range(layers)]
        own = [rnd.randint(0, 20) for _ in range(ranks)]
        shared = [rnd.randint(0, 9) for _ in range(layers)]

        def used(rank: int, first: int, last: int) -> int:
            return own[rank] + sum(sizes[first:last]) + max(shared[first:last])  # noqa: B023

        assert deal(layers, limits, used) == best(layers, limits, used)


def test_equal_layers_on_equal_machines() -> None:
    assert [len(own) for own in deal(10, [7] * 4, lambda rank, first, last: last - first)] == [2, 2, 3, 3]
    # Rank 0 has two layers' worth of other things.
    dealt = deal(10, [7] * 4, lambda rank, first, last: last - first + 2 * (rank == 0))
    assert [len(own) for own in dealt] == [1, 3, 3, 3]
    # One machine has half of the memory.
    assert [len(own) for own in deal(10, [8, 4, 8], lambda rank, first, last: last - first)] == [4, 2, 4]


def test_each_rank_needs_a_layer() -> None:
    def used(rank: int, first: int, last: int) -> int:
        return last - first

    assert deal(3, [1, 0, 10**12], used) == [range(1), range(1, 2), range(2, 3)]
    with pytest.raises(ModelError, match="3 layers cannot be dealt out to 4 ranks: each needs one"):
        deal(3, [1] * 4, used)

"""Pages: handed out as few stretches, counted, and free again when nobody holds them."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.counts import count

from kvant.cache.pages import PAGE_SIZE, Pages, pages_for, runs
from kvant.errors import ContextError


def test_the_smallest_stretch_that_is_long_enough_is_taken() -> None:
    pages = Pages(20)
    held = [pages.allocate(n) for n in (5, 3, 4, 6)]
    assert held == [[*range(5)], [*range(5, 8)], [*range(8, 12)], [*range(12, 18)]]
    pages.release(held[0])
    pages.release(held[2])  # free: 0-4, 8-11, 18-19
    assert pages.allocate(4) == [8, 9, 10, 11]
    assert pages.allocate(3) == [0, 1, 2]
    assert pages.allocate(4) == [3, 4, 18, 19], "the longest first where none is long enough"
    with pytest.raises(ContextError, match="1 pages are needed; 0 of 20 are free"):
        pages.allocate(1)
    assert pages.allocate(0) == []


@settings(max_examples=count(50, 5000))
@given(
    st.integers(1, 40),
    st.lists(
        st.tuples(st.sampled_from(["allocate", "share", "release", "release"]), st.integers(0, 12)),
        max_size=40,
    ),
)
def test_a_page_is_free_when_nobody_holds_it(num: int, calls: list[tuple[str, int]]) -> None:
    pages, held = Pages(num), []
    for call, number in calls:
        if call == "allocate" and number <= pages.num_free:
            made = pages.allocate(number)
            assert len(made) == number
            assert not set(made) & {page for own in held for page in own}
            held.append(made)
        elif call == "share" and held:
            held.append(held[number % len(held)][number // 2 :])
            pages.share(held[-1])
        elif call == "release" and held:
            pages.release(held.pop(number % len(held)))
        holders = Counter(page for own in held for page in own)
        assert [pages.refcount(page) for page in range(num)] == [holders[page] for page in range(num)]
        assert pages.num_free == num - len(holders)
    for own in held:
        pages.release(own)
    assert pages.allocate(num) == [*range(num)], "one stretch again"
    pages.release([0])
    for use in (pages.release, pages.share):
        with pytest.raises(AssertionError, match="page 0 is free"):
            use([0])


def test_runs_join_neighbours() -> None:
    pages = [4, 5, 2, 9, 8]
    row = PAGE_SIZE
    assert runs(pages, 0, 5 * row) == [
        (4 * row, 6 * row),
        (2 * row, 3 * row),
        (9 * row, 10 * row),
        (8 * row, 9 * row),
    ]
    assert runs(pages, 100, row + 7) == [(4 * row + 100, 5 * row + 7)]
    assert runs(pages, 2 * row - 1, 2 * row + 1) == [(6 * row - 1, 6 * row), (2 * row, 2 * row + 1)]
    assert runs(pages, 3, 3) == []
    assert [pages_for(n) for n in (0, 1, 128, 129)] == [0, 1, 1, 2]

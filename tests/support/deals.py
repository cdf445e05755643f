"""Every way to deal layers out."""

from collections.abc import Iterator
from itertools import combinations, pairwise


def every_deal(layers: int, ranks: int) -> Iterator[list[range]]:
    for cuts in combinations(range(1, layers), ranks - 1):
        yield [range(*bounds) for bounds in pairwise((0, *cuts, layers))]

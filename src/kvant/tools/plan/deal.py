"""Layers dealt out to machines: contiguous, and so that the fullest machine is as empty as can be."""

from collections.abc import Callable, Sequence
from math import lcm

from kvant.errors import ModelError


def deal(layers: int, limits: Sequence[int], used: Callable[[int, int, int], int]) -> list[range]:
    """The layers of each rank, contiguous in the order of ranks, at least one each.

    The largest part of a rank's limit that is used is the smallest of all such deals. Of equal ones the last rank has
    the most layers, and those before are dealt out by the same rule. Every deal is looked at, in exact numbers.

    Args:
        layers: in all.
        limits: bytes that each rank may use.
        used: (rank, first layer, last layer and 1) -> bytes that the rank uses with these layers.

    Raises:
        ModelError: fewer layers than ranks.
    """
    check_layers(layers, len(limits))
    limits = [max(1, limit) for limit in limits]
    scales = [lcm(*limits) // limit for limit in limits]  # fractions, with one denominator
    # By rank and the layers that are dealt out to it and those before: the largest fraction, and where the rank begins.
    best: list[dict[int, tuple[int, int]]] = []
    for rank, scale in enumerate(scales):
        before = best[-1] if best else {0: (0, 0)}
        after = len(limits) - 1 - rank
        lasts = range(rank + 1, layers - after + 1) if after else [layers]
        best.append(
            {
                last: min(
                    (max(fullest, scale * used(rank, first, last)), first)
                    for first, (fullest, _) in before.items()
                    if first < last
                )
                for last in lasts
            }
        )
    dealt: list[range] = []
    last = layers
    for found in reversed(best):
        dealt.append(range(found[last][1], last))
        last = dealt[-1].start
    return dealt[::-1]


def check_layers(layers: int, ranks: int) -> None:
    """Refuse more ranks than layers.

    Raises:
        ModelError: there are.
    """
    if layers < ranks:
        raise ModelError(f"{layers} layers cannot be dealt out to {ranks} ranks: each needs one")

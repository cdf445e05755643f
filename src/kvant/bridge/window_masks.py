"""What the masks say that bridged caches made: the fused kernel takes numbers in place of an array of them.

mlx-lm's models ask one layer for a mask and use it in all layers of its kind. None of them changes it in place, which
would not be seen here (tests/bridge/test_hook.py tries all of them).
"""

import weakref
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class WindowMask:
    """Queries see the tokens up to their own, of those the last ``window`` and the first ``keep``.

    Attributes:
        start: the position of the first query.
        new_tokens: queries, at positions that follow one another.
        window: with the query's own; None: all.
        keep: of a ring.
        rows: that a ring has. None: a column is a position.
    """

    start: int
    new_tokens: int
    window: int | None = None
    keep: int = 0
    rows: int | None = None


# By the id of the mask. The mask is not held.
_known: dict[int, tuple["weakref.ref[mx.array]", WindowMask]] = {}


def remember(mask: mx.array, meaning: WindowMask) -> None:
    """Know this very array again, for as long as it lives."""
    place = id(mask)
    _known[place] = (weakref.ref(mask, lambda _: _known.pop(place, None)), meaning)


def meaning_of(mask: mx.array | str | None) -> WindowMask | None:
    """What a mask says; None: it is another array, or none."""
    known = _known.get(id(mask))
    return known[1] if known is not None and known[0]() is mask else None

"""What a server does and holds at one moment, for its health, its properties and its metrics.

The page reads :class:`kvant.server.live.Live` instead, whose counts and pages belong to one step.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvant.cache.disk import DiskCounts
from kvant.engine.drafts import DraftCounts
from kvant.engine.scheduler import Counts


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Plain numbers, which any thread may read: the sums of all loaded models."""

    counts: Counts  # requests that wait for a grammar are among those that wait
    is_alive: bool  # every engine's thread computes, or waits for work
    age_s: float  # since the oldest of the engines' last signs of life; 0.0 without work
    drafts: DraftCounts
    pages: int  # of the pool
    pool_bytes: int
    disk: DiskCounts | None  # None: there is no disk cache
    active_bytes: int  # of MLX's arrays
    cached_bytes: int  # that MLX keeps for reuse
    peak_bytes: int  # most bytes of MLX's arrays so far
    models: Mapping[str, bool]  # by name, whether each is loaded


def add_drafts(*counts: DraftCounts) -> DraftCounts:
    """Return the sums of several counts."""
    return DraftCounts(
        steps=sum(each.steps for each in counts),
        tokens=sum(each.tokens for each in counts),
        drafted=sum(each.drafted for each in counts),
        accepted=sum(each.accepted for each in counts),
    )

"""What a server does and holds at one moment, for its health, its properties and its metrics.

The page reads :class:`kvant.server.live.Live` instead, whose counts and pages belong to one step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from kvant.cache.disk import DiskCounts
from kvant.engine.drafts import DraftCounts
from kvant.engine.scheduler import Counts


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Plain numbers, which any thread may read: those of one model, or the sums of all loaded models."""

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
    models: Mapping[str, bool] = field(default_factory=dict)  # by name, whether each is loaded


def total(
    snapshots: Sequence[Snapshot], ended: DraftCounts, disk: DiskCounts | None, models: Mapping[str, bool]
) -> Snapshot:
    """Return the sums of several models' numbers.

    Args:
        snapshots: of the loaded models; there may be none.
        ended: what drafts did in models that are no longer loaded: counters never fall.
        disk, models: of :class:`Snapshot`.
    """
    drafts = add_drafts(ended, *(each.drafts for each in snapshots))
    return Snapshot(
        counts=Counts(*map(sum, zip(Counts(0, 0, 0, 0), *(each.counts for each in snapshots), strict=True))),
        is_alive=all(each.is_alive for each in snapshots),
        age_s=max((each.age_s for each in snapshots), default=0.0),
        drafts=drafts,
        pages=sum(each.pages for each in snapshots),
        pool_bytes=sum(each.pool_bytes for each in snapshots),
        disk=disk,
        active_bytes=mx.get_active_memory(),
        cached_bytes=mx.get_cache_memory(),
        peak_bytes=mx.get_peak_memory(),
        models=models,
    )


def add_drafts(*counts: DraftCounts) -> DraftCounts:
    """Return the sums of several counts."""
    return DraftCounts(
        steps=sum(each.steps for each in counts),
        tokens=sum(each.tokens for each in counts),
        drafted=sum(each.drafted for each in counts),
        accepted=sum(each.accepted for each in counts),
    )

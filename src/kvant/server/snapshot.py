"""The state of a server at one moment, for its health, its properties and its metrics.

The page reads :class:`kvant.server.live.Live` instead, whose counts and pages belong to one step.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvant.cache.disk import DiskCounts
from kvant.engine.drafts import DraftCounts
from kvant.engine.scheduler import Counts


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The sums of all loaded models; plain data, safe in any thread."""

    counts: Counts  # waiting includes requests that wait for a grammar
    is_alive: bool  # whether every engine's thread is alive
    age_s: float  # since the oldest of the engines' last heartbeats; 0.0 if idle
    drafts: DraftCounts
    pages: int  # of the pool
    pool_bytes: int
    disk: DiskCounts | None  # None: no disk cache
    active_bytes: int  # of MLX's arrays
    cached_bytes: int  # in MLX's buffer cache
    peak_bytes: int  # peak of MLX's arrays
    models: Mapping[str, bool]  # name -> whether it is loaded


def add_drafts(*counts: DraftCounts) -> DraftCounts:
    """Return the sums of several counts."""
    return DraftCounts(
        steps=sum(each.steps for each in counts),
        tokens=sum(each.tokens for each in counts),
        drafted=sum(each.drafted for each in counts),
        accepted=sum(each.accepted for each in counts),
    )

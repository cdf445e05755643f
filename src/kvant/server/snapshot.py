"""What a server does and holds at one moment: its health, its properties and its metrics read it.

The page reads :class:`kvant.server.live.Live` instead, whose counts and pages are of one step.
"""

from dataclasses import dataclass

from kvant.cache.disk import DiskCounts
from kvant.engine.drafts import DraftCounts
from kvant.engine.scheduler import Counts


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Plain numbers, that any thread may read."""

    counts: Counts  # requests that wait for a grammar are among those that wait
    is_alive: bool  # the engine's thread computes, or waits for work
    age_s: float  # since the engine's last sign of life; 0.0 without work
    drafts: DraftCounts
    pages: int  # of the pool
    pool_bytes: int
    disk: DiskCounts | None  # None: there is no disk cache
    active_bytes: int  # of MLX's arrays
    cached_bytes: int  # that MLX keeps for reuse
    peak_bytes: int  # most bytes of MLX's arrays so far

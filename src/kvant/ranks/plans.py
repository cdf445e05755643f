"""A step as rank 0 tells it to the others: plain data, and what they make of it."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvant.cache import ModelCache
from kvant.cache.paged_layers import PageTable
from kvant.cache.planned_batch import PlannedBatch
from kvant.cache.pool import Pool
from kvant.cache.pool_batch import PoolBatch
from kvant.errors import RanksError

Plan = Mapping[str, Any]


def pool_plan(batch: PoolBatch) -> dict[str, Any]:
    """Describe a batch's step: the pages that were copied since the last one, and each token's place."""
    parts, copies = batch.pool.parts, []
    for part in parts:
        copies.append(part.copied or [])
        part.copied = []
    tables = [[(t.first, t.pages) for t in (own.tables[n] for own in batch.sequences)] for n in range(len(parts))]
    lengths = [sequence.length for sequence in batch.sequences]
    return {"copies": copies, "tables": tables, "lengths": lengths, "rows": batch.rows}


def planned_batch(pool: Pool, plan: Plan) -> PlannedBatch:
    """Make the batch of a :func:`pool_plan` in this rank's pool."""
    for part, copies in zip(pool.parts, plan["copies"], strict=True):
        for page, to, rows in copies:
            part.copy(page, to, rows)
    tables = [[PageTable(first, pages, len(pages)) for first, pages in own] for own in plan["tables"]]
    return PlannedBatch(pool, tables, plan["lengths"], plan["rows"])


def align(cache: ModelCache, lengths: Sequence[int]) -> None:
    """Commit or forget tokens, so that this cache has those of rank 0's at the beginning of a step.

    What rank 0 has committed of the last step, or forgotten since, is seen in its length.
    """
    (length,), step = lengths, cache.step
    if step is not None and 0 < (new := length - cache.offset) <= step.shape[1]:
        cache.commit(None if new == step.shape[1] else new)
    elif step is not None:
        cache.end_step()
    if not length:
        cache.reset()
    elif length > cache.offset:
        raise RanksError(f"the cache holds {cache.offset} tokens; rank 0's has {length}")
    else:
        cache.trim_to(length)

"""The loop of the other ranks, which compute rank 0's steps until it ends."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import mlx.core as mx

from kvant.cache import ModelCache
from kvant.cache.deferred_writes import DeferredWrites
from kvant.cache.exact_tail import DeferredTail
from kvant.cache.layer_group import PageTable
from kvant.cache.options import CacheOptions
from kvant.cache.pool import Pool
from kvant.cache.pool_batch import PoolBatch, place_rows
from kvant.errors import RanksError
from kvant.models import LanguageModel
from kvant.operators.exact_rows import ExactSpan
from kvant.ranks.guard import Guard

Plan = Mapping[str, Any]  # rank 0's description of a step: plain data
CALLS = ("__call__", "feed", "next_logits", "every_logits", "every_hidden_state")


class PlannedBatch(PoolBatch):
    """A model's view of a pool in one step whose sequences are in another process."""

    def __init__(
        self,
        pool: Pool,
        tables: Sequence[Sequence[PageTable]],
        lengths: Sequence[int],
        rows: int,
        tails: Sequence[ExactSpan],
    ) -> None:
        """
        Args:
            tables: for each layer group, each sequence's pages.
            lengths: of the sequences. Further ``rows`` are padding.
            tails: each sequence's exact rows; may be empty.
        """
        self.pool = pool
        self.lock = pool.lock
        self.sequences = ()
        self.rows = rows
        self.step: mx.array | None = None
        self.embeddings: mx.array | None = None
        self._placed = {}
        self.deferred = DeferredWrites(self.sequences, is_single=False)
        self._tails = tails
        self._tables = tables
        self._lengths = tuple(lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        return (*self._lengths, *(0,) * (self.rows - len(self._lengths)))

    def begin(self, inputs: mx.array) -> tuple[int, ...]:
        S = inputs.shape[1]
        exact = None
        if self._tails:
            is_fused = self.pool.backend is not None
            exact = self.deferred.place_tails(self._tails, self._lengths, S, fused=is_fused)
        placed = zip(self.pool.groups, self._tables, strict=True)
        self._placed = {
            group: replace(place_rows(group, tables, self._lengths, S), exact=exact)
            for group, tables in placed
        }
        self.step = inputs
        return self.lengths


class Follower:
    """A rank's shard of the model, with counterparts of rank 0's caches and pools."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._caches: dict[int, ModelCache] = {}
        self._pools: dict[int, Pool] = {}
        self._deferred: dict[tuple[int, int], DeferredTail] = {}  # by pool and page

    def obey(self, message: Plan) -> Any | None:
        """Execute rank 0's message; return the reply that rank 0 waits for, or None."""
        for dropped in message["dropped"]:
            if dropped in self._pools:
                del self._pools[dropped]
                self._deferred = {key: tail for key, tail in self._deferred.items() if key[0] != dropped}
            else:
                del self._caches[dropped]
        number = message["number"]
        if "make" in message:
            sizes = message["sizes"]
            options = CacheOptions.from_json(message["options"])
            if message["make"] == "pool":
                self._pools[number] = self._model.make_pool(**sizes, options=options)
            else:
                self._caches[number] = self._model.reserve_cache(**sizes, options=options)
            return []
        call = message["call"]
        if call not in CALLS:
            raise AssertionError(f"rank 0 calls {call}")
        batch: PoolBatch
        if number in self._pools:
            batch = self._planned_batch(number, message)
        else:
            cache = self._caches[number]
            _align(cache, message["lengths"])
            batch = cache.batch
        mx.eval(getattr(self._model, call)(mx.array(message["ids"]), cache=batch), batch.deferred.arrays)
        for (page, _, _), tail in zip(message.get("tails", ()), batch.deferred.tails, strict=False):
            self._deferred[number, page] = tail
        if call == "feed":
            mx.clear_cache()  # free a chunk's activations, as on rank 0
        return None

    def _planned_batch(self, number: int, plan: Plan) -> PlannedBatch:
        """Make the batch that rank 0 has planned, in this rank's pool."""
        pool = self._pools[number]
        for group, copies in zip(pool.groups, plan["copies"], strict=True):
            for page, to, rows in copies:
                group.copy(page, to, rows)
            group.take_copies()  # discard: no other rank needs them
        for kind, page, *numbers in plan["tail_events"]:
            assert pool.tails is not None
            if kind == "clear":
                pool.tails.clear(page)
            elif kind == "copy":
                pool.tails.copy(page, *numbers)
            else:
                length, count = numbers
                tail = self._deferred[number, page]  # rank 0 may repeat it after an interruption
                assert tail.length == length
                span = ExactSpan(page)
                tail.commit(span, count)
                pool.tails.write(span, tail)
        if pool.tails is not None:
            pool.tails.take_events()
        tables = [[PageTable(first, pages, len(pages)) for first, pages in each] for each in plan["tables"]]
        tails = [ExactSpan(*each) for each in plan["tails"]]
        return PlannedBatch(pool, tables, plan["lengths"], plan["rows"], tails)


def follow(model: LanguageModel, guard: Guard) -> NoReturn:
    """Compute this rank's share of every step until rank 0's end raises :class:`kvant.ranks.guard.Ended`."""
    follower = Follower(model)
    while True:
        reply = follower.obey(guard.receive())
        if reply is not None:
            guard.gather(reply)


def _align(cache: ModelCache, lengths: Sequence[int]) -> None:
    """Commit or forget tokens so that this cache matches rank 0's before a step.

    Rank 0's length shows how much of the last step it committed, or has forgotten since.
    """
    (length,) = lengths
    step = cache.batch.step
    if step is not None and 0 < (new := length - cache.offset) <= step.shape[1]:
        cache.commit(None if new == step.shape[1] else new)
    elif step is not None:
        cache.batch.end_step()
    if not length:
        cache.reset()
    elif length > cache.offset:
        raise RanksError(f"the cache holds {cache.offset} tokens; rank 0's has {length}")
    else:
        cache.trim_to(length)

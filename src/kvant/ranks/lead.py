"""Rank 0's model, which announces every step to the other ranks before computing it."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, finalize

import mlx.core as mx

from kvant.cache import KVCache, ModelCache
from kvant.cache.identity import Identity
from kvant.cache.options import DEFAULT_OPTIONS, CacheOptions
from kvant.cache.pool import Pool
from kvant.cache.pool_batch import PoolBatch
from kvant.errors import RanksError, one_line
from kvant.models import LanguageModel
from kvant.models.inputs import Cached, Offset
from kvant.models.language_model import CacheMaker
from kvant.ranks.group import Ranks, Traffic
from kvant.ranks.guard import Guard

Computed = TypeVar("Computed", mx.array, list[mx.array])
NOTICED_S = 1.0  # for the guard to notice that another rank is gone, which MLX's error does not say


class Lead(CacheMaker):
    """A :class:`kvant.models.LanguageModel` that all ranks compute.

    The other ranks compute the same steps on their shards, with the ids in rank 0's messages. A step is
    evaluated before it is returned. Caches and pools must be made by this model, and cannot be saved, loaded
    or forked.
    """

    embedding_size: int | None = None  # the other ranks compute from ids
    divided = True

    def __init__(
        self,
        model: LanguageModel,
        ranks: Ranks,
        guard: Guard,
        whole: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """``model``: rank 0's shard. ``whole``: context of a step, which delays Ctrl-C until all have it."""
        self.local = model
        self.ranks = ranks
        self.step_traffic = Traffic()  # of rank 0 in the last step
        self.config = model.config
        self.dtype = model.dtype
        self.arrays = model.arrays
        self.nbytes = model.nbytes
        self.nbytes_read = model.nbytes_read
        self.feeds_last_token_separately = model.feeds_last_token_separately
        self.computes_at_once = model.computes_at_once
        self._guard = guard
        self._whole = whole
        self._numbers: WeakKeyDictionary[object, int] = WeakKeyDictionary()  # of pools
        self._made = 0
        self._dropped: list[int] = []
        self._broken = False

    @property
    def identity(self) -> Identity | None:
        return self.local.identity

    @identity.setter
    def identity(self, identity: Identity | None) -> None:
        self.local.identity = identity

    def __call__(self, inputs: mx.array, offset: Offset = None, cache: Cached = None) -> mx.array:
        """Compute the logits of every position and commit the step. ``cache`` is one of this model's."""
        if cache is None:
            raise RanksError("a model on several ranks computes through a cache; got none")
        return self._step(self.local.__call__, inputs, cache)

    def feed(self, inputs: mx.array, cache: PoolBatch) -> list[mx.array]:
        return self._step(self.local.feed, inputs, cache)

    def next_logits(self, inputs: mx.array, cache: PoolBatch) -> mx.array:
        return self._step(self.local.next_logits, inputs, cache)

    def every_logits(self, inputs: mx.array, cache: PoolBatch) -> mx.array:
        return self._step(self.local.every_logits, inputs, cache)

    def every_hidden_state(self, inputs: mx.array, cache: PoolBatch) -> mx.array:
        return self._step(self.local.every_hidden_state, inputs, cache)

    def check_cache(self, cache: Sequence[KVCache]) -> ModelCache:
        return self.local.check_cache(cache)

    def reserve_cache(self, max_seq_len: int | None, options: CacheOptions) -> ModelCache:
        """Reserve a cache on every rank."""
        cache = self.local.reserve_cache(max_seq_len, options)
        self._announce(cache.pool, "cache", {"max_seq_len": max_seq_len}, options)
        return cache

    def make_pool(self, tokens: int, *, options: CacheOptions = DEFAULT_OPTIONS, **sizes: Any) -> Pool:
        """Reserve a pool on every rank."""
        pool = self.local.make_pool(tokens, **sizes, options=options)
        self._announce(pool, "pool", {"tokens": tokens, **sizes}, options)
        return pool

    def _announce(self, made: object, kind: str, sizes: dict[str, Any], options: CacheOptions) -> None:
        """Make the other ranks make the same, without the model's digest, which only rank 0 checks."""
        if options.kv_format is not None:
            options = replace(options, kv_format=replace(options.kv_format, model=""))
        number = self._made
        self._made += 1
        with self._whole():
            self._tell({"make": kind, "number": number, "sizes": sizes, "options": options.as_json()})
            self._guard.gather([])
        self._numbers[made] = number
        finalize(made, self._dropped.append, number)

    def _step(
        self, call: Callable[..., Computed], inputs: mx.array, cache: Sequence[KVCache] | PoolBatch
    ) -> Computed:
        batch = cache if isinstance(cache, PoolBatch) else self.check_cache(cache).batch
        if (number := self._numbers.get(batch.pool)) is None:
            raise RanksError(
                "the cache is not of this model; on several ranks expected one of model.make_cache"
            )
        batch.begin(inputs)  # raises if it does not fit, before the other ranks know of the step
        ids = inputs.tolist()
        plan = {"lengths": batch.lengths} if batch.pool.single else _pool_plan(batch)
        self.ranks.traffic = Traffic()
        with self._whole():
            self._tell({"call": call.__name__, "number": number, "ids": ids, **plan})
            try:
                result = call(inputs, cache=batch)
                mx.eval(result)
            except (RuntimeError, ValueError) as error:
                self._broken = True  # the other ranks wait for messages that will not come
                time.sleep(NOTICED_S)
                raise RanksError(f"rank 0 failed in a step: {one_line(error)}") from error
        self.step_traffic = self.ranks.traffic
        return result

    def _tell(self, message: dict[str, Any]) -> None:
        if self._broken:
            raise RanksError("a step failed on rank 0; the run is over")
        dropped = self._dropped[:]
        del self._dropped[: len(dropped)]
        self._guard.tell({**message, "dropped": dropped})


def _pool_plan(batch: PoolBatch) -> dict[str, Any]:
    """Describe a batch's step: copies of pages since the last one, and the pages of its sequences."""
    groups = batch.pool.groups
    copies = [group.take_copies() for group in groups]
    tables = [
        [(t.first, t.pages) for t in (each.tables[n] for each in batch.sequences)] for n in range(len(groups))
    ]
    lengths = [sequence.length for sequence in batch.sequences]
    tails = batch.pool.tails
    events = [] if tails is None else tails.take_events()
    spans = [each.tail for each in batch.sequences if each.tail is not None]
    numbers = [(span.page, span.sinks, span.start) for span in spans]
    return {
        "tail_events": events,
        "tails": numbers,
        "copies": copies,
        "tables": tables,
        "lengths": lengths,
        "rows": batch.rows,
    }

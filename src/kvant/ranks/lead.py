"""Rank 0's model: the other ranks are told of every step before it is computed."""

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
NOTICED_S = 1.0  # for the guard, which knows whether another rank is gone; MLX's error does not say so


class Lead(CacheMaker):
    """A :class:`kvant.models.LanguageModel` that is computed by all ranks.

    The others compute the same steps on their parts, and have no tokens of their own to choose: ids are in
    what they are told. A step is evaluated before it is returned. Caches and pools are those that this model
    makes. They cannot be saved, loaded or forked.
    """

    embedding_size: int | None = None  # the other ranks compute from ids
    divided = True

    def __init__(
        self,
        part: LanguageModel,
        ranks: Ranks,
        guard: Guard,
        whole: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """``part``: rank 0's. ``whole``: a step is computed in it; it keeps Ctrl-C until the others have
        theirs.
        """
        self.part, self.ranks = part, ranks
        self.step_traffic = Traffic()  # what rank 0 sent, received and summed in the last step
        self.config, self.dtype, self.arrays = part.config, part.dtype, part.arrays
        self.nbytes, self.nbytes_read = part.nbytes, part.nbytes_read
        self.feeds_last_token_separately = part.feeds_last_token_separately
        self.computes_at_once = part.computes_at_once
        self._guard, self._whole = guard, whole
        self._numbers: WeakKeyDictionary[object, int] = WeakKeyDictionary()  # of pools
        self._made = 0
        self._dropped: list[int] = []
        self._broken = False

    @property
    def identity(self) -> Identity | None:
        return self.part.identity

    @identity.setter
    def identity(self, identity: Identity | None) -> None:
        self.part.identity = identity

    def __call__(self, inputs: mx.array, offset: Offset = None, cache: Cached = None) -> mx.array:
        """Compute the logits of every position and commit the step. ``cache`` is one of this model's."""
        if cache is None:
            raise RanksError("a model on several ranks computes through a cache; given none")
        return self._step(self.part.__call__, inputs, cache)

    def feed(self, inputs: mx.array, cache: PoolBatch) -> list[mx.array]:
        return self._step(self.part.feed, inputs, cache)

    def next_logits(self, inputs: mx.array, cache: PoolBatch) -> mx.array:
        return self._step(self.part.next_logits, inputs, cache)

    def every_logits(self, inputs: mx.array, cache: PoolBatch) -> mx.array:
        return self._step(self.part.every_logits, inputs, cache)

    def every_hidden_state(self, inputs: mx.array, cache: PoolBatch) -> mx.array:
        return self._step(self.part.every_hidden_state, inputs, cache)

    def check_cache(self, cache: Sequence[KVCache]) -> ModelCache:
        return self.part.check_cache(cache)

    def reserve_cache(self, max_seq_len: int | None, options: CacheOptions) -> ModelCache:
        """Reserve a cache on every rank."""
        cache = self.part.reserve_cache(max_seq_len, options)
        self._announce(cache.pool, "cache", {"max_seq_len": max_seq_len}, options)
        return cache

    def make_pool(self, tokens: int, *, options: CacheOptions = DEFAULT_OPTIONS, **sizes: Any) -> Pool:
        """Reserve a pool on every rank."""
        pool = self.part.make_pool(tokens, **sizes, options=options)
        self._announce(pool, "pool", {"tokens": tokens, **sizes}, options)
        return pool

    def _announce(self, made: object, kind: str, sizes: dict[str, Any], options: CacheOptions) -> None:
        """Have the others make the same. The others do not know the model's digest, which was checked
        here.
        """
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
        batch.begin(inputs)  # refuses what does not fit, before the others are told
        ids = inputs.tolist()
        plan = {"lengths": batch.lengths} if batch.pool.single else _pool_plan(batch)
        self.ranks.traffic = Traffic()
        with self._whole():
            self._tell({"call": call.__name__, "number": number, "ids": ids, **plan})
            try:
                result = call(inputs, cache=batch)
                mx.eval(result)
            except (RuntimeError, ValueError) as error:
                self._broken = True  # the others wait for what does not come
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
    """Describe a batch's step: what was done to pages since the last one, and each token's place."""
    groups = batch.pool.groups
    copies = [group.take_copies() for group in groups]
    tables = [
        [(t.first, t.pages) for t in (own.tables[n] for own in batch.sequences)] for n in range(len(groups))
    ]
    lengths = [sequence.length for sequence in batch.sequences]
    tails = batch.pool.tails
    events = [] if tails is None else tails.take_events()
    spans = [own.tail for own in batch.sequences if own.tail is not None]
    numbers = [(span.page, span.sinks, span.start) for span in spans]
    return {
        "tail_events": events,
        "tails": numbers,
        "copies": copies,
        "tables": tables,
        "lengths": lengths,
        "rows": batch.rows,
    }

"""The other ranks compute what rank 0 tells them, until it ends."""

from typing import Any, NoReturn

import mlx.core as mx

from kvant.cache import ModelCache
from kvant.cache.pool import Pool
from kvant.cache.pool_batch import PoolBatch
from kvant.models import LanguageModel
from kvant.ranks.guard import Guard
from kvant.ranks.plans import Plan, align, planned_batch

CALLS = ("__call__", "feed", "next_logits", "every_logits")


class Follower:
    """A rank's part of the model, with the caches and pools that rank 0 has."""

    def __init__(self, part: LanguageModel) -> None:
        self._part = part
        self._held: dict[int, ModelCache | Pool] = {}

    def obey(self, message: Plan) -> Any | None:
        """Do what rank 0 tells. Returns what it waits for; None: it does not."""
        for number in message["dropped"]:
            del self._held[number]
        if "make" in message:
            self._held[message["number"]] = self._make(message)
            return []
        self._compute(self._held[message["number"]], message)
        return None

    def _make(self, message: Plan) -> ModelCache | Pool:
        options: dict[str, Any] = dict(message["options"])
        if message["make"] == "pool":
            return self._part.make_pool(options.pop("tokens"), **options)
        return self._part.make_cache(options.pop("max_seq_len"), **options)

    def _compute(self, held: ModelCache | Pool, message: Plan) -> None:
        cache: ModelCache | PoolBatch
        if isinstance(held, Pool):
            cache = planned_batch(held, message)
        else:
            align(held, message["lengths"])
            cache = held
        call = message["call"]
        if call not in CALLS:
            raise AssertionError(f"rank 0 calls {call}")
        mx.eval(getattr(self._part, call)(mx.array(message["ids"]), cache=cache))
        if call == "feed":
            mx.clear_cache()  # a chunk's activations, as on rank 0


def follow(part: LanguageModel, guard: Guard) -> NoReturn:
    """Compute this rank's part of every step, until rank 0 ends the run: :class:`kvant.ranks.guard.Ended`."""
    follower = Follower(part)
    while True:
        reply = follower.obey(guard.receive())
        if reply is not None:
            guard.gather(reply)

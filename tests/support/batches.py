"""Requests through a scheduler, and what a single run makes of each."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from queue import SimpleQueue
from typing import Any

import mlx.core as mx

from kvant.cache import CacheOptions
from kvant.cache.pool import Pool
from kvant.engine.batch_engine import BatchEngine
from kvant.engine.cache_scheduler import CacheScheduler
from kvant.engine.request import Request, Token
from kvant.engine.scheduler import Scheduler
from kvant.models import Decoder
from kvant.sample_utils import make_logits_processors, make_sampler

PAGES = 40


def _second(logprobs: mx.array) -> mx.array:
    """A sampler of the caller's: the second most probable token."""
    return mx.argsort(-logprobs, axis=-1)[:, 1]


# Options of requests: kvant's own samplers and processors, and others among them.
OPTIONS: list[dict[str, Any]] = [
    {},
    {"sampler": make_sampler(1.0, seed=3)},
    {"sampler": make_sampler(0.7, 0.9, top_k=40, min_p=0.01, seed=4), "max_tokens": 9},
    {"logits_processors": make_logits_processors({5: -9.0}, 1.3)},
    {"logits_processors": [lambda tokens, logits: logits.at[:, tokens[-3:]].add(-2.0)]},
    {"sampler": _second},
    {
        "sampler": make_sampler(1.5, seed=5),
        "logits_processors": make_logits_processors(None, 1.1),
        "max_tokens": 1,
    },
    {"top_logprobs": 4},
]


def scheduler_of(model: Decoder, bits: int = 0, pages: int = PAGES, **options: Any) -> tuple[Scheduler, Pool]:
    """A scheduler and its pool; ``pool``: further sizes of that."""
    batch = options.pop("max_batch", 8)
    group = options.pop("kv_group_size", None)
    stored = CacheOptions(bits, group, checkpoints=options.pop("checkpoints", 0))
    pool = model.make_pool(128 * pages, sequences=batch, **options.pop("pool", {}), options=stored)
    return Scheduler(model, pool, max_batch=batch, **options), pool


def run_all(scheduler: Scheduler, requests: Sequence[Request] = ()) -> dict[Request, list[Token]]:
    """The tokens of each request, once all is done."""
    for request in requests:
        scheduler.submit(request)
    told = defaultdict(list)
    while not scheduler.idle:
        for token in scheduler.step():
            told[token.request].append(token)
    return told


def ids_of(tokens: Sequence[Token], answer: int = 0) -> list[int]:
    return [token.token for token in tokens if token.answer == answer and token.token is not None]


@cache
def alone(model: Decoder, request: Request, bits: int = 0, reserved: int = 1024) -> list[int]:
    """The tokens of a request that has a cache to itself. A request draws the same ones each time."""
    own = model.make_cache(reserved, kv_bits=bits)
    single = replace(request, answers=1, cache=None, keep_cache=False, drafts=None)
    return ids_of([*CacheScheduler(model, own).answer([single])])


def asked(engine: BatchEngine, request: Request) -> Iterator[Token]:
    """Submit a request now. Its tokens of all answers, as they come; an error is raised."""
    tokens: SimpleQueue[Token] = SimpleQueue()
    engine.submit(request, tokens.put)

    def told() -> Iterator[Token]:
        left = request.answers
        while left:
            token = tokens.get()
            if token.error is not None:
                raise token.error
            left -= token.finish_reason is not None
            yield token

    return told()

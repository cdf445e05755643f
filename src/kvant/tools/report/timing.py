"""The time of a decode step through each cache, in turns."""

from collections.abc import Iterator, Sequence
from functools import partial

import mlx.core as mx

from kvant.engine.decode import decode
from kvant.engine.sampling import greedy
from kvant.models import Decoder
from kvant.tools.bench.latency import medians_in_turns
from kvant.tools.report.teacher import Cache

STEPS, ROUNDS = 8, 5


def step_ms(model: Decoder, caches: Sequence[Cache]) -> list[float]:
    """Median milliseconds of a token, with a text in the caches, whose content is of no use afterwards.

    Args:
        caches: each with the same tokens, at least ``STEPS`` + 1, the last of which give way to those fed.
    """
    return medians_in_turns([partial(_run, model, cache) for cache in caches], ROUNDS)


def _run(model: Decoder, cache: Cache) -> Iterator[object]:
    for layer in cache:
        layer.trim(STEPS + 1)
    # Any token takes the same time.
    logits = model.logits(model.hidden_states(mx.array([[0]]), cache=cache)[:, -1])
    steps = decode(model, logits, [], cache, max_tokens=STEPS + 1, sampler=greedy)
    next(steps)
    return steps

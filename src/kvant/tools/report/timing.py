"""The time of a decode step through each cache, in turns."""

from collections.abc import Sequence
from statistics import median

import mlx.core as mx

from kvant.engine.decode import decode
from kvant.engine.sampling import greedy
from kvant.models import Decoder
from kvant.tools.bench.latency import timed
from kvant.tools.report.teacher import Cache

STEPS, ROUNDS = 8, 5


def step_ms(model: Decoder, caches: Sequence[Cache]) -> list[float]:
    """Median milliseconds of a token, with a text in the caches; what they hold is of no use afterwards.

    Caches take turns, forwards and backwards, so that a machine that grows slower favors none.

    Args:
        caches: each with the same tokens, at least ``STEPS`` + 1, the last of which give way to those fed.
    """
    times: list[list[float]] = [[] for _ in caches]
    order = list(range(len(caches)))
    for number in range(1 + ROUNDS):
        for index in order:
            latencies = _run(model, caches[index])
            if number:  # the first round compiles and fills the processor's caches
                times[index] += latencies
        order.reverse()
    return [median(own) for own in times]


def _run(model: Decoder, cache: Cache) -> list[float]:
    for layer in cache:
        layer.trim(STEPS + 1)
    # Any token takes the same time.
    logits = model.logits(model.hidden_states(mx.array([[0]]), cache=cache)[:, -1])
    steps = decode(model, logits, [], cache, max_tokens=STEPS + 1, sampler=greedy)
    next(steps)
    return [ms for _, ms in timed(steps)]

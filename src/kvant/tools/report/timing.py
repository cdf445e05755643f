"""The time of a decode step through each cache, in turns."""

from collections.abc import Iterator, Sequence
from functools import partial

from kvant.cache import ModelCache
from kvant.engine.run import Run
from kvant.models import Decoder
from kvant.tools.bench.latency import medians_in_turns

STEPS, ROUNDS = 8, 5


def step_ms(model: Decoder, caches: Sequence[ModelCache]) -> list[float]:
    """Median milliseconds of a token, with a text in the caches, whose content is of no use afterwards.

    Args:
        caches: each with the same tokens, at least ``STEPS`` + 1, the last of which give way to those fed.
    """
    return medians_in_turns([partial(_run, model, cache) for cache in caches], ROUNDS)


def _run(model: Decoder, cache: ModelCache) -> Iterator[object]:
    cache.trim(STEPS + 1)
    steps = Run(model, [0], cache, max_tokens=STEPS + 1)  # any token takes the same time
    next(steps)
    return steps

"""The time of a decode step through each cache, in turns."""

from collections.abc import Iterator, Sequence
from functools import partial

from kvant.cache import ModelCache
from kvant.engine.run import Run
from kvant.models import Decoder, LanguageModel
from kvant.tools.bench.latency import medians_in_turns

STEPS, ROUNDS = 8, 5


def step_ms(model: LanguageModel, caches: Sequence[ModelCache]) -> list[float]:
    """Median milliseconds of a token, with a text in the caches, whose content is of no use afterwards.

    Args:
        caches: each with the same tokens, at least ``STEPS`` + 1, the last of which give way to those fed. Where they
            cannot, because a state has moved on, the new ones go behind them: :func:`timing_room` more tokens.
    """
    return medians_in_turns([partial(_run, model, cache) for cache in caches], ROUNDS)


def timing_room(model: LanguageModel) -> int:
    """Tokens that :func:`step_ms` may feed behind a text; a decoder's cache goes back instead."""
    return 0 if isinstance(model, Decoder) else (1 + ROUNDS) * (STEPS + 1)


def _run(model: LanguageModel, cache: ModelCache) -> Iterator[object]:
    if cache.can_trim_to(cache.offset - STEPS - 1):
        cache.trim(STEPS + 1)
    steps = Run(model, [0], cache, max_tokens=STEPS + 1)  # any token takes the same time
    next(steps)
    return steps

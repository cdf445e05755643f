"""Which is faster on this device: queueing a decode step before the last token is read, or after."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from kvant.engine.load import POCKET, find_model
from kvant.engine.run import Run
from kvant.models import Decoder, load_decoder
from kvant.tools.bench.latency import medians_in_turns

DEPTHS = (0, 1)
ROUNDS, STEPS, WARM_UP = 6, 32, 4
PROMPT = list(range(3, 67))
RESERVED = 2048


@dataclass(frozen=True, slots=True)
class LookAhead:
    """Median milliseconds of a token of the embedded model, with the next step queued after it and before it."""

    after_ms: float
    before_ms: float

    @property
    def faster(self) -> int:
        """The depth that is faster; kvant's own is 0."""
        return int(self.before_ms < self.after_ms)


def measure_look_ahead() -> LookAhead:
    """Both depths in turns, forwards and backwards; the first round is a warm-up."""
    model = load_decoder(find_model(POCKET))
    return LookAhead(*medians_in_turns([partial(_run, model, depth) for depth in DEPTHS], ROUNDS))


def _run(model: Decoder, depth: int) -> Iterator[object]:
    cache = model.make_cache(RESERVED)
    steps = Run(model, PROMPT, cache, max_tokens=WARM_UP + STEPS, look_ahead=depth)
    for _ in range(WARM_UP):
        next(steps)
    return steps

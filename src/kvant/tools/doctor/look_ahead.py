"""Which is faster on this device: queueing a decode step before the last token is read, or after."""

from dataclasses import dataclass
from statistics import median

from kvant.engine.decode import decode
from kvant.engine.load import POCKET, find_model
from kvant.engine.prefill import prefill
from kvant.engine.sampling import greedy
from kvant.models import Decoder, load_decoder
from kvant.tools.bench.latency import latencies_ms

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
    times: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    order = list(DEPTHS)
    for number in range(1 + ROUNDS):
        for depth in order:
            latencies = _run(model, depth)
            if number:
                times[depth] += latencies
        order.reverse()
    return LookAhead(*(median(times[depth]) for depth in DEPTHS))


def _run(model: Decoder, depth: int) -> list[float]:
    cache = model.make_cache(RESERVED)
    logits = prefill(model, PROMPT, cache, step_size=512)
    steps = decode(model, logits, PROMPT, cache, max_tokens=WARM_UP + STEPS, sampler=greedy, look_ahead=depth)
    for _ in range(WARM_UP):
        next(steps)
    return latencies_ms(steps)

"""The time between the items of an iteration."""

import time
from collections.abc import Iterable


def latencies_ms(steps: Iterable[object]) -> list[float]:
    """Iterate to the end; milliseconds each item took, the first one's since the call."""
    latencies = []
    last = time.perf_counter()
    for _ in steps:
        now = time.perf_counter()
        latencies.append((now - last) * 1e3)
        last = now
    return latencies

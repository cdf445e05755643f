"""What the fused kernel's first use takes in a process: MLX keeps nothing that it compiled for Metal."""

import time
from dataclasses import dataclass

from kvant.operators import dispatch
from kvant.operators.kernels import launch
from kvant.operators.kernels.launch import Backend
from kvant.operators.self_check import self_check


@dataclass(frozen=True, slots=True)
class Compiling:
    """The self-check for the first time, and again: the difference is what its instances took to compile.

    Attributes:
        instances: texts that were compiled. A model's own come on top where it needs others.
        first_ms, again_ms: of the whole self-check.
    """

    instances: int
    first_ms: float
    again_ms: float

    @property
    def compile_ms(self) -> float:
        return max(0.0, self.first_ms - self.again_ms)


def measure_compiling(backend: Backend) -> Compiling | None:
    """Run the self-check as the first cache does. None: it failed, or it has run in this process before."""
    before = len(launch.instances)
    started = time.perf_counter()
    failure = dispatch.self_check_failure(backend)
    first_ms = (time.perf_counter() - started) * 1e3
    instances = len(launch.instances) - before
    if failure is not None or not instances:
        return None
    started = time.perf_counter()
    self_check(backend)
    return Compiling(instances, first_ms, (time.perf_counter() - started) * 1e3)

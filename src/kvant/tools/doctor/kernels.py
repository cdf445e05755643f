"""Compare the fused kernel with the unfused operator: error and time of each case on this device."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import mlx.core as mx

from kvant.errors import one_line
from kvant.operators import kernel_record
from kvant.operators.kernel_record import RIGHT
from kvant.operators.kernels.attend import HEAD_DIMS
from kvant.operators.kernels.launch import Backend
from kvant.operators.probe import Call, KernelUse, Trial, num_instances, probe_calls, probe_failure
from kvant.operators.quantization import FITTED_BITS
from kvant.tools.doctor.attention import kvant_step
from kvant.tools.statistics import median_ms

# Query heads, kv heads, head_dim and bits; every cache has TOKENS tokens.
TIMED = ((14, 2, 64, 8), (32, 8, 128, 8), (32, 8, 128, 4), (16, 8, 256, 0))
TOKENS = 4096
START = TIMED[0]
REPEATS = 5
DTYPES = (mx.float16, mx.bfloat16)  # the compute dtypes of models on a GPU


@dataclass(frozen=True, slots=True)
class KernelResult:
    """The result of one case; figures are None if the kernel did not run."""

    case: str
    error: float | None  # the largest error of the output, relative to 1 + the expected magnitude
    tolerance: float | None
    problem: str | None  # None if the result is right
    fused_ms: float | None  # median time of the call, with launch and synchronization
    unfused_ms: float | None


@dataclass(frozen=True, slots=True)
class UseResult:
    """Whether the kernel is right with the settings of one cache format."""

    use: str
    problem: str | None  # None if it is right


@dataclass(frozen=True, slots=True)
class StartResult:
    """Time the kernel adds to a start: cold, when it is tried out; warm, with a record of the trial."""

    use: str
    cold_instances: int
    cold_ms: float
    warm_instances: int
    warm_ms: float


def measure_start(backend: Backend) -> StartResult | None:
    """Time both starts for Qwen2.5-0.5B's shape; return None if the kernel fails.

    Only the first call in a process is meaningful, before any instance has been compiled.
    """
    H, K, D, bits = START
    use = KernelUse(D, D, mx.float16, bits, 32, heads=H // K)
    trial = Trial(use, H // K)
    begun = time.perf_counter()
    try:
        trial.run(backend, 1)
    except Exception:  # the trials that follow report which
        return None
    warm_ms = (time.perf_counter() - begun) * 1e3
    if probe_failure(use, backend) is not None:
        return None
    cold_ms = (time.perf_counter() - begun) * 1e3
    cold, warm = (
        num_instances(use, backend, calls) for calls in (probe_calls(use, backend), [Call(H // K, 1)])
    )
    return StartResult(str(use), cold, cold_ms, warm, warm_ms)


def try_uses(backend: Backend, progress: Callable[[int, int], None]) -> list[UseResult]:
    """Try every head dimension and width in groups of 32, in each dtype; at 4 bits with an exact tail.

    The results replace this device's record.
    """
    uses = [
        KernelUse(D, D, dtype, bits, 32, tail_dtype=dtype if bits == FITTED_BITS else None)
        for D, dtype, bits in product(HEAD_DIMS, DTYPES, (8, 4, 0))
    ]
    problems: dict[KernelUse, str | None] = {}
    for use in uses:
        progress(len(problems), len(uses))
        problems[use] = probe_failure(use, backend)
    kernel_record.keep({use: problem or RIGHT for use, problem in problems.items()}, backend, anew=True)
    return [UseResult(str(use), problem) for use, problem in problems.items()]


def try_kernels(backend: Backend, progress: Callable[[int, int], None]) -> list[KernelResult]:
    """Measure a token's error and time in a few shapes; ``progress`` is called with (cases done, in all)."""
    results: list[KernelResult] = []
    for case in TIMED:
        progress(len(results), len(TIMED))
        results.append(_try(*case, backend))
    return results


def _try(H: int, K: int, D: int, bits: int, backend: Backend) -> KernelResult:
    use = KernelUse(D, D, mx.float16, bits, 32, heads=H // K)
    name = f"{use}, {H} query heads, {TOKENS:,} tokens"
    try:
        result = Trial(use, H // K).agreement(backend, 1)
        times = [_step_ms(H, K, D, bits, path) for path in (backend, None)]
    except Exception as error:  # compilers and drivers raise errors of any type
        return KernelResult(name, None, None, one_line(error), None, None)
    return KernelResult(name, result.error, result.tolerance, result.problem, *times)


def _step_ms(H: int, K: int, D: int, bits: int, backend: Backend | None) -> float:
    """Time one step's attention to a full cache of zeros."""
    step = kvant_step((H, K, D), TOKENS, mx.float16, bits=bits, backend=backend)
    query = mx.ones((1, H, 1, D), mx.float16)
    mx.eval(query)

    def run() -> None:
        mx.eval(step(query))
        mx.synchronize()

    return median_ms(run, REPEATS)

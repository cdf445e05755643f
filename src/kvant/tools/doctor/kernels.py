"""The fused kernel against the unfused operator, case by case: error and time on this device."""

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

# Query and kv heads, head_dim and bits, of a cache of TOKENS.
TIMED = ((14, 2, 64, 8), (32, 8, 128, 8), (32, 8, 128, 4), (16, 8, 256, 0))
TOKENS = 4096
START = TIMED[0]
REPEATS = 5
DTYPES = (mx.float16, mx.bfloat16)  # that models are computed in on a GPU


@dataclass(frozen=True, slots=True)
class KernelResult:
    """One case; None: the kernel did not run."""

    case: str
    error: float | None  # the output's largest, relative to 1 + the expected magnitude
    tolerance: float | None
    problem: str | None  # what is wrong; None: nothing
    fused_ms: float | None  # medians of the call, its launch and its end included
    unfused_ms: float | None


@dataclass(frozen=True, slots=True)
class UseResult:
    """Whether the kernel is right as a cache of some format uses it."""

    use: str
    problem: str | None  # why not; None: it is


@dataclass(frozen=True, slots=True)
class StartResult:
    """What the kernel takes of a start: without a record, when it is tried, and with one, for a token's
    steps alone.
    """

    use: str
    cold_instances: int
    cold_ms: float
    warm_instances: int
    warm_ms: float


def measure_start(backend: Backend) -> StartResult | None:
    """Both starts of a model as Qwen2.5-0.5B; None: the kernel fails. Once a process, before it compiles
    instances.
    """
    H, K, D, bits = START
    use = KernelUse(D, D, mx.float16, bits, 32, heads=H // K)
    trial = Trial(use, H // K)
    begun = time.perf_counter()
    try:
        trial.run(backend, 1)
    except Exception:  # the trials that follow say which
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
    """Every head dimension and width in groups of 32, in each dtype; at 4 bits with an exact tail. Findings
    replace the record of this device.
    """
    uses = [
        KernelUse(D, D, dtype, bits, 32, tail_dtype=dtype if bits == FITTED_BITS else None)
        for D, dtype, bits in product(HEAD_DIMS, DTYPES, (8, 4, 0))
    ]
    found: dict[KernelUse, str | None] = {}
    for use in uses:
        progress(len(found), len(uses))
        found[use] = probe_failure(use, backend)
    kernel_record.keep({use: problem or RIGHT for use, problem in found.items()}, backend, anew=True)
    return [UseResult(str(use), problem) for use, problem in found.items()]


def try_kernels(backend: Backend, progress: Callable[[int, int], None]) -> list[KernelResult]:
    """A token's error and time in a few shapes; ``progress`` is called with (cases done, in all)."""
    results: list[KernelResult] = []
    for case in TIMED:
        progress(len(results), len(TIMED))
        results.append(_try(*case, backend))
    return results


def _try(H: int, K: int, D: int, bits: int, backend: Backend) -> KernelResult:
    use = KernelUse(D, D, mx.float16, bits, 32, heads=H // K)
    name = f"{use}, {H} query heads, {TOKENS:,} tokens"
    try:
        found = Trial(use, H // K).agreement(backend, 1)
        times = [_step_ms(H, K, D, bits, path) for path in (backend, None)]
    except Exception as error:  # of a compiler or a driver: any
        return KernelResult(name, None, None, one_line(error), None, None)
    return KernelResult(name, found.error, found.tolerance, found.problem, *times)


def _step_ms(H: int, K: int, D: int, bits: int, backend: Backend | None) -> float:
    """Of a step's attention through a full cache of zeros."""
    step = kvant_step((H, K, D), TOKENS, mx.float16, bits=bits, backend=backend)
    query = mx.ones((1, H, 1, D), mx.float16)
    mx.eval(query)

    def run() -> None:
        mx.eval(step(query))
        mx.synchronize()

    return median_ms(run, REPEATS)

"""The fused kernel against the unfused operator, case by case: error and time on this device."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from statistics import median

import mlx.core as mx

from kvant.errors import one_line
from kvant.operators.kernel_case import SELF_CHECK, KernelCase, random_cases
from kvant.operators.kernels.attend import HEAD_DIMS
from kvant.operators.kernels.launch import Backend
from kvant.operators.probe import KernelUse, probe_failure
from kvant.operators.self_check import Trial

RANDOM_CASES, SEED = 12, 6
REPEATS = 5
DTYPES = (mx.float16, mx.bfloat16)  # that models are computed in on a GPU


@dataclass(frozen=True, slots=True)
class KernelResult:
    """One case.

    Attributes:
        error: the output's largest, relative to 1 + the expected magnitude; None: the kernel did not run.
        problem: what is wrong; None: nothing.
        fused_ms, unfused_ms: medians of the call, its launch and its end included; None: it did not run. The unfused
            operator has no pages, rings, softcaps and scales of their own.
    """

    case: str
    error: float | None
    tolerance: float | None
    problem: str | None
    fused_ms: float | None
    unfused_ms: float | None


@dataclass(frozen=True, slots=True)
class UseResult:
    """Whether the kernel runs at all as a cache of some format uses it. ``problem``: why not; None: it does."""

    use: str
    problem: str | None


def try_uses(backend: Backend, progress: Callable[[int, int], None]) -> list[UseResult]:
    """Every head dimension and width in groups of 32, in each dtype; ``progress`` as in :func:`try_kernels`."""
    uses = [KernelUse(D, D, dtype, bits, 32) for D, dtype, bits in product(HEAD_DIMS, DTYPES, (8, 4, 0))]
    results: list[UseResult] = []
    for use in uses:
        progress(len(results), len(uses))
        results.append(UseResult(str(use), probe_failure(use, backend)))
    return results


def try_kernels(backend: Backend, progress: Callable[[int, int], None]) -> list[KernelResult]:
    """The self-check's cases and random ones; ``progress`` is called with (cases done, in all)."""
    cases = [*SELF_CHECK, *random_cases(RANDOM_CASES, SEED)]
    results: list[KernelResult] = []
    for case in cases:
        progress(len(results), len(cases))
        results.append(_try(case, backend))
    return results


def _try(case: KernelCase, backend: Backend) -> KernelResult:
    try:
        trial = Trial(case)
        found = trial.agreement(backend)
        times: dict[Backend | None, list[float]] = {backend: []} | ({None: []} if case.has_unfused else {})
        for repeat in range(1 + REPEATS):
            for path, own in times.items():
                started = time.perf_counter()
                trial.run(path)
                if repeat:  # the first compiles what has not run yet
                    own.append((time.perf_counter() - started) * 1e3)
    except Exception as error:  # of a compiler or a driver: any
        return KernelResult(str(case), None, None, one_line(error), None, None)
    return KernelResult(
        str(case),
        found.error,
        found.tolerance,
        found.problem,
        median(times[backend]),
        median(times[None]) if case.has_unfused else None,
    )

"""The findings of ``kvant doctor``, and whether anything failed."""

import math
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import mlx.core as mx

from kvant import blas
from kvant.machine import Environment, Machine, environment, this_machine
from kvant.operators import dispatch
from kvant.operators.dispatch import VARIABLE, gpu_backend
from kvant.tools.doctor.compiling import Compiling, measure_compiling
from kvant.tools.doctor.kernels import KernelResult, UseResult, try_kernels, try_uses
from kvant.tools.doctor.look_ahead import LookAhead, measure_look_ahead
from kvant.tools.doctor.paths import OperatorPath, operator_paths
from kvant.tools.doctor.queries import QueriesMeasured, measure_queries

SLOWER = 1.1  # times; less is the noise of a measurement
GPU_COMPILERS = {"metal": "Metal's, while it runs", "cuda": "NVRTC, while it runs"}
NO_GPU = (
    "the fused kernel: there is no GPU that MLX uses, so it has not run here. kvant's tests run its Metal text on the "
    "host, thread by thread (docs/host-run.md), which says nothing of its speed or of a GPU's own compiler"
)
OTHER_SHAPES = "the fused kernel in a model's own shapes: it is tried with them when a cache is made"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What ``kvant doctor`` prints.

    Attributes:
        device_info: everything MLX says about its default device.
        compiler: what compiles kernels and fused steps.
        kernels: every case the fused kernel was tried on; empty without a GPU.
        look_ahead: None if generation failed.
        problem: why generation failed; None: it did not.
        unchecked: checks that are not possible on this machine.
        uses: whether the fused kernel runs as caches use it; empty without a GPU.
        compiling: what the self-check's compilation took; None: there was none, or it failed.
        queries: how many queries a simdgroup of the fused kernel holds; None: the kernel does not run here.
    """

    environment: Environment
    machine: Machine
    device_info: dict[str, Any]
    compiler: str
    paths: list[OperatorPath]
    kernels: list[KernelResult]
    look_ahead: LookAhead | None
    problem: str | None
    unchecked: list[str]
    uses: list[UseResult] = field(default_factory=list)
    compiling: Compiling | None = None
    queries: QueriesMeasured | None = None

    @property
    def healthy(self) -> bool:
        """Whether nothing that was tried failed."""
        return self._is_right and (self.queries is None or self.queries.problem is None)

    @property
    def _is_right(self) -> bool:
        problems = [self.problem, *(result.problem for result in self.kernels), *(use.problem for use in self.uses)]
        return not any(problems)

    @property
    def to_do(self) -> list[str]:
        """What its user can do so that kvant is right or faster here; empty: nothing."""
        found = []
        timed = [result for result in self.kernels if result.fused_ms is not None and result.unfused_ms is not None]
        slower = sum(result.fused_ms > SLOWER * result.unfused_ms for result in timed)  # type: ignore[operator]
        if self.queries is not None and self.queries.problem is not None:
            found.append(f"report the lines that say wrong; kvant goes on with {self.queries.used} queries a simdgroup")
        if not self._is_right:
            asked = f"unset {VARIABLE}; " if os.environ.get(VARIABLE) == "fused" else ""
            found.append(f"{asked}without a wish kvant uses the unfused operator; report the lines that say wrong")
        elif slower > len(timed) / 2:
            found.append(
                f"set {VARIABLE}=unfused, or give --kernels unfused: the fused kernel is the slower in {slower} of "
                f"{len(timed)} cases"
            )
        if sys.platform == "linux" and self.machine.device == "cpu" and self.environment.blas.startswith(blas.OWN):
            how = f"unset {blas.VARIABLE}" if os.environ.get(blas.VARIABLE) else "install kvant with its extra cpu"
            found.append(f"{how}: MLX's own BLAS reads a prompt 8 to 11 times slower than OpenBLAS")
        return found

    def as_json(self) -> dict[str, Any]:
        """For a program: numbers that are none are null."""
        found: dict[str, Any] = asdict(self) | {"healthy": self.healthy, "to_do": self.to_do}
        if self.look_ahead is not None:
            found["look_ahead"]["faster"] = self.look_ahead.faster
        if self.compiling is not None:
            found["compiling"]["compile_ms"] = self.compiling.compile_ms
        if self.queries is not None:
            found["queries"]["ratio"] = self.queries.ratio
        for result in found["kernels"]:
            if result["error"] is not None and not math.isfinite(result["error"]):
                result["error"] = None
        return found


def diagnose(progress: Callable[[int, int], None]) -> Diagnosis:
    """Look at this machine and try the kernel; ``progress`` is called with (kernel cases done, in all).

    Raises:
        ValueError: KVANT_KERNELS is unknown, or asks for what cannot run here.
    """
    backend = gpu_backend()
    compiling = None if backend is None else measure_compiling(backend)  # first: what it measures happens once
    paths = operator_paths()
    queries = None
    if backend is not None and dispatch.self_check_failure(backend) is None:
        queries = measure_queries(backend, progress)
    kernels = [] if backend is None else try_kernels(backend, progress)
    uses = [] if backend is None else try_uses(backend, progress)
    look_ahead = problem = None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the fused kernel ", RuntimeWarning)  # told in full here
            look_ahead = measure_look_ahead()
    except RuntimeError as error:  # the kernel that is asked for failed its self-check, or a driver did
        problem = " ".join(str(error).split())
    return Diagnosis(
        environment=environment(),
        machine=this_machine(),
        device_info=dict(mx.device_info()),
        compiler=_host_compiler() if backend is None else GPU_COMPILERS[backend],
        paths=paths,
        kernels=kernels,
        look_ahead=look_ahead,
        problem=problem,
        unchecked=[NO_GPU if backend is None else OTHER_SHAPES],
        uses=uses,
        compiling=compiling,
        queries=queries,
    )


def _host_compiler() -> str:
    """The first g++, with which MLX compiles steps on a CPU."""
    found = shutil.which("g++")
    if found is None:
        return "none: MLX compiles for a CPU where g++ is installed; kvant does not need it there"
    try:
        done = subprocess.run(
            [found, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10
        )
        return next(iter(done.stdout.splitlines()), f"{found}, which does not say its version")
    except (OSError, subprocess.SubprocessError) as error:
        return f"{found}, which fails: {error}"

"""The results of ``kvant doctor``, and whether anything failed."""

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from kvant import blas
from kvant.machine import Environment, Machine, environment, this_machine
from kvant.operators import kernel_record
from kvant.operators.dispatch import VARIABLE, choose, gpu_backend
from kvant.operators.kernels.attend import MAX_NEW_TOKENS
from kvant.tools.doctor.kernels import (
    KernelResult,
    StartResult,
    UseResult,
    measure_start,
    try_kernels,
    try_uses,
)
from kvant.tools.doctor.memory_speed import MemorySpeed, measure_memory_speed

SLOWER = 1.1  # a smaller ratio is measurement noise
GPU_COMPILERS = {"metal": "Metal's, while it runs", "cuda": "NVRTC, while it runs"}
NO_GPU = (
    "the fused kernel: MLX has no GPU here, so the kernel was not run. kvant's tests run its Metal source on "
    "the host, thread by thread (docs/operators.md), which tells nothing about its speed or a GPU's compiler"
)
OTHER_SHAPES = "the fused kernel in a model's own shapes: it is tried with them when a cache is first made"
UNFUSED = "unfused"


@dataclass(frozen=True, slots=True)
class OperatorPath:
    operator: str
    path: str  # fused or unfused
    reason: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    environment: Environment
    machine: Machine
    device_info: dict[str, Any]  # everything MLX says about its default device
    compiler: str  # compiles kernels and fused steps
    paths: list[OperatorPath]
    kernels: list[KernelResult]  # one per test case of the fused kernel; empty without a GPU
    uses: list[UseResult]  # the fused kernel with the settings that caches use; empty without a GPU
    unchecked: list[str]  # checks that are not possible on this machine
    start: StartResult | None = None  # None without a GPU, or if the kernel fails
    record: str | None = None  # describes the record of kernel trials; None without a GPU
    memory_speed: MemorySpeed | None = None  # None with a GPU

    @property
    def healthy(self) -> bool:
        return not any([*(result.problem for result in self.kernels), *(use.problem for use in self.uses)])

    @property
    def to_do(self) -> list[str]:
        """Settings that would make kvant correct or faster on this machine."""
        advice = []
        timed = [
            (result.fused_ms, result.unfused_ms)
            for result in self.kernels
            if result.fused_ms is not None and result.unfused_ms is not None
        ]
        slower = sum(fused_ms > SLOWER * unfused_ms for fused_ms, unfused_ms in timed)
        if not self.healthy:
            reset = f"unset {VARIABLE}; " if os.environ.get(VARIABLE) == "fused" else ""
            advice.append(
                f"{reset}by default kvant uses the unfused operator; report the lines that say wrong"
            )
        elif slower > len(timed) / 2:
            advice.append(
                f"set {VARIABLE}=unfused, or pass --kernels unfused: the fused kernel is slower in "
                f"{slower} of {len(timed)} cases"
            )
        if (
            sys.platform == "linux"
            and self.machine.device == "cpu"
            and self.environment.blas.startswith(blas.MLX_BLAS)
        ):
            how = (
                f"unset {blas.VARIABLE}"
                if os.environ.get(blas.VARIABLE)
                else "install kvant with its extra cpu"
            )
            advice.append(f"{how}: MLX's own BLAS reads a prompt 8 to 11 times slower than OpenBLAS")
        return advice

    def as_json(self) -> dict[str, Any]:
        """Return the results for JSON output. Errors that are not finite become null."""
        record: dict[str, Any] = asdict(self) | {"healthy": self.healthy, "to_do": self.to_do}
        for result in record["kernels"]:
            if result["error"] is not None and not math.isfinite(result["error"]):
                result["error"] = None
        return record


def diagnose(progress: Callable[[int, int], None]) -> Diagnosis:
    """Describe this machine and try the kernel; ``progress`` is called with (cases done, cases in all)."""
    backend = gpu_backend()
    paths = operator_paths()
    start = None if backend is None else measure_start(backend)  # first, while nothing else is compiled
    return Diagnosis(
        environment=environment(),
        machine=this_machine(),
        device_info=dict(mx.device_info()),
        compiler=_host_compiler() if backend is None else GPU_COMPILERS[backend],
        paths=paths,
        kernels=[] if backend is None else try_kernels(backend, progress),
        uses=[] if backend is None else try_uses(backend, progress),
        unchecked=[NO_GPU if backend is None else OTHER_SHAPES],
        start=start,
        record=None if backend is None else kernel_record.describe(backend),
        memory_speed=measure_memory_speed() if mx.default_device().type == mx.cpu else None,
    )


def operator_paths() -> list[OperatorPath]:
    """Return the path that every operator takes on this machine, and why."""
    choice = choose()
    path = UNFUSED if choice.backend is None else f"fused ({choice.backend})"
    reason = choice.reason
    more = (
        f"the kernel is for few queries; more than {MAX_NEW_TOKENS} "
        "are a product with dequantized keys and values"
    )
    return [
        OperatorPath(f"MultiHeadCacheAttention, 1 to {MAX_NEW_TOKENS} new tokens", path, reason),
        OperatorPath("MultiHeadCacheAttention, more", UNFUSED, more),
        OperatorPath(
            "KeyValueCache", UNFUSED, "it returns dequantized keys and values, which the kernel never makes"
        ),
        OperatorPath("quantize, of appended tokens", path, "follows attention"),
        OperatorPath("quantize, dequantize", UNFUSED, "the standalone functions have no kernel"),
    ]


def _host_compiler() -> str:
    """Describe the first g++ on the path, which MLX uses to compile steps on a CPU."""
    compiler = shutil.which("g++")
    if compiler is None:
        return "none: MLX compiles for a CPU if g++ is installed; kvant does not need it there"
    try:
        done = subprocess.run(
            [compiler, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10
        )
        return next(iter(done.stdout.splitlines()), f"{compiler}, which does not print its version")
    except (OSError, subprocess.SubprocessError) as error:
        return f"{compiler}, which fails: {error}"

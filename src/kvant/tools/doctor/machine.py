"""What kvant runs on and with."""

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from kvant import __version__, blas
from kvant.operators.dispatch import gpu_backend
from kvant.sizes import physical_memory

GPU_COMPILERS = {"metal": "Metal's, while it runs", "cuda": "NVRTC, while it runs"}
# How MLX's device_info calls the memory a GPU can use, on Metal and on CUDA.
GPU_MEMORY = ("max_recommended_working_set_size", "total_memory")


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine and what is installed.

    Attributes:
        device: MLX's default device's name.
        kind: cpu, metal or cuda; of another GPU, gpu.
        device_info: all that MLX says of the device.
        memory_bytes: of the machine; in a container, that of the machine around it.
        gpu_memory_bytes: what a GPU can use of it, or has; None: there is no GPU, or it isn't said.
        blas: what multiplies matrices on a CPU.
        compiler: what compiles kernels and fused steps.
    """

    system: str
    python: str
    versions: dict[str, str]
    device: str
    kind: str
    device_info: dict[str, Any]
    cores: int
    memory_bytes: int
    gpu_memory_bytes: int | None
    blas: str
    compiler: str


def look_at_machine() -> Machine:
    """This machine."""
    info = mx.device_info()
    on_cpu = mx.default_device().type == mx.cpu
    gpu = next((int(info[name]) for name in GPU_MEMORY if name in info and not on_cpu), None)
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        versions={"kvant": __version__, **{name: version(name) for name in ("mlx", "mlx-lm", "transformers")}},
        device=str(info.get("device_name", "unknown")),
        kind="cpu" if on_cpu else gpu_backend() or "gpu",
        device_info=dict(info),
        cores=os.cpu_count() or 1,
        memory_bytes=physical_memory(),
        gpu_memory_bytes=gpu,
        blas=blas.loaded(),
        compiler=GPU_COMPILERS[backend] if (backend := gpu_backend()) else _host_compiler(),
    )


def _host_compiler() -> str:
    """What MLX compiles steps with on a CPU: the first g++."""
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

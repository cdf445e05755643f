"""The machine: its memory and how much of it a plan may use, what computes on it, and what is installed."""

import ctypes
import gc
import os
import platform
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import mlx.core as mx

from kvant import __version__, blas
from kvant.operators.dispatch import gpu_backend
from kvant.sizes import physical_memory

Device = Literal["cpu", "gpu"]

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine's memory."""

    device: Device  # what computes
    memory_bytes: int  # all of the device's; in a container, that of the machine around it
    limit_bytes: int  # what a plan may use of it
    limit_source: str  # what sets that limit, for people


@dataclass(frozen=True, slots=True)
class Environment:
    """What figures were measured on and with.

    Attributes:
        device: the name of MLX's default device, and in brackets cpu, metal or cuda; of another GPU, gpu.
        blas: what multiplies matrices on a CPU.
    """

    device: str
    cores: int
    system: str
    blas: str
    versions: dict[str, str]


def environment() -> Environment:
    """This process's."""
    kind = "cpu" if default_device() == "cpu" else gpu_backend() or "gpu"
    installed = {name: version(name.replace("_", "-")) for name in ("mlx", "mlx_lm", "transformers")}
    return Environment(
        device=f"{mx.device_info().get('device_name', 'unknown')} ({kind})",
        cores=os.cpu_count() or 1,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        blas=blas.loaded(),
        versions={"kvant": __version__, **installed, "python": platform.python_version()},
    )


def default_device() -> Device:
    """What MLX computes on here."""
    return "gpu" if mx.default_device().type == mx.gpu else "cpu"


def this_machine(device: Device | None = None) -> Machine:
    """This machine: on Metal what the system recommends for the GPU, with CUDA what is free on it, on a CPU
    its memory.

    Args:
        device: default: what MLX computes on.
    """
    device = device or default_device()
    if device == "gpu":
        if not mx.is_available(mx.gpu):
            raise ValueError("MLX has no GPU here")
        info = mx.device_info(mx.gpu)
        name, limit = str(info["device_name"]), info.get("max_recommended_working_set_size")
        if limit is not None:
            return Machine("gpu", int(info["memory_size"]), int(limit), f"what Metal recommends on {name}")
        return Machine("gpu", int(info["total_memory"]), int(info["free_memory"]), f"free on {name}")
    physical = physical_memory()
    limit = cgroup_limit()
    if limit is not None and limit < physical:
        return Machine("cpu", physical, limit, "the control group's limit")
    return Machine("cpu", physical, physical, "physical memory")


def machine_with(memory_bytes: int, device: Device) -> Machine:
    """A machine that is not here, known by its memory; a GPU is taken for that of a Mac.

    Metal recommends less than a Mac's memory for its GPU. llama.cpp prints it as
    recommendedMaxWorkingSetSize. Its logs show two thirds of a small memory (5,726.63 MB of 8 GB: llama.cpp's
    own CI on an M1; 11,453.25 MB of 16 GB: ggml-org/llama.cpp#4495 and, in MiB, ise-uiuc/magicoder#19;
    21,845.34 MiB of 32 GB: ggml-org/llama.cpp#2011) and three quarters of a larger one (49,152 MiB of 64 GB:
    ggml-org/llama.cpp#1870; 73,728 MiB of 96 GB: ggml-org/llama.cpp#3213). Newer systems may grant more; a
    Mac says its own figure when it plans for itself.
    """
    if device == "cpu":
        return Machine(device, memory_bytes, memory_bytes, "the stated memory")
    if memory_bytes <= 32 * GIB:
        return Machine(device, memory_bytes, memory_bytes * 2 // 3, "about 2/3 of the memory, as on Macs")
    return Machine(device, memory_bytes, memory_bytes * 3 // 4, "about 3/4 of the memory, as on Macs")


def bound_memory(arrays: int, scratch: int) -> None:
    """Hold MLX to planned bytes: ``arrays`` at most, of which it keeps ``scratch`` for reuse."""
    mx.set_cache_limit(scratch)
    mx.set_memory_limit(arrays)


def free_memory() -> None:
    """Give the memory of objects that nothing refers to any more back to the system."""
    gc.unfreeze()  # a loaded model's objects were frozen, so that the collector skips them
    gc.collect()
    gc.freeze()
    mx.clear_cache()
    if sys.platform == "linux":  # on a CPU MLX allocates with malloc, which keeps what is freed
        with suppress(AttributeError):  # a C library that is not glibc
            ctypes.CDLL(None).malloc_trim(0)


def cgroup_limit(proc: Path = Path("/proc/self"), root: Path = Path("/")) -> int | None:
    """The smallest memory limit of the control groups this process is in, version 1 or 2; None: there is
    none.

    Every group on the path limits what is under it. Where a container sees only a part of the tree, that is
    looked at.

    Args:
        proc: where the kernel describes the process.
        root: what the mount points it names are relative to.
    """
    try:
        groups = (proc / "cgroup").read_text(encoding="utf-8").splitlines()
        mounts = (proc / "mountinfo").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    limits = []
    for group in groups:
        hierarchy, _, rest = group.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            kind, option, name = "cgroup2", None, "memory.max"
        elif "memory" in controllers.split(","):
            kind, option, name = "cgroup", "memory", "memory.limit_in_bytes"
        else:
            continue
        for mount in mounts:
            fields, _, described = mount.partition(" - ")
            top, point = fields.split()[3:5]
            filesystem, _, options = described.split()[:3]
            if filesystem == kind and (option is None or option in options.split(",")):
                limits += _limits(root / point.lstrip("/"), top, path, name)
    return min(limits, default=None)


def _limits(mount: Path, top: str, path: str, name: str) -> list[int]:
    """The limits of a group and all above it, down to ``mount``, where the tree is mounted from ``top``
    on.
    """
    inside = path.removeprefix(top.rstrip("/")).lstrip("/") if path.startswith(top) else ""
    parts = Path(inside).parts
    if ".." in parts:  # outside of what is mounted here
        parts = ()
    found = []
    for depth in range(len(parts) + 1):
        try:
            text = mount.joinpath(*parts[:depth], name).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):  # the top of version 2 has no such file
            continue
        if text.isdigit():  # "max": no limit; version 1 says a number larger than any memory
            found.append(int(text))
    return found

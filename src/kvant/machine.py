"""Describe the machine: its memory and the share a plan may use, its device, and installed versions."""

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

    device: Device  # the device that computes
    memory_bytes: int  # all memory of the device; in a container, of the host
    limit_bytes: int  # the memory that a plan may use
    limit_source: str  # a description of what sets the limit


@dataclass(frozen=True, slots=True)
class Environment:
    """The machine and the software with which figures were measured.

    Attributes:
        device: the name of MLX's default device, and in brackets cpu, metal, cuda, or gpu for another GPU.
        blas: the library that multiplies matrices on a CPU.
    """

    device: str
    cores: int
    system: str
    blas: str
    versions: dict[str, str]


def environment() -> Environment:
    """Describe this process's environment."""
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
    """Return the device on which MLX computes."""
    return "gpu" if mx.default_device().type == mx.gpu else "cpu"


def this_machine(device: Device | None = None) -> Machine:
    """Describe this machine. The limit is what Metal recommends, what is free on CUDA, or a CPU's memory.

    Args:
        device: default: the device on which MLX computes.
    """
    device = device or default_device()
    if device == "gpu":
        if not mx.is_available(mx.gpu):
            raise ValueError("MLX has no GPU here")
        info = mx.device_info(mx.gpu)
        name = str(info["device_name"])
        limit = info.get("max_recommended_working_set_size")
        if limit is not None:
            return Machine("gpu", int(info["memory_size"]), int(limit), f"what Metal recommends on {name}")
        return Machine("gpu", int(info["total_memory"]), int(info["free_memory"]), f"free on {name}")
    physical = physical_memory()
    limit = cgroup_limit()
    if limit is not None and limit < physical:
        return Machine("cpu", physical, limit, "the control group's limit")
    return Machine("cpu", physical, physical, "physical memory")


def machine_with(memory_bytes: int, device: Device) -> Machine:
    """Describe another machine by its memory; assume that a GPU is a Mac's.

    Metal recommends less than a Mac's memory for its GPU. llama.cpp logs this as
    recommendedMaxWorkingSetSize: two thirds of a small memory (5,726.63 MB of 8 GB: llama.cpp's CI on an M1;
    11,453.25 MB of 16 GB: ggml-org/llama.cpp#4495 and, in MiB, ise-uiuc/magicoder#19; 21,845.34 MiB of 32 GB:
    ggml-org/llama.cpp#2011) and three quarters of a larger one (49,152 MiB of 64 GB: ggml-org/llama.cpp#1870;
    73,728 MiB of 96 GB: ggml-org/llama.cpp#3213). Newer systems may allow more; a Mac that plans for itself
    uses its own figure.
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


def free_memory(*, collect: bool = True) -> None:
    """Give the memory of objects that nothing refers to any more back to the system.

    ``collect``: also of objects that refer to each other. This stops all threads for some 60 ms.
    """
    if collect:
        gc.unfreeze()  # a loaded model's objects were frozen, so that the collector skips them
        gc.collect()
        gc.freeze()
    mx.clear_cache()
    if sys.platform == "linux":  # on a CPU MLX allocates with malloc, which keeps what is freed
        with suppress(AttributeError):  # a C library that is not glibc
            ctypes.CDLL(None).malloc_trim(0)


def cgroup_limit(proc: Path = Path("/proc/self"), root: Path = Path("/")) -> int | None:
    """Return the smallest memory limit of this process's control groups, version 1 or 2, or None.

    A group limits everything below it, so all groups on the path count. In a container only the visible
    subtree is read.

    Args:
        proc: the kernel's description of the process.
        root: the folder that contains the mount points.
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
            kind = "cgroup2"
            option = None
            name = "memory.max"
        elif "memory" in controllers.split(","):
            kind = "cgroup"
            option = "memory"
            name = "memory.limit_in_bytes"
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
    """Return the limits of a group and its ancestors up to ``mount``, which shows the tree from ``top``."""
    inside = path.removeprefix(top.rstrip("/")).lstrip("/") if path.startswith(top) else ""
    parts = Path(inside).parts
    if ".." in parts:  # outside of this mount
        parts = ()
    limits = []
    for depth in range(len(parts) + 1):
        try:
            text = mount.joinpath(*parts[:depth], name).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):  # version 2's root group has no such file
            continue
        if text.isdigit():  # "max" means no limit; version 1 writes a number larger than any memory
            limits.append(int(text))
    return limits

"""What a machine has: control groups, in files like the kernel's, and machines that are not here."""

import os
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from kvant import __version__, machine
from kvant.machine import Machine, cgroup_limit, environment, machine_with, this_machine

Kernel = Callable[[str, str, dict[str, str]], int | None]
V1_NONE = "9223372036854771712"  # what version 1 says where nothing limits
V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNTS = """31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct
33 31 0:30 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory"""


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    """A function (cgroup, mountinfo, {file: text}) -> the limit found there."""

    def make(cgroup: str, mountinfo: str, files: dict[str, str]) -> int | None:
        proc = tmp_path / "proc"
        proc.mkdir()
        (proc / "cgroup").write_text(cgroup)
        (proc / "mountinfo").write_text(mountinfo)
        for name, text in files.items():
            file = tmp_path / "sys/fs/cgroup" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")
        return cgroup_limit(proc, tmp_path)

    return make


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"user.slice/a.scope/memory.max": "1000000"}, 1_000_000),
        ({"user.slice/memory.max": "500000", "user.slice/a.scope/memory.max": "max"}, 500_000),
        ({"user.slice/memory.max": "500000", "user.slice/a.scope/memory.max": "1000000"}, 500_000),
        ({"user.slice/memory.max": "max", "user.slice/a.scope/memory.max": "max"}, None),
        ({"memory.max": "7", "user.slice/b.scope/memory.max": "3"}, 7),  # another group's limit is none of ours
        ({}, None),
    ],
)
def test_version_2_takes_the_smallest_on_the_path(kernel: Kernel, files: dict[str, str], expected: int | None) -> None:
    assert kernel("0::/user.slice/a.scope\n", V2_MOUNT, files) == expected


def test_version_1(kernel: Kernel) -> None:
    files = {
        "memory/memory.limit_in_bytes": V1_NONE,
        "memory/docker/memory.limit_in_bytes": "4000000000",
        "memory/docker/abc/memory.limit_in_bytes": "2000000000",
        "cpu/docker/abc/memory.limit_in_bytes": "1",
    }
    cgroup = "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/docker/abc\n0::/\n"
    assert kernel(cgroup, V1_MOUNTS, files) == 2_000_000_000


def test_version_1_without_a_limit_is_above_any_memory(kernel: Kernel) -> None:
    assert kernel("4:memory:/\n", V1_MOUNTS, {"memory/memory.limit_in_bytes": V1_NONE}) == int(V1_NONE)


@pytest.mark.parametrize("path", ["/docker/abc", "/docker/abc/inner", "/../other", "/elsewhere"])
def test_a_container_that_sees_a_part_of_the_tree(kernel: Kernel, path: str) -> None:
    mount = V2_MOUNT.replace("0:28 / ", "0:28 /docker/abc ")
    files = {"memory.max": "3000", "inner/memory.max": "2000", "docker/abc/memory.max": "1"}
    assert kernel(f"0::{path}\n", mount, files) == (2000 if path.endswith("inner") else 3000)


def test_without_control_groups(tmp_path: Path) -> None:
    assert cgroup_limit(tmp_path, tmp_path) is None


def test_a_cpus_limit_is_the_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit, expected, source in (
        (None, physical, "physical memory"),
        (int(V1_NONE), physical, "physical memory"),
        (10**6, 10**6, "the control group's limit"),
    ):
        monkeypatch.setattr(machine, "cgroup_limit", lambda limit=limit: limit)
        assert this_machine("cpu") == Machine("cpu", physical, expected, source)


@pytest.mark.skipif(mx.is_available(mx.gpu), reason="there is a GPU")
def test_a_gpu_that_is_not_here() -> None:
    with pytest.raises(ValueError, match="no GPU here"):
        this_machine("gpu")


def test_a_gpu_is_what_mlx_says_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    metal = {"device_name": "Apple M1", "memory_size": 17179869184, "max_recommended_working_set_size": 11453251584}
    cuda = {"device_name": "NVIDIA H200", "total_memory": 150_000_000_000, "free_memory": 140_000_000_000}
    monkeypatch.setattr(mx, "is_available", lambda device: True)
    monkeypatch.setattr(mx, "device_info", lambda device: metal)
    assert this_machine("gpu") == Machine("gpu", 17179869184, 11453251584, "what Metal recommends on Apple M1")
    monkeypatch.setattr(mx, "device_info", lambda device: cuda)
    assert this_machine("gpu") == Machine("gpu", 150_000_000_000, 140_000_000_000, "free on NVIDIA H200")


@pytest.mark.parametrize(
    ("gib", "logged_mb"),  # recommendedMaxWorkingSetSize in llama.cpp's logs, cited at machine_with
    [(8, 5726.63), (16, 11453.25), (32, 21845.34 * 1.048576), (64, 49152.00 * 1.048576), (96, 73728.00 * 1.048576)],
)
def test_macs_that_are_not_here(gib: int, logged_mb: float) -> None:
    assert machine_with(gib * 2**30, "gpu").limit_bytes / 1e6 == pytest.approx(logged_mb, abs=0.03)
    assert machine_with(gib * 2**30, "cpu").limit_bytes == gib * 2**30


def test_the_environment_names_what_is_installed() -> None:
    here = environment()
    assert here.versions.keys() == {"kvant", "mlx", "mlx_lm", "transformers", "python"}
    assert (here.versions["kvant"], here.versions["mlx"]) == (__version__, mx.__version__)
    assert here.device.startswith(str(mx.device_info()["device_name"]))
    assert here.device.endswith("(cpu)") == (mx.default_device().type == mx.cpu)
    assert here.cores == os.cpu_count()
    assert here.blas

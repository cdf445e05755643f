"""What a machine has: control groups, in files like the kernel's, and machines that are not here."""

import os
from pathlib import Path

import mlx.core as mx
import pytest

from kvant import __version__, machine
from kvant.machine import Machine, cgroup_limit, environment, machine_with, this_machine

V1_NONE = "9223372036854771712"  # what version 1 says where nothing limits
V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNTS = """31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct
33 31 0:30 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory"""


SCOPE, V2 = "0::/user.slice/a.scope\n", V2_MOUNT
PART = V2_MOUNT.replace("0:28 / ", "0:28 /docker/abc ")  # a container that sees a part of the tree
OF_THE_PART = {"memory.max": "3000", "inner/memory.max": "2000", "docker/abc/memory.max": "1"}
V1_GROUPS = "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/docker/abc\n0::/\n"
V1_FILES = {
    "memory/memory.limit_in_bytes": V1_NONE,
    "memory/docker/memory.limit_in_bytes": "4000000000",
    "memory/docker/abc/memory.limit_in_bytes": "2000000000",
    "cpu/docker/abc/memory.limit_in_bytes": "1",
}


@pytest.mark.parametrize(
    ("cgroup", "mounts", "files", "expected"),
    [
        (SCOPE, V2, {"user.slice/a.scope/memory.max": "1000000"}, 1_000_000),
        (SCOPE, V2, {"user.slice/memory.max": "500000", "user.slice/a.scope/memory.max": "max"}, 500_000),
        (SCOPE, V2, {"user.slice/memory.max": "500000", "user.slice/a.scope/memory.max": "1000000"}, 500_000),
        (SCOPE, V2, {"user.slice/memory.max": "max", "user.slice/a.scope/memory.max": "max"}, None),
        # another group's is none of ours
        (SCOPE, V2, {"memory.max": "7", "user.slice/b.scope/memory.max": "3"}, 7),
        (SCOPE, V2, {}, None),
        *((f"0::{path}\n", PART, OF_THE_PART, 3000) for path in ("/docker/abc", "/../other", "/elsewhere")),
        ("0::/docker/abc/inner\n", PART, OF_THE_PART, 2000),
        (V1_GROUPS, V1_MOUNTS, V1_FILES, 2_000_000_000),
        # above any memory
        ("4:memory:/\n", V1_MOUNTS, {"memory/memory.limit_in_bytes": V1_NONE}, int(V1_NONE)),
    ],
)
def test_the_smallest_limit_on_the_path(
    tmp_path: Path, cgroup: str, mounts: str, files: dict[str, str], expected: int | None
) -> None:
    assert cgroup_limit(tmp_path, tmp_path) is None  # without control groups
    (proc := tmp_path / "proc").mkdir()
    (proc / "cgroup").write_text(cgroup)
    (proc / "mountinfo").write_text(mounts)
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    assert cgroup_limit(proc, tmp_path) == expected


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
    metal = {
        "device_name": "Apple M1",
        "memory_size": 17179869184,
        "max_recommended_working_set_size": 11453251584,
    }
    cuda = {"device_name": "NVIDIA H200", "total_memory": 150_000_000_000, "free_memory": 140_000_000_000}
    monkeypatch.setattr(mx, "is_available", lambda device: True)
    monkeypatch.setattr(mx, "device_info", lambda device: metal)
    assert this_machine("gpu") == Machine(
        "gpu", 17179869184, 11453251584, "what Metal recommends on Apple M1"
    )
    monkeypatch.setattr(mx, "device_info", lambda device: cuda)
    assert this_machine("gpu") == Machine("gpu", 150_000_000_000, 140_000_000_000, "free on NVIDIA H200")


@pytest.mark.parametrize(
    ("gib", "logged_mb"),  # recommendedMaxWorkingSetSize in llama.cpp's logs, cited at machine_with
    [
        (8, 5726.63),
        (16, 11453.25),
        (32, 21845.34 * 1.048576),
        (64, 49152.00 * 1.048576),
        (96, 73728.00 * 1.048576),
    ],
)
def test_macs_that_are_not_here(gib: int, logged_mb: float) -> None:
    assert machine_with(gib * 2**30, "gpu").limit_bytes / 1e6 == pytest.approx(logged_mb, abs=0.03)
    assert machine_with(gib * 2**30, "cpu").limit_bytes == gib * 2**30


def test_the_environment_names_what_is_installed() -> None:
    here = environment()
    assert (here.versions["kvant"], here.versions["mlx"]) == (__version__, mx.__version__)
    assert here.device.startswith(str(mx.device_info()["device_name"]))
    assert here.device.endswith("(cpu)") == (mx.default_device().type == mx.cpu)
    assert here.cores == os.cpu_count()
    assert here.blas

"""A run that finds nothing proves something only if it finds what is there: each planted mistake is caught.

Every one is one edit away from a kernel that passes.
"""

import re
import sys

import mlx.core as mx
import numpy as np
import pytest

from support.metal_host import host_pytest_skip, worker
from support.metal_host.errors import (
    CompileFailed,
    Divergence,
    Hang,
    HostError,
    OutOfBounds,
    Race,
    ThreadgroupMemory,
    Undefined,
    Uninitialised,
    Unreadable,
    WriteToInput,
)
from support.metal_probe import REDUCTION, launch, normal, reduce, same

pytestmark = host_pytest_skip


@pytest.mark.parametrize(("which", "kind"), [(0, Uninitialised), (1, Race)])
def test_a_dropped_barrier(which: int, kind: type[HostError]) -> None:
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    parts = REDUCTION.split(barrier)
    dropped = barrier.join(parts[: which + 1]) + barrier.join(parts[which + 1 :])
    assert dropped.count(barrier) == 1
    with pytest.raises(kind, match="`tile` at byte") as raised:
        reduce(dropped)
    assert re.search(r"thread \(\d+, 0, 0\) of threadgroup", str(raised.value))


def test_a_write_after_another_threads_read() -> None:
    source = """
      threadgroup float tile[64];
      uint i = thread_index_in_threadgroup;
      tile[i] = x[i];
      threadgroup_barrier(mem_flags::mem_threadgroup);
      float next = tile[(i + 1) % 64];
      {}
      tile[i] = next;
      out[i] = tile[i];
    """
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    same(launch(source.replace("{}", barrier), normal(64)), mx.roll(normal(64), -1))
    with pytest.raises(Race, match=r"(read|write) of `tile` at byte \d+, which .* with no barrier in between"):
        launch(source.replace("{}", ""), normal(64))


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_a_race_is_found_in_every_order(order: int) -> None:
    source = "threadgroup int last[1]; last[0] = int(thread_index_in_threadgroup); out[0] = 1;"
    with pytest.raises(Race, match=r"write of `last` at byte 0"):
        launch(source, normal(64), orders=(order,))


def test_a_barrier_of_the_wrong_memory() -> None:
    with pytest.raises((Race, Uninitialised)):
        reduce(REDUCTION.replace("mem_threadgroup)", "mem_device)"))


def test_a_barrier_in_a_branch() -> None:
    source = (
        "uint i = thread_position_in_grid.x;\nif (i < 32)\n threadgroup_barrier(mem_flags::mem_none);\nout[i] = x[i];"
    )
    with pytest.raises(Divergence, match=r"threads 0 to 31 at threadgroup_barrier, line \d+; threads 32 to 63 ended"):
        launch(source, normal(64))


def test_two_barriers_in_two_branches() -> None:
    source = """
      uint i = thread_position_in_grid.x;
      if (i % 2) { out[i] = x[i]; threadgroup_barrier(mem_flags::mem_none); }
      else {
        threadgroup_barrier(mem_flags::mem_none); out[i] = x[i]; }
    """
    with pytest.raises(Divergence, match="threads wait at different barriers"):
        launch(source, normal(64))


def test_a_loop_that_some_threads_leave_early() -> None:
    source = """
      uint i = thread_position_in_grid.x;
      for (uint n = 0; n < 2 + i / 63; n++) threadgroup_barrier(mem_flags::mem_none);
      out[i] = x[i];
    """
    with pytest.raises(Divergence, match="thread 63 at threadgroup_barrier"):
        launch(source, normal(64))


@pytest.mark.parametrize("operation", ["simd_sum(x[i])", "simd_shuffle_xor(x[i], 1)", "simd_max(x[i])"])
def test_a_simd_operation_in_a_branch(operation: str) -> None:
    source = f"uint i = thread_position_in_grid.x; float r = 0; if (i != 40) r = {operation}; out[i] = r;"
    with pytest.raises(Divergence, match=f"{operation[:8]}.*thread 40 ended"):
        launch(source, normal(64))


def test_a_simd_operation_two_ways() -> None:
    source = """
      uint i = thread_position_in_grid.x; float r = 0;
      if (i % 2) r = simd_sum(x[i]);
      else r = simd_max(x[i]);
      out[i] = r;
    """
    with pytest.raises(Divergence, match="a simdgroup's threads are at different operations"):
        launch(source, normal(64))


def test_a_lane_that_is_not_there() -> None:
    with pytest.raises(Divergence, match="asks lane 32"):
        launch("uint i = thread_position_in_grid.x; out[i] = simd_shuffle(x[i], i + 1);", normal(64))


OUTSIDE = {  # x has 63 elements, out 64
    "read past the end": "out[i] = x[i];",
    "read before the start": "out[i] = x[int(i / 2) - 1];",
    "read far away": "out[i] = x[i * 100000000];",
    "read across the end": "uint2 w = ((const device uint2*)x)[i / 2]; out[i] = float(w.x + w.y);",
    "write past the end": "out[i + 1] = x[i / 2];",
    "threadgroup array": "threadgroup float tile[63]; tile[i] = x[i / 2]; out[i] = tile[i];",
    "threadgroup pointer": "threadgroup float tile[63]; threadgroup float* p = tile; p[i] = x[i / 2]; out[i] = p[i];",
    "own array": "float own[8]; for (uint k = 0; k < 8; k++) own[k] = x[k + i / 2]; out[i] = own[i / 7];",
}


@pytest.mark.parametrize("access", OUTSIDE)
def test_an_access_outside(access: str) -> None:
    with pytest.raises(OutOfBounds):
        launch("uint i = thread_position_in_grid.x;\n" + OUTSIDE[access], normal(63))


def test_an_access_outside_is_described() -> None:
    with pytest.raises(OutOfBounds) as raised:
        launch("uint i = thread_position_in_grid.x;\nout[i] = x[i + 1];", normal(64))
    text = str(raised.value)
    assert "custom_kernel_probe" in text
    assert "thread (63, 0, 0) of threadgroup (0, 0, 0)" in text
    if worker().compiler.kind == "ziglang":
        assert "read of 4 bytes, 0 bytes past the end of `x`, which has 256 bytes" in text
    else:
        assert "AddressSanitizer: heap-buffer-overflow, READ of size 4, is located 0 bytes to the right" in text
        assert "out[i] = x[i + 1];" in text


def test_a_read_of_what_must_not_be_read() -> None:
    x, past = normal(64, 3), np.arange(64)[:, None] >= 60
    source = "uint i = thread_position_in_grid.x; out[i] = i < {} ? x[3 * i + 2] : 0;"
    same(launch(source.format(60), x, unreadable={"x": past}), mx.where(mx.arange(64) < 60, x[:, 2], 0))
    with pytest.raises(Unreadable, match=r"thread \(60, 0, 0\).*`x` at byte 728, which must not be read"):
        launch(source.format(61), x, unreadable={"x": past})
    with pytest.raises(ValueError, match="unreadable names"):
        launch(source.format(60), x, unreadable={"y": past})


WIDE = """
  threadgroup float tile[512];
  uint i = thread_index_in_threadgroup;
  float row[8];
  for (int e = 0; e < 8; e++) row[e] = 2 * x[8 * i + e];
  for (int e = 0; e < 8; e++) tile[8 * i + e] = row[e];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int e = 0; e < 8; e++) row[e] = tile[8 * (63 - i) + e];
  for (int e = 0; e < 8; e++) out[8 * i + e] = row[e];
"""


def test_what_the_compiler_makes_one_wide_access_of_is_seen() -> None:
    x = normal(512)
    same(launch(WIDE, x, shape=(512,)), 2 * x.reshape(64, 8)[::-1].reshape(512))
    with pytest.raises(Uninitialised, match="`tile`"):
        launch(WIDE.replace("threadgroup_barrier(mem_flags::mem_threadgroup);", ""), x, shape=(512,))
    with pytest.raises(OutOfBounds):
        launch(WIDE, x[:511], shape=(512,))
    with pytest.raises(OutOfBounds):
        launch(WIDE, x, shape=(511,))


def test_unwritten_threadgroup_memory() -> None:
    source = (
        "threadgroup float tile[64]; uint i = thread_position_in_grid.x; if (i != 5) tile[i] = x[i]; out[i] = tile[i];"
    )
    with pytest.raises(Uninitialised, match=r"thread \(5, 0, 0\).*`tile` at byte 20"):
        launch(source, normal(64))


def test_threadgroup_memory_is_not_kept_for_the_next_threadgroup() -> None:
    source = """
      threadgroup float tile[32]; uint i = thread_position_in_grid.x;
      if (i < 32) tile[i] = x[i];
      out[i] = tile[i % 32];
    """
    with pytest.raises(Uninitialised, match=r"threadgroup \(1, 0, 0\)"):
        launch(source, normal(64), threadgroup=(32, 1, 1))


def test_adding_to_an_unwritten_output() -> None:
    with pytest.raises(Uninitialised, match="`out`"):
        launch("out[thread_position_in_grid.x] += x[thread_position_in_grid.x];", normal(64))


def test_two_threadgroups_write_one_place() -> None:
    with pytest.raises(Race, match=r"`out` at byte .* which another threadgroup wrote"):
        launch("out[thread_position_in_grid.x % 32] = x[0];", normal(64), threadgroup=(32, 1, 1))


def test_a_threadgroup_barrier_does_not_order_device_memory() -> None:
    source = """
      uint i = thread_position_in_grid.x;
      out[i] = x[i];
      threadgroup_barrier(mem_flags::MEMORY);
      float other = out[63 - i];
      threadgroup_barrier(mem_flags::MEMORY);
      out[i] = other;
    """
    x = normal(64)
    same(launch(source.replace("MEMORY", "mem_device"), x), x[::-1])
    with pytest.raises(Race, match="`out`"):
        launch(source.replace("MEMORY", "mem_threadgroup"), x)


def test_a_write_to_an_input() -> None:
    source = "uint i = thread_position_in_grid.x; {}[i] = 1; out[i] = x[i];"
    with pytest.raises(CompileFailed, match="read-only"):
        launch(source.format("x"), normal(64))
    with pytest.raises(WriteToInput, match="`x`, an input"):
        launch(source.format("const_cast<device float*>(x)"), normal(64))


NOT_METAL = {
    "missing device, helper": (
        "float f(const float* p) { return p[0]; }",
        "out[0] = f(x);",
        "without an address space",
    ),
    "missing device, cast": ("", "out[0] = *reinterpret_cast<const uint*>(x);", "without an address space"),
    "missing device, auto": ("struct S { const char* p; };", "out[0] = x[0];", "without an address space"),
    "missing device, template": (
        "template <int N, typename P> float f(P* p) { return p[0]; }",
        "out[0] = f<1, float>(x);",
        "no matching function",
    ),
    "wrong space": ("inline float f(threadgroup float* p) { return p[0]; }", "out[0] = f(out);", "address space"),
    "wrong space, local": ("", "float a = x[0]; device float* p = &a; out[0] = p[0];", "cannot initialize"),
    "double": ("", "double a = x[0]; out[0] = a;", "poisoned"),
    "literal": ("", "out[0] = x[0] * 1.5;", "precision"),
    "std": ("", "out[0] = std::exp(x[0]);", "poisoned"),
    "mixed max": ("", "out[0] = max(x[0], 1);", "no matching function"),
    "exp of an int": ("", "out[0] = exp(3);", "takes float"),
    "unknown": ("", "out[0] = warp_sum(x[0]);", "undeclared"),
    "array in a helper": (
        "inline void f() { threadgroup float a[2]; a[0] = 0; }",
        "out[0] = x[0];",
        "outside of the kernel",
    ),
    "two in a line": ("", "threadgroup float a[2], b[2]; out[0] = x[0];", "not understood"),
}


@pytest.mark.parametrize("case", NOT_METAL)
def test_what_metal_would_not_compile(case: str) -> None:
    header, source, message = NOT_METAL[case]
    with pytest.raises(CompileFailed, match=message):
        launch(source, normal(64), header=header + "\n")


def test_bfloat_is_made_from_a_float_only_when_asked() -> None:
    with pytest.raises(CompileFailed):
        launch("out[0] = x[0];", normal(64), dtype=mx.bfloat16)


def test_too_much_threadgroup_memory() -> None:
    source = "threadgroup float tile[{}]; tile[0] = 0; out[0] = x[0];"
    launch(source.format(8192), normal(64), grid=(1, 1, 1))
    with pytest.raises(ThreadgroupMemory, match="Metal grants 32768"):
        launch(source.format(8193), normal(64), grid=(1, 1, 1))


def test_too_many_threads() -> None:
    source = "out[thread_position_in_grid.x] = simd_sum(1.0f);"
    grid = {"grid": (2048, 1, 1), "shape": (2048,)}
    same(launch(source, normal(64), threadgroup=(1024, 1, 1), **grid), mx.full((2048,), 32.0))
    with pytest.raises(CompileFailed, match="up to 1024 threads"):
        launch(source, normal(64), threadgroup=(1025, 1, 1), **grid)


UNDEFINED = {
    "misaligned": "out[i] = float(*(const device uint*)((const device uchar*)x + i));",
    "shift": "out[i] = float(1u << i);",
    "not a number to int": "out[i] = float(int(x[i] / 0.0f));",
    "division": "out[i] = float(5 / int(i));",
}


@pytest.mark.parametrize("case", UNDEFINED)
def test_undefined_behaviour(case: str) -> None:
    with pytest.raises(Undefined, match="line"):
        launch("uint i = thread_position_in_grid.x;\n" + UNDEFINED[case], normal(64))


def test_a_kernel_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.metal_host.process.HANG_S", 1)
    with pytest.raises(Hang):
        launch("volatile thread int stop = 0; while (!stop) {} out[0] = x[0];", normal(64))


def test_after_a_mistake_the_next_kernel_runs() -> None:
    with pytest.raises(OutOfBounds):
        launch("out[thread_position_in_grid.x + 64] = x[0];", normal(64))
    same(launch("out[thread_position_in_grid.x] = x[0];", normal(64)), mx.broadcast_to(normal(64)[0], (64,)))


def test_a_missing_compiler_is_a_failure_not_a_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    from support.metal_host.compiler import find_compiler

    monkeypatch.setenv("KVANT_HOST_CXX", sys.executable)
    with pytest.raises(HostError, match="expected `ziglang` or a clang"):
        find_compiler.__wrapped__()

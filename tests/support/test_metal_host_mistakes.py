"""A run that finds nothing proves something only if it finds what is there: each planted mistake is caught.

Every one is one edit away from a kernel that passes.
"""

import sys
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from support.metal_host import host_pytest_skip, worker
from support.metal_host.compiler import find_compiler
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

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SWAP = f"""
  threadgroup float tile[64];
  tile[i] = x[i];
  {BARRIER}
  float next = tile[(i + 1) % 64];
  {BARRIER}
  tile[i] = next;
  out[i] = tile[i];
"""
MIRROR = """
  out[i] = x[i];
  threadgroup_barrier(mem_flags::mem_device);
  float other = out[63 - i];
  threadgroup_barrier(mem_flags::mem_device);
  out[i] = other;
"""
WIDE = f"""
  threadgroup float tile[512];
  float row[8];
  for (int e = 0; e < 8; e++) row[e] = 2 * x[8 * i + e];
  for (int e = 0; e < 8; e++) tile[8 * i + e] = row[e];
  {BARRIER}
  for (int e = 0; e < 8; e++) row[e] = tile[8 * (63 - i) + e];
  for (int e = 0; e < 8; e++) out[8 * i + e] = row[e];
"""
TOO_LARGE = "threadgroup float tile[8193]; tile[0] = 0; out[0] = x[0];"


class Mistake(NamedTuple):
    """A source in which i is the thread; what is said of it; how many elements its input x has, of out's 64."""

    source: str
    kind: type[HostError]
    said: str = ""
    elements: int = 64
    options: dict[str, Any] = {}  # noqa: RUF012  never changed


SMALL_GROUPS: dict[str, Any] = {"threadgroup": (32, 1, 1)}
MISTAKES = {
    # races and what nobody wrote
    "a write after another thread's read": Mistake(
        SWAP.replace(f"{BARRIER}\n  tile", "tile"), Race, r"of `tile` at byte \d+, which .* with no barrier in between"
    ),
    "two writes of a place": Mistake("threadgroup int last[1]; last[0] = int(i); out[0] = 1;", Race, "write of `last`"),
    "two threadgroups, one place": Mistake("out[i % 32] = x[0];", Race, "another threadgroup wrote", 64, SMALL_GROUPS),
    "a barrier of other memory": Mistake(MIRROR.replace("mem_device", "mem_threadgroup"), Race, "`out`"),
    "threadgroup memory nobody wrote": Mistake(
        "threadgroup float tile[64]; if (i != 5) tile[i] = x[i]; out[i] = tile[i];",
        Uninitialised,
        r"thread \(5, 0, 0\).*`tile` at byte 20",
    ),
    "threadgroup memory of the one before": Mistake(
        "threadgroup float tile[32]; if (i < 32) tile[i] = x[i]; out[i] = tile[i % 32];",
        Uninitialised,
        r"threadgroup \(1, 0, 0\)",
        64,
        SMALL_GROUPS,
    ),
    "adding to an output": Mistake("out[i] += x[i];", Uninitialised, "`out`"),
    "a wide read before a barrier": Mistake(WIDE.replace(BARRIER, ""), Uninitialised, "`tile`", 512, {"shape": (512,)}),
    # threads that go different ways
    "a barrier in a branch": Mistake(
        "if (i < 32)\n threadgroup_barrier(mem_flags::mem_none);\nout[i] = x[i];",
        Divergence,
        r"threads 0 to 31 at threadgroup_barrier, line \d+; threads 32 to 63 ended",
    ),
    "two barriers in two branches": Mistake(
        "if (i % 2) { out[i] = x[i]; threadgroup_barrier(mem_flags::mem_none); }\n"
        "else {\n threadgroup_barrier(mem_flags::mem_none); out[i] = x[i]; }",
        Divergence,
        "different barriers",
    ),
    "a loop that some leave early": Mistake(
        "for (uint n = 0; n < 2 + i / 63; n++) threadgroup_barrier(mem_flags::mem_none); out[i] = x[i];",
        Divergence,
        "thread 63 at threadgroup_barrier",
    ),
    **{
        f"{operation} in a branch": Mistake(
            f"float r = 0; if (i != 40) r = {operation}(x[i]{more}); out[i] = r;",
            Divergence,
            f"{operation}.*thread 40 ended",
        )
        for operation, more in (("simd_sum", ""), ("simd_shuffle_xor", ", 1"), ("simd_max", ""))
    },
    "simd two ways": Mistake(
        "float r = 0; if (i % 2) r = simd_sum(x[i]);\n else r = simd_max(x[i]); out[i] = r;",
        Divergence,
        "different operations",
    ),
    "a lane that is not there": Mistake("out[i] = simd_shuffle(x[i], i + 1);", Divergence, "asks lane 32"),
    # outside of a buffer: x has 63 elements
    "read past the end": Mistake("out[i] = x[i];", OutOfBounds, r"thread \(63, 0, 0\) of threadgroup \(0, 0, 0\)", 63),
    "read before the start": Mistake("out[i] = x[int(i / 2) - 1];", OutOfBounds, "", 63),
    "read far away": Mistake("out[i] = x[i * 100000000];", OutOfBounds, "", 63),
    "read across the end": Mistake(
        "uint2 w = ((const device uint2*)x)[i / 2]; out[i] = float(w.x + w.y);", OutOfBounds, "", 63
    ),
    "write past the end": Mistake("out[i + 1] = x[i / 2];", OutOfBounds, "", 63),
    "a threadgroup array": Mistake("threadgroup float t[63]; t[i] = x[i / 2]; out[i] = t[i];", OutOfBounds, "", 63),
    "a threadgroup pointer": Mistake(
        "threadgroup float t[63]; threadgroup float* p = t; p[i] = x[i / 2]; out[i] = p[i];", OutOfBounds, "", 63
    ),
    "an own array": Mistake(
        "float own[8]; for (uint k = 0; k < 8; k++) own[k] = x[k + i / 2]; out[i] = own[i / 7];", OutOfBounds, "", 63
    ),
    "a wide read": Mistake(WIDE, OutOfBounds, "", 511, {"shape": (512,)}),
    "a wide write": Mistake(WIDE, OutOfBounds, "", 512, {"shape": (511,)}),
    # inputs
    "a write to an input": Mistake("x[i] = 1; out[i] = x[i];", CompileFailed, "read-only"),
    "a write to an input, cast": Mistake("const_cast<device float*>(x)[i] = 1;", WriteToInput, "`x`, an input"),
    # what is not defined
    "misaligned": Mistake("out[i] = float(*(const device uint*)((const device uchar*)x + i));", Undefined, "line"),
    "a shift": Mistake("out[i] = float(1u << i);", Undefined, "line"),
    "not a number to int": Mistake("out[i] = float(int(x[i] / 0.0f));", Undefined, "line"),
    "a division": Mistake("out[i] = float(5 / int(i));", Undefined, "line"),
    # too much
    "threadgroup memory": Mistake(TOO_LARGE, ThreadgroupMemory, "Metal grants 32768", 64, {"grid": (1, 1, 1)}),
    "threads": Mistake(
        "out[i] = 1;", CompileFailed, "up to 1024 threads", 64,
        {"grid": (2048, 1, 1), "shape": (2048,), "threadgroup": (1025, 1, 1)},
    ),
    # what Metal's compiler refuses
    "a missing space, cast": Mistake("out[0] = *reinterpret_cast<const uint*>(x);", CompileFailed, "address space"),
    "a wrong space, local": Mistake("float a = x[0]; device float* p = &a;", CompileFailed, "initialize"),
    "double": Mistake("double a = x[0]; out[0] = a;", CompileFailed, "poisoned"),
    "a literal": Mistake("out[0] = x[0] * 1.5;", CompileFailed, "precision"),
    "std": Mistake("out[0] = std::exp(x[0]);", CompileFailed, "poisoned"),
    "max of two types": Mistake("out[0] = max(x[0], 1);", CompileFailed, "no matching function"),
    "exp of an int": Mistake("out[0] = exp(3);", CompileFailed, "takes float"),
    "an unknown name": Mistake("out[0] = warp_sum(x[0]);", CompileFailed, "undeclared"),
    "two arrays in a line": Mistake("threadgroup float a[2], b[2]; out[0] = x[0];", CompileFailed, "not understood"),
    "bfloat from a float": Mistake("out[0] = x[0];", CompileFailed, "", 64, {"dtype": mx.bfloat16}),
    **{
        f"{name}, in a helper": Mistake(source, CompileFailed, said, 64, {"header": header + "\n"})
        for name, header, source, said in (
            ("a missing space", "float f(const float* p) { return p[0]; }", "out[0] = f(x);", "address space"),
            ("a missing space, struct", "struct S { const char* p; };", "out[0] = x[0];", "address space"),
            (
                "a missing space, template",
                "template <int N, typename P> float f(P* p) { return p[0]; }",
                "out[0] = f<1, float>(x);",
                "no matching function",
            ),
            ("a wrong space", "inline float f(threadgroup float* p) { return p[0]; }", "out[0] = f(out);", "space"),
            (
                "a threadgroup array",
                "inline void f() { threadgroup float a[2]; a[0] = 0; }",
                "out[0] = x[0];",
                "outside of the kernel",
            ),
        )
    },
}  # fmt: skip


def run(source: str, elements: int = 64, **options: Any) -> mx.array:
    return launch("uint i = thread_position_in_grid.x;\n" + source, normal(elements), **options)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught(name: str) -> None:
    source, kind, said, elements, options = MISTAKES[name]
    with pytest.raises(kind, match=said or None):
        run(source, elements, **options)


def test_the_sources_are_right_without_the_mistake() -> None:
    same(run(SWAP), mx.roll(normal(64), -1))
    same(run(MIRROR), normal(64)[::-1])
    same(run(WIDE, 512, shape=(512,)), 2 * normal(512).reshape(64, 8)[::-1].reshape(512))
    run(TOO_LARGE.replace("8193", "8192"), grid=(1, 1, 1))
    grid: dict[str, Any] = {"grid": (2048, 1, 1), "shape": (2048,), "threadgroup": (1024, 1, 1)}
    same(run("out[i] = simd_sum(1.0f);", **grid), mx.full((2048,), 32.0))


@pytest.mark.parametrize(("which", "kind"), [(0, Uninitialised), (1, Race)])
def test_a_dropped_barrier_of_a_reduction(which: int, kind: type[HostError]) -> None:
    parts = REDUCTION.split(BARRIER)
    with pytest.raises(kind, match=r"thread \(\d+, 0, 0\) of threadgroup.*`tile` at byte"):
        reduce(BARRIER.join(parts[: which + 1]) + BARRIER.join(parts[which + 1 :]))


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_a_race_is_found_in_every_order(order: int) -> None:
    with pytest.raises(Race, match=r"write of `last` at byte 0"):
        run("threadgroup int last[1]; last[0] = int(i); out[0] = 1;", orders=(order,))


def test_an_access_outside_is_described() -> None:
    with pytest.raises(OutOfBounds) as raised:
        run("out[i] = x[i + 1];")
    text = str(raised.value)
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


def test_a_kernel_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.metal_host.process.HANG_S", 1)
    with pytest.raises(Hang):
        run("volatile thread int stop = 0; while (!stop) {} out[0] = x[0];")
    same(run("out[i] = x[0];"), mx.broadcast_to(normal(64)[0], (64,)))  # the next one runs


def test_a_missing_compiler_is_a_failure_not_a_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVANT_HOST_CXX", sys.executable)
    with pytest.raises(HostError, match="expected `ziglang` or a clang"):
        find_compiler.__wrapped__()

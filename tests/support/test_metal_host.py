"""The host run of Metal kernels itself: right kernels give NumPy's results, and each planted mistake is
caught.

What kvant's own kernels use of Metal is held against the oracle by their tests, which run here.
Every mistake is one edit away from a kernel that passes. Which compiler ran is in the last lines of pytest's
output.
"""

import sys
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from support.metal_host import FORWARD, REVERSE, HostError, host_pytest_skip, on_host, worker
from support.metal_host.compiler import find_compiler
from support.metal_host.source import Triple

pytestmark = host_pytest_skip


def launch(
    source: str,
    *inputs: mx.array,
    grid: Triple = (64, 1, 1),
    threadgroup: Triple = (64, 1, 1),
    shape: tuple[int, ...] = (64,),
    dtype: mx.Dtype = mx.float32,
    header: str = "",
    orders: tuple[int, ...] = (FORWARD, REVERSE),
    unreadable: dict[str, np.ndarray] | None = None,
    **options: Any,
) -> mx.array:
    """The output of a kernel of inputs x, y and z in which i is the thread."""
    text = "uint i = thread_position_in_grid.x;\n" + source
    names = ["x", "y", "z"][: len(inputs)]
    kernel = mx.fast.metal_kernel("probe", names, ["out"], text, header + "\n")
    sizes = {"grid": grid, "threadgroup": threadgroup, "output_shapes": [shape], "output_dtypes": [dtype]}
    return on_host(kernel, orders=orders, unreadable=unreadable)(inputs=list(inputs), **sizes, **options)[0]


def normal(*shape: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).astype(dtype)


def same(given: mx.array, expected: mx.array) -> None:
    assert (given.dtype, given.shape) == (expected.dtype, expected.shape)
    assert mx.array_equal(given, expected).item(), (given, expected)


def test_a_kernel_has_what_mlx_gives_it() -> None:
    """Template arguments, a header, and the shape of an input; a scalar is a reference."""
    source = "if (B) out[i] = T(x[i] * y + N * z[0] * x_shape[1]);"
    options = {
        "template": [("T", mx.bfloat16), ("N", 2), ("B", True)],
        "grid": (12, 1, 1),
        "threadgroup": (4, 1, 1),
    }
    x = normal(3, 4)
    given = launch(
        source, x, mx.array(3), mx.ones(7), header="constant int UNUSED = 3;", **options, shape=(3, 4)
    )
    same(given, (x * 3 + 2 * 4).astype(mx.bfloat16).astype(mx.float32))


def test_what_nobody_writes_is_not_zero() -> None:
    given = launch("if (i > 0) out[i] = x[0];", normal(64))
    assert mx.isnan(given).tolist() == [True, *[False] * 63]


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SUMS = f"""
  threadgroup float tile[4][16];
  uint t = thread_index_in_threadgroup, g = threadgroup_position_in_grid.x;
  tile[t / 16][t % 16] = x[g * 64 + t];
  {BARRIER}
  for (uint width = 32; width > 0; width /= 2) {{
    if (t < width) tile[t / 16][t % 16] += tile[(t + width) / 16][(t + width) % 16];
    {BARRIER}
  }}
  if (t == 0) out[g] = tile[0][0];
"""
SWAP = f"""
  threadgroup float tile[64];
  tile[i] = x[i];
  {BARRIER}
  float next = tile[(i + 1) % 64];
  {BARRIER}
  tile[i] = next;
  out[i] = tile[i];
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
LAST = "threadgroup int last[1]; last[0] = int(i); out[0] = 1;"
SMALL: dict[str, Any] = {"threadgroup": (32, 1, 1)}
THREE: dict[str, Any] = {"elements": 192, "grid": (192, 1, 1), "shape": (3,)}
MANY: dict[str, Any] = {"grid": (2048, 1, 1), "shape": (2048,)}
SHORT: dict[str, Any] = {"elements": 63}
# The source, what is said of it, and how many elements its input x has besides out's 64.
MISTAKES: dict[str, tuple[str, str] | tuple[str, str, dict[str, Any]]] = {
    # races and what nobody wrote
    "a write after another thread's read": (
        SWAP.replace(f"{BARRIER}\n  tile", "tile"), r"Race.* of `tile` at byte \d+, which .* with no "
                                                    r"barrier"),
    "two threadgroups, one place": ("out[i % 32] = x[0];", "Race.*another threadgroup wrote", SMALL),
    "a barrier of no memory": (SWAP.replace("mem_threadgroup", "mem_none"), "(Race|Uninitialised).*`tile`"),
    "an output between threads": (f"out[i] = x[i]; {BARRIER} out[i] = out[63 - "
                                  f"i];", "(Race|Uninitialised).*`out`"),
    "a sum without its first barrier": (
        SUMS.replace(BARRIER, "", 1), r"Uninitialised.*thread \(\d+, 0, 0\) of threadgroup.*`tile` at "
                                      r"byte", THREE),
    "threadgroup memory nobody wrote": (
        "threadgroup float tile[64]; if (i != 5) tile[i] = x[i]; out[i] = tile[i];",
        r"Uninitialised.*thread \(5, 0, 0\).*`tile` at byte 20"),
    "threadgroup memory of the one before": (
        "threadgroup float tile[32]; if (i < 32) tile[i] = x[i]; out[i] = tile[i % 32];",
        r"Uninitialised.*threadgroup \(1, 0, 0\)", SMALL),
    "adding to an output": ("out[i] += x[i];", "Uninitialised.*`out`"),
    "a wide read before a barrier": (
        WIDE.replace(BARRIER, ""), "Uninitialised.*`tile`", {"elements": 512, "shape": (512,)}),
    # threads that go different ways
    "a barrier in a branch": (
        "if (i < 32)\n threadgroup_barrier(mem_flags::mem_none);\nout[i] = x[i];",
        r"Divergence.*threads 0 to 31 at threadgroup_barrier, line \d+; threads 32 to 63 ended"),
    "two barriers in two branches": (
        "if (i % 2) { out[i] = x[i]; threadgroup_barrier(mem_flags::mem_none); }\n"
        "else {\n threadgroup_barrier(mem_flags::mem_none); out[i] = x[i]; }", "Divergence.*different "
                                                                               "barriers"),
    "a shuffle in a branch": (
        "float r = 0; if (i != 40) r = simd_shuffle(x[i], 0); out[i] = r;",
        "Divergence.*simd_shuffle.*thread 40 ended"),
    "simd two ways": (
        "float r = 0; if (i % 2) r = simd_shuffle(x[i], 0);\n else r = simd_shuffle_xor(x[i], 1); out[i] = "
        "r;",
        "Divergence.*different operations"),
    "a lane that is not there": ("out[i] = simd_shuffle(x[i], i + 1);", "Divergence.*asks lane 32"),
    # outside of a buffer
    "read before the start": ("out[i] = x[int(i / 2) - 1];", "OutOfBounds"),
    "read across the end": (
        "uint2 w = ((const device uint2*)x)[i / 2]; out[i] = float(w.x + w.y);", "OutOfBounds", SHORT),
    "write past the end": ("out[i + 1] = x[i / 2];", "OutOfBounds"),
    "a threadgroup array": ("threadgroup float t[63]; t[i] = x[i / 2]; out[i] = t[i];", "OutOfBounds"),
    "an own array": (
        "float own[8]; for (uint k = 0; k < 8; k++) own[k] = x[k + i / 2]; out[i] = own[i / "
        "7];", "OutOfBounds"),
    "a wide read": (WIDE, "OutOfBounds", {"elements": 511, "shape": (512,)}),
    "a wide write": (WIDE, "OutOfBounds", {"elements": 512, "shape": (511,)}),
    # inputs, and what is not defined
    "a write to an input": ("x[i] = 1; out[i] = x[i];", "CompileFailed.*read-only"),
    "a write to an input, cast": ("const_cast<device float*>(x)[i] = 1;", "WriteToInput.*`x`, an input"),
    "misaligned": ("out[i] = float(*(const device uint*)((const device uchar*)x + i));", "Undefined.*line"),
    "a shift": ("out[i] = float(1u << i);", "Undefined.*line"),
    "a division": ("out[i] = float(5 / int(i));", "Undefined.*line"),
    # too much
    "threadgroup memory": (TOO_LARGE, "ThreadgroupMemory.*Metal grants 32768", {"grid": (1, 1, 1)}),
    "threads": ("out[i] = 1;", "CompileFailed.*up to 1024", {**MANY, "threadgroup": (1025, 1, 1)}),
    # what Metal's compiler refuses
    "a missing space": ("out[0] = *reinterpret_cast<const uint*>(x);", "CompileFailed.*address space"),
    "a wrong space": ("float a = x[0]; device float* p = &a;", "CompileFailed.*initialize"),
    "double": ("double a = x[0]; out[0] = a;", "CompileFailed.*poisoned"),
    "a literal": ("out[0] = x[0] * 1.5;", "CompileFailed.*precision"),
    "std": ("out[0] = std::exp(x[0]);", "CompileFailed.*poisoned"),
    "max of two types": ("out[0] = max(x[0], 1);", "CompileFailed.*no matching function"),
    "exp of an int": ("out[0] = exp(3);", "CompileFailed.*takes float"),
    "two arrays in a line": ("threadgroup float a[2], b[2]; out[0] = x[0];", "CompileFailed.*not understood"),
    "bfloat from a float": ("out[0] = x[0];", "CompileFailed", {"dtype": mx.bfloat16}),
    # and in a helper
    "no space": (
        "out[0] = f(x);", "CompileFailed.*address space", {"header": "float f(const float* p) { return p[0]; "
                                                                     "}"}),
    "no space, struct": ("out[0] = x[0];", "CompileFailed.*address space", {"header": "struct S { const "
                                                                                      "char* p; };"}),
    "no space, template": (
        "out[0] = f<1, float>(x);", "CompileFailed.*no matching function",
        {"header": "template <int N, typename P> float f(P* p) { return p[0]; }"}),
    "another space": (
        "out[0] = f(out);", "CompileFailed.*space",
        {"header": "inline float f(threadgroup float* p) { return p[0]; }"}),
    "an array of a helper": (
        "out[0] = x[0];", "CompileFailed.*outside of the kernel",
        {"header": "inline void f() { threadgroup float a[2]; a[0] = 0; }"}),
}  # fmt: skip


def run(source: str, elements: int = 64, **options: Any) -> mx.array:
    return launch(source, normal(elements), **options)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught(name: str) -> None:
    source, said, *options = MISTAKES[name]
    with pytest.raises(HostError, match="(?s)" + said):
        run(source, **(options[0] if options else {}))


def test_the_sources_are_right_without_the_mistake() -> None:
    np.testing.assert_allclose(run(SUMS, **THREE), np.array(normal(192)).reshape(3, 64).sum(1), rtol=1e-5)
    same(run(SWAP), mx.roll(normal(64), -1))
    same(run(WIDE, 512, shape=(512,)), 2 * normal(512).reshape(64, 8)[::-1].reshape(512))
    run(TOO_LARGE.replace("8193", "8192"), grid=(1, 1, 1))
    same(
        run("out[i] = simd_shuffle(i, 31);", **MANY, threadgroup=(1024, 1, 1)),
        mx.arange(2048) // 32 * 32.0 + 31,
    )


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_a_race_is_found_in_every_order(order: int) -> None:
    with pytest.raises(HostError, match=r"Race.*write of `last` at byte 0"):
        run(LAST, orders=(order,))


def test_an_access_outside_is_described() -> None:
    with pytest.raises(
        HostError, match=r"OutOfBounds.*thread \(63, 0, 0\) of threadgroup \(0, 0, 0\)"
    ) as raised:
        run("out[i] = x[i + 1];")
    said = [
        "AddressSanitizer: heap-buffer-overflow, READ of size 4, is located 0 bytes",
        "out[i] = x[i + 1];",
    ]
    if worker().compiler.kind == "ziglang":
        said = ["read of 4 bytes, 0 bytes past the end of `x`, which has 256 bytes"]
    assert all(words in str(raised.value) for words in said)


def test_a_read_of_what_must_not_be_read() -> None:
    x, past = normal(64, 3), np.arange(64)[:, None] >= 60
    source = "out[i] = i < {} ? x[3 * i + 2] : 0;"
    same(launch(source.format(60), x, unreadable={"x": past}), mx.where(mx.arange(64) < 60, x[:, 2], 0))
    with pytest.raises(
        HostError, match=r"Unreadable.*thread \(60, 0, 0\).*`x` at byte 728, which must not be read"
    ):
        launch(source.format(61), x, unreadable={"x": past})
    with pytest.raises(ValueError, match="unreadable names"):
        launch(source.format(60), x, unreadable={"y": past})


def test_a_kernel_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.metal_host.process.HANG_S", 1)
    with pytest.raises(HostError, match="Hang"):
        run("volatile thread int stop = 0; while (!stop) {} out[0] = x[0];")
    same(run("out[i] = x[0];"), mx.broadcast_to(normal(64)[0], (64,)))  # the next one runs


def test_a_missing_compiler_is_a_failure_not_a_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVANT_HOST_CXX", sys.executable)
    with pytest.raises(HostError, match=r"NoCompiler.*expected `ziglang` or a clang"):
        find_compiler.__wrapped__()

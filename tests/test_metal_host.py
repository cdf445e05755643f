"""The host run of Metal kernels itself: right kernels give numpy's results, and each planted mistake is caught.

A run that finds nothing proves something only if it finds what is there: every mistake here is one edit away from the
kernel that passes. Which compiler ran is in the last lines of pytest's output; docs/host-run.md says what each can see.
"""

import re
import sys
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from metal_host import KernelCall, host_pytest_skip, kernel_call, on_host, run_on_host, traced, worker
from metal_host.errors import (
    CompileFailed,
    Divergence,
    Hang,
    HostError,
    NotOneKernel,
    OutOfBounds,
    Race,
    ThreadgroupMemory,
    Undefined,
    Uninitialised,
    WriteToInput,
)

pytestmark = host_pytest_skip

Triple = tuple[int, int, int]
FLOATS = [mx.float32, mx.float16, mx.bfloat16]


def launch(
    source: str,
    *inputs: mx.array,
    grid: Triple = (64, 1, 1),
    threadgroup: Triple = (64, 1, 1),
    shape: tuple[int, ...] = (64,),
    dtype: mx.Dtype = mx.float32,
    header: str = "",
    **options: Any,
) -> mx.array:
    """Runs a kernel of inputs x, y, ... and one output, out."""
    kernel = metal_kernel(source, len(inputs), header)
    launch_options = {"grid": grid, "threadgroup": threadgroup, "output_shapes": [shape], "output_dtypes": [dtype]}
    return on_host(kernel)(inputs=list(inputs), **launch_options, **options)[0]


def metal_kernel(source: str, num_inputs: int, header: str = "") -> Any:
    names = ["x", "y", "z"][:num_inputs]
    return mx.fast.metal_kernel(name="probe", input_names=names, output_names=["out"], source=source, header=header)


def normal(*shape: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).astype(dtype)


def same(given: mx.array, expected: mx.array) -> None:
    assert given.dtype == expected.dtype
    assert given.shape == expected.shape
    assert mx.array_equal(given, expected).item(), (given, expected)


# --- what MLX generates


def test_a_call_is_read_as_mlx_launches_it() -> None:
    source = "uint i = thread_position_in_grid.x; out[i] = T(x[i] * y + z[0] * x_strides[0] * x_shape[1] * x_ndim);"
    options = {"template": [("T", mx.bfloat16), ("N", 4), ("B", True)], "grid": (12, 1, 1), "threadgroup": (4, 1, 1)}
    options |= {"output_shapes": [(3, 4)], "output_dtypes": [mx.bfloat16]}
    inputs = [normal(3, 4), mx.array(3), mx.zeros(7)]
    call = kernel_call(metal_kernel(source, 3, "constant int UNUSED = 3;\n"), inputs, **options)
    assert call.template == "<bfloat16_t, 4, 1>"
    assert (call.grid, call.threadgroup) == ((12, 1, 1), (4, 1, 1))
    assert call.text.startswith("constant int UNUSED = 3;\ntemplate <typename T, int N, bool B>\n[[kernel]] void")
    assert [(p.kind, p.name, p.index, p.type, p.space, p.by_reference) for p in call.parameters] == [
        ("input", "x", 0, "float", "device", False),
        ("shape", "x_shape", 0, "int", "constant", False),
        ("strides", "x_strides", 0, "int64_t", "constant", False),
        ("ndim", "x_ndim", 0, "int", "constant", True),
        ("input", "y", 1, "int32_t", "constant", True),
        ("input", "z", 2, "float", "constant", False),
        ("output", "out", 0, "bfloat16_t", "device", False),
        ("attribute", "thread_position_in_grid", -1, "uint3", "", False),
    ]
    assert [(x.shape, x.dtype) for x in call.outputs] == [((3, 4), mx.bfloat16)]


def test_only_kernels_are_traced() -> None:
    with pytest.raises(NotOneKernel, match="the function does Negative"):
        traced(lambda x: -x, normal(3))
    with pytest.raises(NotOneKernel, match="launches no kernel"):
        traced(lambda x: x, normal(3))


def test_a_kernel_reads_what_another_wrote() -> None:
    kernel = metal_kernel("uint i = thread_position_in_grid.x; out[i] = 2 * x[i];", 1)
    launched = {"grid": (64, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(64,)], "output_dtypes": [mx.float32]}

    def twice(x: mx.array) -> mx.array:
        (y,) = kernel(inputs=[x], stream=mx.gpu, **launched)
        return kernel(inputs=[y], stream=mx.gpu, **launched)[0]

    x = normal(64)
    same(run_on_host(twice, x)[0], 4 * x)


# --- right kernels


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_elementwise_arithmetic_rounds_as_the_dtype(dtype: mx.Dtype) -> None:
    x, y = normal(64, dtype=dtype), normal(64, dtype=dtype, seed=1)
    source = "uint i = thread_position_in_grid.x; T a = x[i], b = y[i]; out[i] = (a * b + a) - b * T(0.3f);"
    given = launch(source, x, y, template=[("T", dtype)], dtype=dtype)
    same(given, (x * y + x) - y * mx.array(0.3, dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_conversion_from_float(dtype: mx.Dtype) -> None:
    halves = np.arange(65536, dtype=np.uint32)
    bits = np.concatenate([halves << 16, halves << 16 | 0x8000, halves << 16 | 0x8001, halves << 13, halves << 13 | 0x1000])
    x = mx.array(bits).view(mx.float32)
    given = launch(
        "uint i = thread_position_in_grid.x; out[i] = T(x[i]);",
        *[x],
        template=[("T", dtype)],
        grid=(x.size, 1, 1),
        shape=x.shape,
        dtype=dtype,
    )
    expected = x.astype(dtype)
    number = ~mx.isnan(x)
    assert mx.array_equal(mx.isnan(given), mx.isnan(x)).item()
    same(mx.where(number, given, 0), mx.where(number, expected, 0))


def test_functions_match_numpy() -> None:
    source = """
      uint i = thread_position_in_grid.x;
      float a = metal::abs(x[i]) + 0.5f;
      float s = fast::exp(x[i]) + metal::exp2(x[i]) + precise::log(a) + sqrt(a) + rsqrt(a);
      out[i] = s + max(x[i], 0.0f) - min(x[i], 0.0f) + rint(4.0f * x[i]) + as_type<float>(as_type<uint>(a) ^ 0x80000000u);
    """
    x = np.array(normal(64)).astype(np.float64)
    a = np.abs(x) + 0.5
    expected = np.exp(x) + np.exp2(x) + np.log(a) + np.sqrt(a) + 1 / np.sqrt(a) + np.abs(x) + np.rint(4 * x) - a
    np.testing.assert_allclose(np.array(launch(source, normal(64))), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_simd_functions_match_numpy(dtype: mx.Dtype) -> None:
    source = """
      uint i = thread_position_in_grid.x, lane = thread_index_in_simdgroup;
      float r = float(simd_max(x[i])) + 10 * float(simd_min(x[i])) + float(simd_shuffle_xor(x[i], 5));
      r += float(simd_shuffle(x[i], (lane * 7 + simdgroup_index_in_threadgroup) % 32)) + float(simd_broadcast(x[i], 9));
      r += float(simd_shuffle_down(x[i], 3)) + float(simd_shuffle_up(x[i], 2));
      out[i] = simd_sum(int(lane)) + r;
    """
    x = normal(64, dtype=dtype)
    rows, lane = np.array(x.astype(mx.float32)).reshape(2, 32), np.arange(32)
    expected = rows.max(1, keepdims=True) + 10 * rows.min(1, keepdims=True) + rows[:, lane ^ 5]
    expected = expected + np.stack([rows[g, (lane * 7 + g) % 32] for g in (0, 1)]) + rows[:, 9:10]
    expected = expected + rows[:, np.where(lane + 3 < 32, lane + 3, lane)] + rows[:, np.where(lane >= 2, lane - 2, lane)]
    given = np.array(launch(source, x)).reshape(2, 32)
    np.testing.assert_allclose(given, expected + 31 * 16, rtol=1e-6)


def test_simd_sum_of_a_part_simdgroup() -> None:
    x = normal(40)
    given = launch(
        "uint i = thread_position_in_grid.x; out[i] = simd_sum(x[i]);", x, grid=(40, 1, 1), threadgroup=(40, 1, 1), shape=(40,)
    )
    rows = np.array(x)
    expected = np.r_[np.full(32, rows[:32].sum()), np.full(8, rows[32:].sum())]
    np.testing.assert_allclose(np.array(given), expected, rtol=1e-5, atol=1e-6)


REDUCTION = """
  threadgroup float tile[4][16];
  uint t = thread_index_in_threadgroup, g = threadgroup_position_in_grid.x;
  tile[t / 16][t % 16] = x[g * 64 + t];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint width = 32; width > 0; width /= 2) {
    if (t < width) tile[t / 16][t % 16] += tile[(t + width) / 16][(t + width) % 16];
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (t == 0) out[g] = tile[0][0];
"""


def reduce(source: str) -> mx.array:
    return launch(source, normal(192), grid=(192, 1, 1), shape=(3,))


def test_a_reduction_over_threadgroups() -> None:
    np.testing.assert_allclose(np.array(reduce(REDUCTION)), np.array(normal(192)).reshape(3, 64).sum(1), rtol=1e-5)


def test_a_grid_of_three_dimensions_that_threadgroups_do_not_divide() -> None:
    source = """
      uint3 at = thread_position_in_grid, size = threads_per_grid;
      uint3 local = thread_position_in_threadgroup, group = threadgroup_position_in_grid;
      uint i = (at.z * size.y + at.y) * size.x + at.x;
      uint flat = (local.z * threads_per_threadgroup.y + local.y) * threads_per_threadgroup.x + local.x;
      bool right = flat == thread_index_in_threadgroup && at.x == group.x * 4 + local.x && at.z == group.z * 2 + local.z;
      out[i] = right ? int(i) : -1;
    """
    given = launch(source, mx.zeros(8), grid=(10, 7, 3), threadgroup=(4, 3, 2), shape=(210,), dtype=mx.int32)
    same(given, mx.arange(210, dtype=mx.int32))


def test_helpers_of_the_header_and_words_of_bytes() -> None:
    header = """
      template <typename P> float first(P p) { return float(p[0]); }
      inline float byte_sum(const device uint* words, uint i) {
        float sum = 0;
        for (uint b = 0; b < 4; b++) sum += float(int8_t((words[i] >> (8 * b)) & 255u));
        return sum;
      }
    """
    source = """
      uint i = thread_position_in_grid.x;
      threadgroup float mine[64];
      mine[i] = byte_sum(reinterpret_cast<const device uint*>(x), i);
      out[i] = first(&mine[i]) + 0 * first(x);
    """
    x = mx.array(np.random.default_rng(0).integers(-128, 128, 256).astype(np.int8))
    same(launch(source, x, header=header), x.reshape(64, 4).astype(mx.float32).sum(1))


def test_simdgroup_barrier_orders_its_own_simdgroup() -> None:
    source = """
      threadgroup float tile[64];
      uint t = thread_index_in_threadgroup;
      tile[t] = x[t];
      simdgroup_barrier(mem_flags::mem_threadgroup);
      out[t] = tile[t ^ MASK];
    """
    x = normal(64)
    same(launch(source, x, template=[("MASK", 31)]), x.reshape(2, 32)[:, ::-1].reshape(64))
    with pytest.raises((Race, Uninitialised)):
        launch(source, x, template=[("MASK", 32)])


def test_an_output_may_start_with_values() -> None:
    given = launch("out[thread_position_in_grid.x] += x[thread_position_in_grid.x];", normal(64), init_value=2)
    same(given, normal(64) + 2)


def test_what_nobody_writes_is_not_zero() -> None:
    given = launch("if (thread_position_in_grid.x > 0) out[thread_position_in_grid.x] = x[0];", normal(64))
    assert mx.isnan(given[0]).item()
    assert not mx.isnan(given[1:]).any().item()


# --- mistakes


@pytest.mark.parametrize("which", [0, 1])
def test_a_dropped_barrier(which: int) -> None:
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    parts = REDUCTION.split(barrier)
    dropped = barrier.join(parts[: which + 1]) + barrier.join(parts[which + 1 :])
    assert dropped.count(barrier) == 1
    with pytest.raises((Race, Uninitialised), match="`tile` at byte") as raised:
        reduce(dropped)
    assert re.search(r"thread \(\d+, 0, 0\) of threadgroup", str(raised.value))


def test_a_barrier_of_the_wrong_memory() -> None:
    with pytest.raises((Race, Uninitialised)):
        reduce(REDUCTION.replace("mem_threadgroup)", "mem_device)"))


def test_a_barrier_in_a_branch() -> None:
    source = "uint i = thread_position_in_grid.x;\nif (i < 32)\n threadgroup_barrier(mem_flags::mem_none);\nout[i] = x[i];"
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


def test_unwritten_threadgroup_memory() -> None:
    source = "threadgroup float tile[64]; uint i = thread_position_in_grid.x; if (i != 5) tile[i] = x[i]; out[i] = tile[i];"
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
    with pytest.raises(Race, match="`out` at byte .* which another threadgroup wrote"):
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
    "missing device, helper": ("float f(const float* p) { return p[0]; }", "out[0] = f(x);", "without an address space"),
    "missing device, cast": ("", "out[0] = *reinterpret_cast<const uint*>(x);", "without an address space"),
    "missing device, auto": ("struct S { const char* p; };", "out[0] = x[0];", "without an address space"),
    "missing device, template": ("template <int N, typename P> float f(P* p) { return p[0]; }", "out[0] = f<1, float>(x);", "no matching function"),
    "wrong space": ("inline float f(threadgroup float* p) { return p[0]; }", "out[0] = f(out);", "address space"),
    "wrong space, local": ("", "float a = x[0]; device float* p = &a; out[0] = p[0];", "cannot initialize"),
    "double": ("", "double a = x[0]; out[0] = a;", "poisoned"),
    "literal": ("", "out[0] = x[0] * 1.5;", "precision"),
    "std": ("", "out[0] = std::exp(x[0]);", "poisoned"),
    "mixed max": ("", "out[0] = max(x[0], 1);", "no matching function"),
    "exp of an int": ("", "out[0] = exp(3);", "takes float"),
    "unknown": ("", "out[0] = warp_sum(x[0]);", "undeclared"),
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
    monkeypatch.setattr("metal_host.process.HANG_S", 1)
    with pytest.raises(Hang):
        launch("volatile thread int stop = 0; while (!stop) {} out[0] = x[0];", normal(64))


def test_after_a_mistake_the_next_kernel_runs() -> None:
    with pytest.raises(OutOfBounds):
        launch("out[thread_position_in_grid.x + 64] = x[0];", normal(64))
    same(launch("out[thread_position_in_grid.x] = x[0];", normal(64)), mx.broadcast_to(normal(64)[0], (64,)))


def test_inputs_of_another_shape_are_refused() -> None:
    call = kernel_call(
        metal_kernel("out[0] = x[0];", 1),
        [normal(64)],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.float32],
    )
    from metal_host import HostKernel

    assert isinstance(call, KernelCall)
    with pytest.raises(ValueError, match="is given .* compiled for"):
        HostKernel(call).run([normal(65)])


def test_a_missing_compiler_is_a_failure_not_a_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    from metal_host.compiler import find_compiler

    monkeypatch.setenv("KVANT_HOST_CXX", sys.executable)
    with pytest.raises(HostError, match="expected `ziglang` or a clang"):
        find_compiler.__wrapped__()

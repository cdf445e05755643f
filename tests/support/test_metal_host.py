"""The host run of Metal kernels itself: what is traced is what MLX launches, and right kernels give numpy's results.

Which compiler ran is in the last lines of pytest's output; docs/kernels.md says what each can see.
"""

import mlx.core as mx
import numpy as np
import pytest

from support.metal_host import HostKernel, host_pytest_skip, kernel_call
from support.metal_host.errors import Race, Uninitialised
from support.metal_probe import REDUCTION, launch, metal_kernel, normal, reduce, same

pytestmark = host_pytest_skip

FLOATS = [mx.float32, mx.float16, mx.bfloat16]


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
    bits = np.concatenate(
        [halves << 16, halves << 16 | 0x8000, halves << 16 | 0x8001, halves << 13, halves << 13 | 0x1000]
    )
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
      s += as_type<float>(as_type<uint>(a) ^ 0x80000000u);
      out[i] = s + max(x[i], 0.0f) - min(x[i], 0.0f) + rint(4.0f * x[i]);
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
    expected = (
        expected + rows[:, np.where(lane + 3 < 32, lane + 3, lane)] + rows[:, np.where(lane >= 2, lane - 2, lane)]
    )
    given = np.array(launch(source, x)).reshape(2, 32)
    np.testing.assert_allclose(given, expected + 31 * 16, rtol=1e-6)


def test_a_reduction_over_threadgroups() -> None:
    np.testing.assert_allclose(np.array(reduce(REDUCTION)), np.array(normal(192)).reshape(3, 64).sum(1), rtol=1e-5)


def test_a_grid_of_three_dimensions_that_threadgroups_do_not_divide() -> None:
    source = """
      uint3 at = thread_position_in_grid, size = threads_per_grid;
      uint3 local = thread_position_in_threadgroup, group = threadgroup_position_in_grid;
      uint i = (at.z * size.y + at.y) * size.x + at.x;
      uint flat = (local.z * threads_per_threadgroup.y + local.y) * threads_per_threadgroup.x + local.x;
      bool right = flat == thread_index_in_threadgroup;
      right = right && at.x == group.x * 4 + local.x && at.z == group.z * 2 + local.z;
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


def test_what_nobody_writes_is_not_zero() -> None:
    given = launch("if (thread_position_in_grid.x > 0) out[thread_position_in_grid.x] = x[0];", normal(64))
    assert mx.isnan(given[0]).item()
    assert not mx.isnan(given[1:]).any().item()


def test_inputs_of_another_shape_are_refused() -> None:
    call = kernel_call(
        metal_kernel("out[0] = x[0];", 1),
        [normal(64)],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.float32],
    )
    with pytest.raises(ValueError, match=r"is given .* compiled for"):
        HostKernel(call).run([normal(65)])

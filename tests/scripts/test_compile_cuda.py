"""The CUDA text of a custom kernel, put together as MLX does, and what ptxas says of it."""

import shutil
from typing import Any

import mlx.core as mx
import pytest
from compile_cuda import Resources, compile_cuda, parse_resources, recording

SOURCE = """
  __shared__ float tile[64];
  uint i = blockIdx.x * blockDim.x + threadIdx.x;
  tile[threadIdx.x] = float(x[i]) * x_shape[0] + y[0];
  __syncthreads();
  out[i] = T(tile[63 - threadIdx.x] * SCALE * (FLAG ? 1 : 2));
"""
EXPECTED = """#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

using uint = unsigned int;
namespace mlx::core::cu {

namespace cg = cooperative_groups;

__global__ void custom_kernel_probe_bfloat16_t_3_f(
    const __half* x,
    const __grid_constant__ Shape x_shape,
    const int32_t* y,
    __nv_bfloat16* out) {
  using T = __nv_bfloat16;
  constexpr int SCALE = 3;
  constexpr bool FLAG = false;

"""
PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN3mlx4core2cu34custom_kernel_probe_bfloat16_t_3_fEPK6__half' for 'sm_90'
ptxas info    : Function properties for _ZN3mlx4core2cu34custom_kernel_probe_bfloat16_t_3_fEPK6__half
    48 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 11 registers, used 1 barriers, 256 bytes smem
ptxas info    : Compiling entry function '_Z5other' for 'sm_90'
ptxas info    : Function properties for _Z5other
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""


def recorded() -> tuple[str, list[mx.array]]:
    texts: dict[str, str] = {}
    names: dict[str, Any] = {"input_names": ["x", "y"], "output_names": ["out"]}
    kernel = recording(texts)(name="probe", source=SOURCE, header="using uint = unsigned int;\n", **names)
    outputs = kernel(
        inputs=[mx.zeros(64, mx.float16), mx.array(2)],
        template=[("T", mx.bfloat16), ("SCALE", 3), ("FLAG", False)],
        grid=(64, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(64,)],
        output_dtypes=[mx.bfloat16],
        stream=mx.gpu,
    )
    assert list(texts) == ["custom_kernel_probe_bfloat16_t_3_f"]
    return texts["custom_kernel_probe_bfloat16_t_3_f"], outputs


def test_the_text_is_mlx_s() -> None:
    text, outputs = recorded()
    assert text == EXPECTED + SOURCE + "\n}\n\n} // namespace mlx::core::cu\n"
    assert [(x.shape, x.dtype) for x in outputs] == [((64,), mx.bfloat16)]


def test_what_ptxas_says_is_read() -> None:
    assert parse_resources(PTXAS) == [
        Resources(
            "custom_kernel_probe_bfloat16_t_3_f",
            registers=11,
            stack_bytes=48,
            spill_bytes=36,
            shared_bytes=256,
        ),
        Resources("_Z5other", registers=8, stack_bytes=0, spill_bytes=0, shared_bytes=0),
    ]
    with pytest.raises(RuntimeError, match="ptxas does not say"):
        parse_resources("Compiling entry function 'f' for 'sm_90'\n")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_nvcc_takes_the_text() -> None:
    text, _ = recorded()
    (found,) = compile_cuda(text)
    assert found.kernel == "custom_kernel_probe_bfloat16_t_3_f"
    assert found.shared_bytes == 256
    assert 0 < found.registers < 64
    assert found.spill_bytes == 0
    with pytest.raises(RuntimeError, match=r"nvcc: .*undefined"):
        compile_cuda(text.replace("blockDim.x", "blockWidth"))

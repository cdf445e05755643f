"""The CUDA text of custom kernels, compiled with nvcc: the registers, spills and shared memory of each.

mx.fast.cuda_kernel makes no kernel where MLX has no CUDA back end. So the text is put together here, after
MLX 0.32's mlx/backend/cuda/custom_kernel.cpp; `recording` stands in for mx.fast.cuda_kernel and collects it.
Mark every function
__device__: nvcc takes one without it for the host's, while NVRTC, with which MLX compiles, takes it for the
    device's.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

ARCHITECTURE = "sm_90"
INCLUDE = Path(__file__).parent / "cuda"  # a stand-in for MLX's own header
HEADER = '#include "mlx/backend/cuda/device/utils.cuh"\n\n#include <cooperative_groups.h>\n\n'
CUDA_TYPES = {mx.float16: "__half", mx.bfloat16: "__nv_bfloat16", mx.float32: "float", mx.bool_: "bool"}
CUDA_TYPES |= {
    t: f"{str(t).rpartition('.')[2]}_t"
    for t in (mx.int8, mx.int16, mx.int32, mx.int64, mx.uint8, mx.uint16, mx.uint32, mx.uint64)
}


@dataclass(frozen=True, slots=True)
class Resources:
    """One kernel's figures from ptxas: registers and bytes a thread, shared bytes a block."""

    kernel: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int


def cuda_text(
    *,
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str,
    inputs: Sequence[mx.array],
    output_dtypes: Sequence[mx.Dtype],
    template: Sequence[tuple[str, Any]] = (),
) -> tuple[str, str]:
    """The function's name and the whole translation unit, as MLX would hand it to NVRTC."""
    suffix, constants = "", []
    for key, value in template:
        if isinstance(value, bool):
            suffix, line = (
                f"{suffix}_{'t' if value else 'f'}",
                f"constexpr bool {key} = {str(value).lower()};",
            )
        elif isinstance(value, int):
            suffix, line = f"{suffix}_{value}", f"constexpr int {key} = {value};"
        else:
            suffix, line = f"{suffix}_{_metal_type(value)}", f"using {key} = {CUDA_TYPES[value]};"
        constants.append(f"  {line}\n")
    parameters = []
    for array_name, array in zip(input_names, inputs, strict=True):
        parameters.append(f"const {CUDA_TYPES[array.dtype]}* {array_name}")
        for what, kind in (("shape", "Shape"), ("strides", "Strides"), ("ndim", "int")):
            if array.ndim and f"{array_name}_{what}" in source:
                parameters.append(f"const __grid_constant__ {kind} {array_name}_{what}")
    parameters += [f"{CUDA_TYPES[dtype]}* {n}" for n, dtype in zip(output_names, output_dtypes, strict=True)]
    function = f"custom_kernel_{name}{suffix}"
    signature = f"__global__ void {function}(\n    " + ",\n    ".join(parameters) + ") {\n"
    body = signature + "".join(constants) + "\n" + source + "\n}\n"
    space = f"namespace mlx::core::cu {{\n\nnamespace cg = cooperative_groups;\n\n{body}\n}} // namespace mlx::core::cu\n"
    return function, HEADER + header + space


def _metal_type(dtype: mx.Dtype) -> str:
    """The dtype as MLX writes it into names, for both back ends."""
    return {mx.float16: "float16_t", mx.bfloat16: "bfloat16_t"}.get(dtype, CUDA_TYPES[dtype])


def recording(texts: dict[str, str]) -> Callable[..., Callable[..., list[mx.array]]]:
    """A stand-in for mx.fast.cuda_kernel: its kernels put their text into `texts` by name and return
    zeros.
    """

    def cuda_kernel(*, header: str = "", **named: Any) -> Callable[..., list[mx.array]]:
        known = {name: named[name] for name in ("name", "input_names", "output_names", "source")}

        def launch(
            *,
            inputs: Sequence[mx.array],
            output_shapes: Sequence[Sequence[int]],
            output_dtypes: Sequence[mx.Dtype],
            template: Sequence[tuple[str, Any]] = (),
            **_: Any,
        ) -> list[mx.array]:
            arrays, kinds = [mx.array(x) for x in inputs], output_dtypes
            function, text = cuda_text(
                **known, header=header, inputs=arrays, output_dtypes=kinds, template=template or ()
            )
            texts[function] = text
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return launch

    return cuda_kernel


def compile_cuda(text: str) -> list[Resources]:
    """The figures of each kernel in the text. Raises RuntimeError with nvcc's words if it does not
    compile.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.cu"
        source.write_text(text)
        command = ["nvcc", f"-arch={ARCHITECTURE}", "-std=c++17", "-cubin", "-Xptxas", "-v", f"-I{INCLUDE}"]
        command += ["-o", f"{source}bin", str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvcc: {done.stderr.strip()}")
    return parse_resources(done.stderr)


def parse_resources(output: str) -> list[Resources]:
    """Read the output of `ptxas -v`."""
    found = []
    for part in re.split(r"Compiling entry function '", output)[1:]:
        stack, stores, loads = _numbers(
            part, r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        )
        (registers,) = _numbers(part, r"Used (\d+) registers")
        shared = re.search(r"(\d+) bytes smem", part)
        name = re.search(r"custom_kernel_\w+?(?=E?P|$)", part.split("'")[0])
        found.append(
            Resources(
                kernel=name[0] if name else part.split("'")[0],
                registers=registers,
                stack_bytes=stack,
                spill_bytes=stores + loads,
                shared_bytes=int(shared[1]) if shared else 0,
            )
        )
    return found


def _numbers(text: str, pattern: str) -> tuple[int, ...]:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"ptxas does not say `{pattern}`: {text}")
    return tuple(int(number) for number in found.groups())

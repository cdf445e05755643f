"""Prints what the fused kernel's CUDA text takes, compiled by nvcc for sm_90: registers, spills and shared memory.

python scripts/kernel_registers.py
"""

import sys
from unittest.mock import patch

import kvant.blas  # noqa: F401  # isort: skip  (before MLX: it loads a faster one)

import mlx.core as mx
from compile_cuda import compile_cuda, recording

from kvant.operators.bias_split import BiasSplit
from kvant.operators.fused_attention import attend_fused
from kvant.operators.kernels import launch
from kvant.operators.kernels.attend import quantize_tokens

TOKENS, GROUP = 32768, 32
# B, H, K, S, D, bits, pairs of the bias split
SHAPES = {
    "Qwen2.5-0.5B 14/2/64, int8": (1, 14, 2, 1, 64, 8, 0),
    "Qwen2.5-0.5B 14/2/64, int8, 8 pairs": (1, 14, 2, 1, 64, 8, 8),
    "Qwen2.5-7B 28/4/128, int8": (1, 28, 4, 1, 128, 8, 0),
    "Qwen2.5-7B 28/4/128, int4": (1, 28, 4, 1, 128, 4, 0),
    "Qwen3-4B 32/8/128, int8": (1, 32, 8, 1, 128, 8, 0),
    "Qwen3-4B 32/8/128, int4": (1, 32, 8, 1, 128, 4, 0),
    "Qwen3-4B 32/8/128, bfloat16": (1, 32, 8, 1, 128, 0, 0),
    "Qwen3-4B 32/8/128, int8, 8 new tokens": (1, 32, 8, 8, 128, 8, 0),
    "64/8/256, int4": (1, 64, 8, 1, 256, 4, 0),
}


def texts(shape: tuple[int, ...]) -> dict[str, str]:
    """The CUDA text of a shape's kernels, by the functions' names."""
    B, H, K, S, D, bits, pairs = shape
    width, dtype = {8: (D, mx.int8), 4: (D // 2, mx.uint8), 0: (D, mx.bfloat16)}[bits]
    new = mx.zeros((B, K, S, D), mx.bfloat16)
    found: dict[str, str] = {}
    with patch.object(mx.fast, "cuda_kernel", recording(found)):
        launch._kernel.cache_clear()  # kernels already made put their text elsewhere
        attend_fused(
            mx.zeros((B, H, S, D), mx.bfloat16),
            mx.zeros((1, B, 2, K, TOKENS, width), dtype),
            mx.zeros((1, B, 2, K, TOKENS, D // GROUP), mx.float16) if bits else None,
            mx.array([0]),
            quant_bit=bits,
            quant_group=GROUP,
            bias_split=BiasSplit(
                mx.zeros((K, 2, pairs)), tuple(range(pairs)), mx.zeros((2, pairs, TOKENS)), mx.zeros((K, D))
            ),
            backend="cuda",
        )
        if bits:
            quantize_tokens(new, new, quant_bit=bits, quant_group=GROUP, scale_dtype=mx.float16, backend="cuda")
        launch._kernel.cache_clear()
    return found


def main() -> int:
    """A line a kernel; 1 where one spills."""
    spilled = False
    for name, shape in SHAPES.items():
        for text in texts(shape).values():
            for kernel in compile_cuda(text):
                kind = kernel.kernel.split("_")[3]
                print(f"{name:40} {kind:8} {kernel.registers:4} registers {kernel.spill_bytes:4} B spilled", end=" ")
                print(f"{kernel.shared_bytes:6} B shared")
                spilled |= kernel.spill_bytes > 0
    return int(spilled)


if __name__ == "__main__":
    sys.exit(main())

"""Prints what the fused kernel's CUDA text takes, compiled by nvcc for sm_90: registers, spills and shared memory.

python scripts/kernel_registers.py
"""

import sys
from dataclasses import dataclass
from unittest.mock import patch

import kvant.blas  # noqa: F401  # isort: skip  (before MLX: it loads a faster one)

import mlx.core as mx
from compile_cuda import compile_cuda, recording

from kvant.operators.bias_split import BiasSplit
from kvant.operators.fused_attention import attend_fused
from kvant.operators.kernels import launch
from kvant.operators.kernels.attend import quantize_tokens

TOKENS, GROUP = 32768, 32


@dataclass(frozen=True, slots=True)
class Shape:
    """A call: H query heads on K kv heads, D head_dim, bits of the cache, S new tokens, pairs of the bias split."""

    H: int
    K: int
    D: int
    bits: int
    S: int = 1
    pairs: int = 0


SHAPES = {
    "Qwen2.5-0.5B 14/2/64, int8": Shape(14, 2, 64, 8),
    "Qwen2.5-0.5B 14/2/64, int4": Shape(14, 2, 64, 4),
    "Qwen2.5-0.5B 14/2/64, int8, 8 pairs": Shape(14, 2, 64, 8, pairs=8),
    "Qwen2.5-7B 28/4/128, int8": Shape(28, 4, 128, 8),
    "Qwen2.5-7B 28/4/128, int4": Shape(28, 4, 128, 4),
    "Qwen3-4B 32/8/128, int8": Shape(32, 8, 128, 8),
    "Qwen3-4B 32/8/128, int4": Shape(32, 8, 128, 4),
    "Qwen3-4B 32/8/128, bfloat16": Shape(32, 8, 128, 0),
    "Qwen3-4B 32/8/128, int8, 8 new tokens": Shape(32, 8, 128, 8, S=8),
    "64/8/256, int4": Shape(64, 8, 256, 4),
}


def run(shape: Shape, backend: launch.Backend, tokens: int = TOKENS) -> None:
    """One call of attention and one of the append, with bfloat16 queries and a cache of `tokens` rows."""
    width, dtype = {8: (shape.D, mx.int8), 4: (shape.D // 2, mx.uint8), 0: (shape.D, mx.bfloat16)}[shape.bits]
    K, pairs = shape.K, shape.pairs
    split = BiasSplit(
        mx.zeros((K, 2, pairs)), tuple(range(pairs)), mx.zeros((2, pairs, tokens)), mx.zeros((K, shape.D))
    )
    new = mx.zeros((1, K, shape.S, shape.D), mx.bfloat16)
    attend_fused(
        mx.zeros((1, shape.H, shape.S, shape.D), mx.bfloat16),
        mx.zeros((1, 1, 2, K, tokens, width), dtype),
        mx.zeros((1, 1, 2, K, tokens, shape.D // GROUP), mx.float16) if shape.bits else None,
        mx.array([0]),
        quant_bit=shape.bits,
        quant_group=GROUP,
        bias_split=split if pairs else None,
        backend=backend,
    )
    if shape.bits:
        quantize_tokens(new, new, quant_bit=shape.bits, quant_group=GROUP, scale_dtype=mx.float16, backend=backend)


def texts(shape: Shape) -> dict[str, str]:
    """The CUDA text of a shape's kernels, by the functions' names."""
    found: dict[str, str] = {}
    with patch.object(mx.fast, "cuda_kernel", recording(found)):
        launch._kernel.cache_clear()  # kernels already made put their text elsewhere
        run(shape, "cuda")
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

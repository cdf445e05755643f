"""Prints what the fused kernel's CUDA text takes, compiled by nvcc for sm_90: registers, spills, stack,
shared memory.

python scripts/kernel_registers.py
python scripts/kernel_registers.py --metal FOLDER    writes Metal's text of each instance there instead, to be
read

The first pass twice: with as many queries a simdgroup as on CUDA, and as on Metal, whose threads have 128
registers.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import kvant.blas  # noqa: F401  # isort: skip  (before MLX: it loads a faster one)

import mlx.core as mx
from compile_cuda import compile_cuda, recording

from kvant.operators.bias_split import BiasSplit
from kvant.operators.kernels import attend, launch
from kvant.operators.kernels.attend import ExactInput
from kvant.operators.paged_kernel import attend_fused
from kvant.operators.quantization import quantized_dtype

TOKENS, GROUP = 32768, 32


@dataclass(frozen=True, slots=True)
class Shape:
    """A call: H query heads on K kv heads. What is not said here are options of `attend`."""

    H: int
    K: int
    D: int  # head_dim
    bits: int  # of the cache
    S: int = 1  # new tokens
    pairs: int = 0  # of the bias split
    Dv: int = 0  # width of values that lie beside keys; 0: they are apart, and D wide
    value_bits: int = 0  # 0: those of keys
    paged: bool = False
    window: int = 0
    sinks: bool = False
    softcap: float = 0.0
    alibi: bool = False
    mask: bool = False
    tail: bool = False  # an exact tail, of float16


SHAPES = {
    "Qwen2.5-0.5B 14/2/64, int8": Shape(14, 2, 64, 8),
    "Qwen2.5-0.5B 14/2/64, int4": Shape(14, 2, 64, 4),
    "Qwen2.5-0.5B 14/2/64, int8, 8 pairs": Shape(14, 2, 64, 8, pairs=8),
    "Qwen2.5-7B 28/4/128, int8": Shape(28, 4, 128, 8),
    "Qwen2.5-7B 28/4/128, int4": Shape(28, 4, 128, 4),
    "Qwen3-4B 32/8/128, int8": Shape(32, 8, 128, 8),
    "Qwen3-4B 32/8/128, int4": Shape(32, 8, 128, 4),
    "Qwen3-4B 32/8/128, bfloat16": Shape(32, 8, 128, 0),
    "Qwen3-4B 32/8/128, int8, pages": Shape(32, 8, 128, 8, paged=True),
    "Qwen3-4B 32/8/128, int8, 8 new tokens": Shape(32, 8, 128, 8, S=8),
    "gpt-oss-20b 64/8/64, int8, window, sinks": Shape(64, 8, 64, 8, window=128, sinks=True),
    "Gemma 2 16/8/256, int8, window, softcap": Shape(16, 8, 256, 8, window=4096, softcap=50.0),
    "Gemma 4 8/1/512, int8": Shape(8, 1, 512, 8),
    "Gemma 4 8/1/512, int4, pages": Shape(8, 1, 512, 4, paged=True),
    "32/32/80, int4, 8 new tokens": Shape(32, 32, 80, 4, S=8),
    "16/1/192, values 128, int8": Shape(16, 1, 192, 8, Dv=128),
    "64/8/256, int4": Shape(64, 8, 256, 4),
    "Qwen3-4B 32/8/128, int8 keys, int4 values": Shape(32, 8, 128, 8, Dv=128, value_bits=4),
    "Qwen3-4B 32/8/128, int4 keys, int8 values": Shape(32, 8, 128, 4, Dv=128, value_bits=8),
    "Qwen3-4B 32/8/128, int4, exact tail": Shape(32, 8, 128, 4, paged=True, tail=True),
    "16/1/192, values 128, int4, window, exact tail": Shape(
        16, 1, 192, 4, Dv=128, S=4, paged=True, window=4096, tail=True
    ),
    "Qwen2.5-0.5B 14/2/64, int4, 8 pairs, exact tail": Shape(14, 2, 64, 4, pairs=8, paged=True, tail=True),
}


def run(shape: Shape, backend: launch.Backend, tokens: int = TOKENS) -> list[mx.array]:
    """One call of attention and one of the append, with bfloat16 queries and a cache of `tokens` rows."""
    H, K, S, D, pairs = shape.H, shape.K, shape.S, shape.D, shape.pairs
    width, value_bits = D + shape.Dv, shape.value_bits or shape.bits
    stored = (D * shape.bits + shape.Dv * value_bits) // 8 or width
    dtype = quantized_dtype(shape.bits, value_bits) if shape.bits else mx.bfloat16
    lead = [1 if shape.Dv else 2, K, tokens] if shape.paged else [1, 1, 1 if shape.Dv else 2, K, tokens]
    group = GROUP if D % GROUP == 0 else 16
    split = BiasSplit(
        mx.zeros((K, 2, pairs)), tuple(range(pairs)), mx.zeros((2, pairs, tokens)), mx.zeros((K, D))
    )
    tail = None
    if shape.tail:
        beside = shape.Dv not in (0, D)
        rows = mx.zeros((1, K, 128, width) if beside else (2, K, 128, D), mx.float16)
        tail = ExactInput(rows, mx.zeros((1, 8), mx.int32), mx.zeros((2, 4), mx.int32))
    output = attend_fused(
        mx.zeros((1, H, S, D), mx.bfloat16),
        mx.zeros((*lead, stored), dtype),
        mx.zeros((*lead, width // group), mx.float16) if shape.bits else None,
        mx.array([0]),
        quant_bit=shape.bits,
        value_bit=value_bits,
        quant_group=group,
        bias_split=split if pairs else None,
        pages=mx.zeros((1, tokens // 128), mx.int32) if shape.paged else None,
        first=mx.array([0]) if shape.paged else None,
        window=shape.window or None,
        sinks=mx.zeros((H,)) if shape.sinks else None,
        softcap=shape.softcap,
        is_alibi=shape.alibi,
        mask=mx.zeros((S, tokens)) if shape.mask else None,
        tail=tail,
        backend=backend,
    )
    if not shape.bits:
        return [output]
    new = (mx.zeros((1, K, S, of), mx.bfloat16) for of in (D, shape.Dv or D))
    form: dict[str, Any] = {"quant_bit": shape.bits, "value_bit": value_bits, "quant_group": group}
    form |= {"scale_dtype": mx.float16, "fit": 4 in (shape.bits, value_bits)}
    return [output, *attend.quantize_tokens(*new, **form, backend=backend)]


def texts(shape: Shape, registers: launch.Backend = "cuda") -> dict[str, str]:
    """The CUDA text of a shape's kernels, by the functions' names. registers: for whose queries are
    distributed.
    """
    found: dict[str, str] = {}
    own = patch.dict(attend.QUERIES, cuda=attend.QUERIES[registers])
    with own, patch.object(mx.fast, "cuda_kernel", recording(found)):
        launch._kernel.cache_clear()  # kernels already made put their text elsewhere
        run(shape, "cuda")
        launch._kernel.cache_clear()
    return found


def metal_texts(shape: Shape) -> dict[str, str]:
    """Metal's text of a shape's kernels as MLX generates it, by the functions' names."""
    records: list[dict[str, Any]] = []
    mx.export_function(records.append, lambda _: run(shape, "metal"), mx.array(0))
    kernels = (record["arguments"] for record in records if record.get("name") == "CustomKernel")
    return {name: text for name, text, *_ in kernels}


def main() -> int:
    """A line a kernel; 1 where one has anything in memory."""
    if len(sys.argv) == 3 and sys.argv[1] == "--metal":
        for shape in SHAPES.values():
            for function, text in metal_texts(shape).items():
                (Path(sys.argv[2]) / f"{function}.metal").write_text(text, encoding="utf-8")
        return 0
    in_memory = False
    for name, shape in SHAPES.items():
        for registers in ("cuda", "metal"):
            for function, text in texts(shape, registers).items():
                (kernel,) = compile_cuda(text)
                kind = function.split("_")[3]
                if kind == "attend" or registers == "cuda":
                    print(f"{name:48} {kind:8} {registers:6}", kernel.registers, "registers", end=" ")
                    print(
                        f"{kernel.spill_bytes} B spilled {kernel.stack_bytes} B stack {kernel.shared_bytes} "
                        f"B shared"
                    )
                    in_memory |= kernel.spill_bytes + kernel.stack_bytes > 0
    return int(in_memory)


if __name__ == "__main__":
    sys.exit(main())

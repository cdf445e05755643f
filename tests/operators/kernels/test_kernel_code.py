"""What compilers make of the kernels: no array in memory, whatever the instance. No GPU is needed."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest
from compile_cuda import compile_cuda
from kernel_registers import SHAPES, Shape, run, texts
from support.counts import count
from support.metal_host.ir import allocas
from support.metal_host.source import KernelCall, kernel_call

from kvant.operators.kernels import launch
from kvant.operators.kernels.attend import HEAD_DIMS

EVERYTHING = Shape(12, 2, 96, 4, S=3, pairs=5, paged=True, window=64, softcap=30.0, alibi=True, mask=True)
NARROW = [SHAPES["Qwen2.5-7B 28/4/128, int8"], SHAPES["64/8/256, int4"], EVERYTHING]
NARROW += [SHAPES["Qwen2.5-0.5B 14/2/64, int4, 8 pairs, exact tail"]]
# query heads and new tokens: 1, 2 and 4 queries of a simdgroup, and groups
QUERIES = [(1, 1), (2, 1), (14, 1)]
WIDE = [
    *SHAPES.values(),
    *(Shape(H, 1, D, bits, S=S) for D, bits, (H, S) in product(HEAD_DIMS, (8, 4, 0), QUERIES)),
    *(replace(EVERYTHING, D=D, bits=bits) for D, bits in product(HEAD_DIMS, (8, 4, 0))),
    *(Shape(16, 1, D, bits, Dv=Dv) for D, Dv, bits in product(HEAD_DIMS, HEAD_DIMS, (8, 0)) if Dv != D),
]
CUDA = [SHAPES[name] for name in ("Qwen3-4B 32/8/128, int4", "Gemma 4 8/1/512, int4, pages")]
CUDA += [SHAPES["16/1/192, values 128, int4, window, exact tail"]]
# several query groups, several new tokens, every option
GROUPS = replace(EVERYTHING, H=14, bits=8, sinks=True)


def metal_calls(shape: Shape) -> dict[str, KernelCall]:
    found: dict[str, KernelCall] = {}
    make = launch._kernel.__wrapped__

    def kernel(name: str, backend: launch.Backend) -> Callable[..., list[mx.array]]:
        def record(*, inputs: list[mx.array], stream: Any, **given: Any) -> list[mx.array]:
            tail = int(dict(given["template"]).get("TAIL", 0))
            label = f"{name}, tail {tail}" if tail else name
            found[label] = kernel_call(make(name, "metal"), inputs, **given)
            return [
                mx.zeros(*kind) for kind in zip(given["output_shapes"], given["output_dtypes"], strict=True)
            ]

        return record

    with patch.object(launch, "_kernel", kernel):
        run(shape, "metal")
    return found


@pytest.mark.parametrize("shape", count(NARROW, WIDE), ids=str)
def test_no_array_is_in_memory(shape: Shape) -> None:
    """An `alloca` after optimization is memory of a thread, many times slower than registers."""
    calls = metal_calls(shape)
    assert len(calls) == (3 if shape.bits else 2) + shape.tail
    for name, call in calls.items():
        for level in count(("-O2",), ("-O1", "-O2", "-O3")):
            assert allocas(call, (level,)) == [], (name, level)


def test_it_is_the_macro_that_keeps_arrays_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    text = launch._text
    macro = '#define KVANT_UNROLL _Pragma("clang loop unroll(full)")'
    assert macro in text("metal.h")
    monkeypatch.setattr(launch, "_text", lambda file: text(file).replace(macro, "#define KVANT_UNROLL"))
    assert allocas(metal_calls(NARROW[0])["attend"]) != []


@pytest.mark.parametrize("name", SHAPES)
def test_one_text_for_both_languages(name: str) -> None:
    found = texts(SHAPES[name])
    assert len(found) == (3 if SHAPES[name].bits else 2) + SHAPES[name].tail
    for text in found.values():
        assert "#define KVANT_DEVICE\n" in text
        for metal in ("as_type", "[[", "metal::", "device ", "thread "):
            assert metal not in text.split("namespace cg")[0].replace("__device__ ", ""), metal


@pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="nvcc is not installed; scripts/kernel_registers.py says more"
)
@pytest.mark.parametrize("shape", count(CUDA, [GROUPS, *SHAPES.values()]), ids=str)
def test_nvcc_keeps_everything_in_registers(shape: Shape) -> None:
    found = list(texts(shape).values())
    if shape != GROUPS:  # the other two kernels hardly differ
        found = count(found[:1], [*found, *texts(shape, "metal").values()])
    for text in found:
        (kernel,) = compile_cuda(text)
        assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0), kernel
        assert kernel.registers <= 255
        assert kernel.shared_bytes <= 48 * 1024


ROWS = 64 * 131072  # of a pool: 64 sequences of 131,072 tokens


@pytest.mark.parametrize("name", ["attend", "combine", "append"])
def test_what_counts_over_heads_and_sequences_has_64_bits(name: str) -> None:
    """With 8 heads of 128 they are 8.6e9 elements. Only a row of one head is counted with 32 bits, in
    words.
    """
    text = launch._code(f"{name}.h")
    wide = {
        "attend": ("first_key", "first_value", "first_out", "out"),
        "combine": ("first_split", "first_tail_split"),
        "append": ("source", "stored"),
    }
    for index in wide[name]:
        assert f"const size_t {index} = " in text
    assert "out[size_t(query) * DIM" in text or name != "combine"
    assert "mask[size_t(" in text or name != "attend"
    # Keys and values of the widest heads side by side, half precision; of 8 bits half of that.
    assert (ROWS - 1) * (2 * max(HEAD_DIMS) * 16 // 32) + 2 * max(HEAD_DIMS) * 16 // 32 - 1 < 2**32

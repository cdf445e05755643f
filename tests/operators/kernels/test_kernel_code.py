"""What compilers make of the kernels: no array in memory, whatever the instance. No GPU is needed."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest
from kernel_registers import SHAPES, Shape, run
from support.counts import count
from support.metal_host.ir import allocas, optimized_call
from support.metal_host.source import KernelCall, kernel_call

from kvant.operators.kernels import launch
from kvant.operators.kernels.attend import HEAD_DIMS

EVERYTHING = Shape(12, 2, 96, 4, S=3, pairs=5, paged=True, window=64, softcap=30.0, alibi=True, mask=True)
NARROW = [SHAPES["Qwen2.5-7B 28/4/128, int8"], SHAPES["64/8/256, int4"], EVERYTHING]
QUERIES = [(1, 1), (2, 1), (14, 1)]  # query heads and new tokens: 1, 2 and 4 queries of a simdgroup, and groups
WIDE = [
    *SHAPES.values(),
    *(Shape(H, 1, D, bits, S=S) for D, bits, (H, S) in product(HEAD_DIMS, (8, 4, 0), QUERIES)),
    *(replace(EVERYTHING, D=D, bits=bits) for D, bits in product(HEAD_DIMS, (8, 4, 0))),
    *(Shape(16, 1, D, bits, Dv=Dv) for D, Dv, bits in product(HEAD_DIMS, HEAD_DIMS, (8, 0)) if Dv != D),
]


def metal_calls(shape: Shape) -> dict[str, KernelCall]:
    """The launches of a shape on Metal, by the kernel's name."""
    found: dict[str, KernelCall] = {}
    make = launch._kernel.__wrapped__

    def kernel(name: str, backend: launch.Backend) -> Callable[..., list[mx.array]]:
        def record(*, inputs: list[mx.array], stream: Any, **given: Any) -> list[mx.array]:
            found[name] = kernel_call(make(name, "metal"), inputs, **given)
            return [mx.zeros(*kind) for kind in zip(given["output_shapes"], given["output_dtypes"], strict=True)]

        return record

    with patch.object(launch, "_kernel", kernel):
        run(shape, "metal")
    return found


@pytest.mark.parametrize("shape", count(NARROW, WIDE), ids=str)
def test_no_array_is_in_memory(shape: Shape) -> None:
    """An `alloca` after optimization is memory of a thread, many times slower than registers."""
    for name, call in metal_calls(shape).items():
        for level in count(("-O2",), ("-O1", "-O2", "-O3")):
            assert allocas(optimized_call(call, (level,))) == [], (name, level)


def test_it_is_the_macro_that_keeps_arrays_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    text = launch._text
    macro = '#define KVANT_UNROLL _Pragma("clang loop unroll(full)")'
    assert macro in text("metal.h")
    monkeypatch.setattr(launch, "_text", lambda file: text(file).replace(macro, "#define KVANT_UNROLL"))
    call = metal_calls(NARROW[0])["attend"]
    assert allocas(optimized_call(call)) != []

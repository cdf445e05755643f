"""The kernel's CUDA text: put together on every machine, compiled where nvcc is installed. No GPU runs it here."""

import shutil

import pytest
from compile_cuda import compile_cuda
from kernel_registers import SHAPES, Shape, texts
from support.counts import count

FEW = ("Qwen3-4B 32/8/128, int4", "Gemma 4 8/1/512, int4, pages")
# Several query groups, several new tokens, every option.
EVERYTHING = Shape(
    *(14, 2, 96, 8), S=3, pairs=5, paged=True, window=64, sinks=True, softcap=30.0, alibi=True, mask=True
)


@pytest.mark.parametrize("name", SHAPES)
def test_one_text_for_both_languages(name: str) -> None:
    found = texts(SHAPES[name])
    assert len(found) == (3 if SHAPES[name].bits else 2)
    for text in found.values():
        assert "#define KVANT_DEVICE\n" in text
        for metal in ("as_type", "[[", "metal::", "device ", "thread "):
            assert metal not in text.split("namespace cg")[0].replace("__device__ ", ""), metal


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed; scripts/kernel_registers.py says more")
@pytest.mark.parametrize(
    "shape",
    count([SHAPES[n] for n in FEW], [EVERYTHING, *SHAPES.values()]),
    ids=str,
)
def test_nvcc_keeps_everything_in_registers(shape: Shape) -> None:
    found = list(texts(shape).values())
    if shape != EVERYTHING:  # the other two kernels hardly differ
        found = count(found[:1], [*found, *texts(shape, "metal").values()])
    for text in found:
        (kernel,) = compile_cuda(text)
        assert kernel.spill_bytes == 0, kernel
        assert kernel.stack_bytes == 0, kernel
        assert kernel.registers <= 255
        assert kernel.shared_bytes <= 48 * 1024

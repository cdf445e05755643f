"""The kernel's CUDA text: put together on every machine, compiled where nvcc is installed. No GPU runs it here."""

import shutil

import pytest
from compile_cuda import compile_cuda
from kernel_registers import SHAPES, texts
from support.counts import count

EVERYTHING = (1, 14, 2, 3, 96, 8, 5)  # several query groups, several new tokens, a bias split, a head of 96


@pytest.mark.parametrize("name", SHAPES)
def test_one_text_for_both_languages(name: str) -> None:
    found = texts(SHAPES[name])
    assert len(found) == (3 if SHAPES[name][5] else 2)
    for text in found.values():
        assert "#define KVANT_DEVICE\n" in text
        for metal in ("as_type", "[[", "metal::", "device ", "thread "):
            assert metal not in text.split("namespace cg")[0].replace("__device__ ", ""), metal


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed; scripts/kernel_registers.py says more")
@pytest.mark.parametrize(
    "shape", [EVERYTHING, SHAPES["Qwen3-4B 32/8/128, int4"], SHAPES["Qwen3-4B 32/8/128, bfloat16"]]
)
def test_nvcc_takes_it_and_nothing_spills(shape: tuple[int, ...]) -> None:
    found = list(texts(shape).values())
    if shape != EVERYTHING:  # the other two kernels hardly differ
        found = count(found[:1], found)
    for text in found:
        (kernel,) = compile_cuda(text)
        assert kernel.spill_bytes == 0, kernel
        assert kernel.registers <= 255
        assert kernel.shared_bytes <= 48 * 1024

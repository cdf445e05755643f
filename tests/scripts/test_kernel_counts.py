"""The counts of scripts/kernel_cost.py: of small kernels whose instructions are known."""

import pytest
from kernel_counts import classified, main_loop, size_of
from support.metal_host.ir import allocas, optimized


def compiled(body: str, *flags: str) -> str:
    """Optimized code of a function with this body, which has x, y and n."""
    signature = "void probe(device uint* y, const device float* x, int n)"
    text = f"""#define METAL_HOST_SPACES\n#include "shim.h"\n{signature} {{{body}}}\n"""
    return optimized(text, "probe", flags or ("-O2",))


def test_a_row_of_the_loop() -> None:
    code = compiled(
        "float sum = 0.0f;"
        "for (int i = 0; i < n; i += 12) {"
        "  sum += x[i] * x[i + 1];"
        "  sum += simd_shuffle_xor(fast::exp(sum), 4);"
        "  sum += float(int(y[i] << 3)) + float(y[i + 1] ^ 5u);"
        "  threadgroup_barrier(mem_flags::mem_threadgroup);"
        "}"
        "y[0] = as_type<uint>(sum);"
    )
    counts, step = main_loop(code)
    assert step() == 12
    expected = {"device load": 4, "device bytes": 16, "exp": 1, "shuffle": 1, "convert": 2, "shift": 1, "bitwise": 1}
    assert {kind: counts[kind] for kind in expected} == expected
    assert counts["barrier"] == 1
    assert counts["float"] == 5  # a product with its sum, exp2's product, three sums


def test_a_loop_in_the_loop_counts_as_often_as_it_runs() -> None:
    body = (
        "for (int i = 0; i < n; i++) {"
        '  _Pragma("clang loop unroll(disable)") for (int j = 0; j < 30; j += 3) y[i + j] ^= as_type<uint>(x[j]);'
        "}"
    )
    counts, _ = main_loop(compiled(body))
    assert (counts["device load"], counts["device store"], counts["bitwise"]) == (20, 10, 10)


def test_an_array_in_memory_is_found() -> None:
    body = (
        "uint a[64]; for (int i = 0; i < 64; i++) a[i] = y[i];"
        "for (int i = 0; i < n; i++) a[y[i] % 64] += 1; y[1] = a[n % 64];"
    )
    assert allocas(compiled(body)) == ["[64 x i32]"]
    assert main_loop(compiled(body))[0]["thread store"] > 0
    assert (
        allocas(compiled("uint a[4]; for (int i = 0; i < 4; i++) a[i] = y[i]; y[5] = a[n > 0];".replace("n > 0", "2")))
        == []
    )


def test_sizes() -> None:
    assert size_of("<4 x i32>, ptr addrspace(1) %x, align 16") == 16
    assert size_of("bfloat %3, ptr addrspace(1) %x") == 2


def test_what_is_not_known_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="not understood"):
        classified("  %1 = call float @somewhere(float %0)")
    with pytest.raises(RuntimeError, match="not understood"):
        classified("  %1 = frem float %0, %2")

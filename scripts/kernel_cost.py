"""What bounds the fused kernel on Apple's GPUs, computed from compiled code: no GPU has run it.

    python scripts/kernel_cost.py > FILE

Prints JSON: what a row costs in each shape of kernel_registers.py, and the least time of a call on each device, beside
MLX's attention in bfloat16, counted in the same way from the installed MLX's own text. A table goes to standard error.

A row is one token's key and value of one kv head, for all its query heads. Its cost is the instructions that simdgroups
issue for the inner loop's body, divided by the rows the body handles.
"""

import json
import math
import platform
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import kvant.blas  # noqa: F401  # isort: skip  (before MLX: it loads a faster one)

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from kernel_counts import main_loop
from kernel_registers import GROUP, SHAPES, TOKENS, Shape, run
from support.metal_host.compiler import find_ziglang
from support.metal_host.ir import allocas, optimized, optimized_call
from support.metal_host.source import KernelCall, kernel_call

from kvant.operators.kernels import launch
from kvant.operators.kernels.attend import threadgroup_shape

MODELS = ("Qwen2.5-0.5B 14/2/64", "Qwen2.5-7B 28/4/128", "Qwen3-4B 32/8/128")
CONTEXTS = (1024, 8192, 32768)

# A loop of constant length counts as unrolled, also where the text leaves that to the compiler: so does MLX's.
UNROLLED = ("-O2", "-mllvm", "-unroll-threshold=100000", "-mllvm", "-unroll-runtime=false")

# Cycles in which a scheduler of an Apple core issues an instruction for a simdgroup, where it is not 1; and cycles of
# the unit for complex instructions, which works beside the issue of others ("IMUL32 + 2 IADD32: 4.12"). Measured on an
# M1 Max: github.com/philipturner/metal-benchmarks. simd_sum is a sequence; thread memory counts by its bytes.
ISSUE = {"shuffle": 2, "simd_sum": 14.5, "barrier": 0, "thread load": 0, "thread store": 0}
COMPLEX = {"shift": 4, "convert": 4, "exp": 4, "multiply": 4, "divide": 6}
SCHEDULERS = 4  # of a core
L1_BYTES, L2_BYTES = 64, 32  # a core's and cycle: from its own cache, and from outside. Of the same source


@dataclass(frozen=True, slots=True)
class Device:
    """GPU cores, their clock in GHz and the memory's GB/s. large: MLX takes it for one of its larger GPUs."""

    cores: int
    clock: float
    bandwidth: float
    large: bool = False


# Cores and bandwidth as Apple announced them; M1's bandwidth: LPDDR4X-4266 on 128 bits. Clocks: metal-benchmarks
# for M1 and M2, hmc-tech.com for M3 and M4, of which its pages give 1.470 and 1.578.
DEVICES = {
    "M1": Device(8, 1.278, 68.25),
    "M1 Max": Device(32, 1.296, 400, True),
    "M2": Device(10, 1.398, 100),
    "M2 Max": Device(38, 1.398, 400, True),
    "M3": Device(10, 1.398, 100),
    "M3 Max": Device(40, 1.398, 400, True),
    "M4": Device(10, 1.470, 120),
    "M4 Max": Device(40, 1.578, 546, True),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """What a row takes: instructions of simdgroups by class, and bytes that their lanes ask for, by memory."""

    counts: dict[str, float]

    @property
    def issue(self) -> float:
        return sum(ISSUE.get(kind, 1) * n for kind, n in self.counts.items() if " bytes" not in kind)

    @property
    def complex(self) -> float:
        return sum(COMPLEX.get(kind, 0) * n for kind, n in self.counts.items())


@dataclass(frozen=True, slots=True)
class Bound:
    """Least microseconds of a call that the memory, the cores' caches and arithmetic leave; it takes the largest."""

    memory: float
    cache: float
    arithmetic: float


# ---- what a row costs ------------------------------------------------------------------------------------------------


@cache
def metal_calls(shape: Shape, tokens: int = TOKENS) -> dict[str, KernelCall]:
    """The launches of a shape on Metal, by the kernel's name."""
    found: dict[str, KernelCall] = {}
    make = launch._kernel.__wrapped__

    def kernel(name: str, backend: launch.Backend) -> Callable[..., list[mx.array]]:
        def record(*, inputs: list[mx.array], stream: Any, **given: Any) -> list[mx.array]:
            found[name] = kernel_call(make(name, "metal"), inputs, **given)
            return [mx.zeros(*kind) for kind in zip(given["output_shapes"], given["output_dtypes"], strict=True)]

        return record

    with patch.object(launch, "_kernel", kernel):
        run(shape, "metal", tokens)
    return found


def per_row(counts: Counter[str], share: float) -> Cost:
    """Of a body's counts; share: how many simdgroups run it, for how many rows."""
    return Cost({kind: n * share * (32 if " bytes" in kind else 1) for kind, n in sorted(counts.items())})


def rows_of(call: KernelCall, shape: Shape) -> float:
    """Rows that a simdgroup handles in a pass of its loop, divided by the simdgroups that read the same rows."""
    alone = replace(call, text=call.text.replace("settings[KVANT_SHARING]", "1"))  # no other takes rows between its own
    _, rows = main_loop(optimized_call(alone, UNROLLED))
    width, most = max(shape.D, shape.Dv), shape.queries or None
    tiles, groups, _, _ = threadgroup_shape(shape.H // shape.K * shape.S, shape.pairs, "metal", width, most)
    return rows() / groups / tiles


@cache
def metal_cost(shape: Shape) -> Cost:
    """Of the first pass on Metal."""
    call = metal_calls(shape)["attend"]
    counts, _ = main_loop(optimized_call(call, UNROLLED))
    if allocas(code := optimized_call(call)):  # what is not unrolled as the text has it stays in thread memory
        counts.update({kind: n for kind, n in main_loop(code)[0].items() if kind.startswith("thread ")})
    return per_row(counts, 1 / rows_of(call, shape))


@cache
def mlx_cost(shape: Shape, two_passes: bool) -> Cost:
    """Of sdpa_vector, or of the first of its two passes, in bfloat16, as the installed MLX ships it."""
    path = Path(str(mx.__file__)).parent / "include/mlx/backend/metal/kernels/sdpa_vector.h"
    text = re.sub(r"#include <metal_\w+>", "", path.read_text())
    text = re.sub(r"constant int blocks \[\[.*?\]\];", "constant int blocks = 64;", text)
    text = re.sub(r"constant bool (\w+) \[\[.*?\]\];", r"constant bool \1 = false;", text)
    text = re.sub(r"threadgroup (U \w+\[)", r"static threadgroup \1", text)
    name = "sdpa_vector_2pass_1" if two_passes else "sdpa_vector"
    text += f"template decltype({name}<bfloat, {shape.D}, {shape.D}>) {name}<bfloat, {shape.D}, {shape.D}>;\n"
    limits = "template <> struct Limits<bfloat> : Limits<float> {};"
    code = optimized(f'#define METAL_HOST_SPACES\n#include "shim.h"\n{limits}\n{text}', name, UNROLLED)
    counts, _ = main_loop(code)
    return per_row(counts, shape.H / shape.K / counts["simd_sum"])  # one sum for a row, in a simdgroup of each query


# ---- what bounds a call ----------------------------------------------------------------------------------------------


def bound(device: Device, cost: Cost, rows: int, memory_bytes: float, groups: int, simdgroups: int) -> Bound:
    """rows: of all kv heads. groups: threadgroups, of so many simdgroups each; no more cores than these are at work.

    What a launch takes and waiting for memory do not count, so no call is this fast.
    """
    cores = min(device.cores, groups)
    schedulers = min(SCHEDULERS * cores, groups * simdgroups)
    asked = cost.counts.get("device bytes", 0) + cost.counts.get("thread bytes", 0)
    us = 1e-3 / device.clock  # of a cycle
    return Bound(
        memory=max(memory_bytes * 1e-3 / device.bandwidth, memory_bytes / L2_BYTES / cores * us),
        cache=rows * asked / L1_BYTES / cores * us,
        arithmetic=rows * max(cost.issue, cost.complex) / schedulers * us,
    )


def kvant_bound(device: Device, shape: Shape, tokens: int, cost: Cost) -> Bound:
    call = metal_calls(shape, tokens)["attend"]
    elements = shape.D + (shape.Dv or shape.D)
    row = elements * (shape.bits or 16) / 8 + (2 * elements / GROUP if shape.bits else 0)
    partial = 2 * sum(math.prod(x.shape) * x.dtype.size for x in call.outputs)  # written and read
    memory = shape.K * tokens * row + partial + 2 * 2 * shape.H * shape.S * shape.D
    groups = math.prod(call.grid) // math.prod(call.threadgroup)
    return bound(device, cost, shape.K * tokens, memory, groups, call.threadgroup[0] // 32)


def mlx_bound(device: Device, shape: Shape, tokens: int) -> Bound:
    """With the blocks that mlx/backend/metal/scaled_dot_product_attention.cpp chooses."""
    two_passes = tokens >= (1024 if device.large else 4096)
    queries = shape.H // shape.K
    blocks = 64 if queries >= 4 else 32
    if device.large:
        blocks = 64 if tokens <= 1024 or queries <= 4 else 128 if tokens <= 8192 else 256
    groups, simdgroups = (shape.K * blocks, queries) if two_passes else (shape.H, 32)
    partial = 2 * shape.H * blocks * (2 * shape.D + 8) if two_passes else 0
    memory = shape.K * tokens * 4 * shape.D + partial + 4 * shape.H * shape.D
    return bound(device, mlx_cost(shape, two_passes), shape.K * tokens, memory, groups, simdgroups)


# ---- what is printed -------------------------------------------------------------------------------------------------


def main() -> None:
    """Print the JSON, and for people a Markdown table: kvant's least time divided by MLX's.

    It says what bounds it, too: m memory, c a core's own cache, a arithmetic.
    """
    costs = {"metal": {name: described(metal_cost(shape)) for name, shape in SHAPES.items()}, "mlx": {}}
    bounds: dict[str, dict[str, list[float]]] = {}
    print("| model, tokens, GPU | MLX bf16 | 8 bits | 4 bits |\n| --- | --- | --- | --- |", file=sys.stderr)
    for model in MODELS:
        plain = SHAPES[f"{model}, int8"]
        costs["mlx"] |= {f"{model}, {n} pass": described(mlx_cost(plain, n == "two")) for n in ("one", "two")}
        for tokens, (kind, device) in product(CONTEXTS, DEVICES.items()):
            found = {"MLX": mlx_bound(device, plain, tokens)}
            for bits in ("int8", "int4"):
                shape = SHAPES[f"{model}, {bits}"]
                found[bits] = kvant_bound(device, shape, tokens, metal_cost(shape))
            least = {engine: [round(us, 1) for us in astuple(bound)] for engine, bound in found.items()}
            bounds[f"{model}, {tokens} tokens, {kind}"] = least
            theirs = max(least["MLX"])
            cells = [f"{max(own) / theirs:.2f} {'mca'[own.index(max(own))]}" for own in least.values()]
            print(f"| {model}, {tokens}, {kind} | {theirs:.0f} us | {cells[1]} | {cells[2]} |", file=sys.stderr)
    record = {
        "versions": {"mlx": mx.__version__, "clang": find_ziglang().version, "python": platform.python_version()},
        "devices": {name: asdict(device) for name, device in DEVICES.items()},
        "per row": costs,
        "least us by memory, cache, arithmetic": bounds,
    }
    print(re.sub(r"\[[^]]*\]", lambda m: " ".join(m[0].split()), json.dumps(record, indent=1)))  # a list in one line


def described(cost: Cost) -> dict[str, float]:
    """Rounded, with the cycles of issue and of the complex unit."""
    return {kind: round(n, 2) for kind, n in ({"issue": cost.issue, "complex": cost.complex} | cost.counts).items()}


if __name__ == "__main__":
    main()

"""What the fused kernel's inner loop costs, counted from compiled code: no GPU is needed, and none has run it.

    python scripts/kernel_cost.py [--json FILE]            instructions per cached row, and what bounds each device
    python scripts/kernel_cost.py --nvdisasm PROGRAM       also CUDA's, from nvcc's machine code

A row is one token's key and value of one kv head. Its cost is of all query heads of that kv head: the instructions
that simdgroups issue for the loop's body, divided by the rows that the body handles.
"""

import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import kvant.blas  # noqa: F401  # isort: skip  (before MLX: it loads a faster one)

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from kernel_registers import GROUP, SHAPES, TOKENS, Shape, run
from support.metal_host.ir import optimized, optimized_call
from support.metal_host.source import KernelCall, kernel_call

from kvant.operators.kernels import launch

# A loop of constant length is counted as unrolled, in the text before the unroll macro and in MLX's too.
UNROLLED = ["-O2", "-mllvm", "-unroll-threshold=100000", "-mllvm", "-unroll-runtime=false"]

# Cycles in which a scheduler of an Apple core issues an instruction for a simdgroup, where it is not 1, and cycles of
# the unit that a scheduler has for complex instructions, beside which it issues others. Both measured on an M1 Max:
# github.com/philipturner/metal-benchmarks. simd_sum is a sequence.
CYCLES = {"shuffle": 2, "simd_sum": 14.5, "barrier": 0, "thread load": 0, "thread store": 0}
COMPLEX = {"shift": 4, "convert": 4, "exp": 4, "multiply": 4, "divide": 6}


@dataclass(frozen=True, slots=True)
class Cost:
    """What a row takes: instructions of simdgroups by class, and bytes that their lanes ask for, by memory."""

    counts: dict[str, float]

    @property
    def cycles(self) -> float:
        """Cycles of one scheduler: to issue them all, or of its complex unit where that takes longer."""
        issued = sum(CYCLES.get(kind, 1) * n for kind, n in self.counts.items() if " bytes" not in kind)
        return max(issued, sum(COMPLEX.get(kind, 0) * n for kind, n in self.counts.items()))


def metal_calls(shape: Shape, tokens: int = TOKENS) -> dict[str, KernelCall]:
    """What a shape launches on Metal, by the kernel's name."""
    found: dict[str, KernelCall] = {}
    make = launch._kernel.__wrapped__

    def kernel(name: str, backend: launch.Backend) -> Callable[..., list[mx.array]]:
        def record(*, inputs: list[mx.array], stream: Any, **given: Any) -> list[mx.array]:
            found[name] = kernel_call(make(name, backend), inputs, **given)
            return [mx.zeros(*kind) for kind in zip(given["output_shapes"], given["output_dtypes"], strict=True)]

        return record

    with patch.object(launch, "_kernel", kernel):
        run(shape, "metal", tokens)
    return found


def cost_of(shape: Shape) -> Cost:
    """Of the first pass on Metal."""
    call = metal_calls(shape)["attend"]
    counts, rows = main_loop(optimized_call(call, UNROLLED))
    simdgroups = call.threadgroup[0] // 32 * (call.grid[0] // call.threadgroup[0] // shape.K)  # that read the same rows
    counts.update({kind: n for kind, n in main_loop(optimized_call(call))[0].items() if kind.startswith("thread ")})
    return per_row(counts, simdgroups / rows())


def per_row(counts: Counter[str], share: float) -> Cost:
    """Of a body's counts; share: how many simdgroups run it, for how many rows."""
    return Cost({kind: n * share * (32 if " bytes" in kind else 1) for kind, n in sorted(counts.items())})


# ---- LLVM's intermediate code ----------------------------------------------------------------------------------------

_INSTRUCTION = re.compile(r"^ +(?:(%\S+) = )?(?:tail |musttail |notail )?([a-z]+) ?(.*)$")
_FLOATS = {"fadd", "fsub", "fmul", "fneg"}
_FREE = {"phi", "getelementptr", "bitcast", "freeze", "icmp", "fcmp", "zext", "sext", "trunc", "fptrunc", "ret"}
_FREE |= {"extractelement", "insertelement", "shufflevector", "ptrtoint", "inttoptr", "addrspacecast", "unreachable"}
_SPACES = {"1": "device", "2": "constant", "3": "shared", None: "thread"}
Blocks = dict[str, list[str]]


def main_loop(code: str) -> tuple[Counter[str], Callable[[], int]]:
    """Instructions and bytes of one pass of a function's largest loop; and how far its counter goes in a pass.

    A loop within it counts as often as it runs. Of a branch both sides count.
    """
    blocks: Blocks = {}
    name = "entry"
    for line in code.splitlines()[1:-1]:
        if label := re.match(r"([\w.]+):", line):
            name = label[1]
        elif line.strip():
            blocks.setdefault(name, []).append(line)
    loop = max(loops(blocks, set(blocks)), key=lambda names: sum(len(blocks[n]) for n in names))
    return counted(blocks, loop), lambda: counter(blocks, loop)[0]


def loops(blocks: Blocks, names: set[str]) -> list[set[str]]:
    """The outermost loops among these blocks: each a set of blocks that reach each other."""
    reached = {n: reachable(blocks, n, names) for n in names}
    found = {frozenset(m for m in reached[n] if n in reached[m]) for n in names if n in reached[n]}
    return [set(part) for part in found]


def reachable(blocks: Blocks, start: str, names: set[str]) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        for target in re.findall(r"label %([\w.]+)", blocks[todo.pop()][-1]):
            if target in names and target not in seen:
                seen.add(target)
                todo.append(target)
    return seen


def header(blocks: Blocks, loop: set[str]) -> str:
    """The block by which a loop is entered."""
    outside = [lines[-1] for n, lines in blocks.items() if n not in loop]
    return next(n for n in loop if any(re.search(rf"label %{n}\b", line) for line in outside))


def counter(blocks: Blocks, loop: set[str]) -> tuple[int, int | None]:
    """How far a loop's counter goes in a pass, and how often it runs where its end is a constant."""
    lines = [line for n in loop for line in blocks[n]]
    phis = {m[1]: m[2] for line in blocks[header(blocks, loop)] if (m := re.match(r" +(%\S+) = phi i\d+ (.*)", line))}
    for line in lines:
        step = re.match(r" +(%\S+) = add[a-z ]* i\d+ (%\S+), (\d+)$", line)
        if not step or f"[ {step[1]}," not in phis.get(step[2], ""):
            continue
        for test in lines:
            if end := re.search(rf"icmp \w+ i\d+ ({re.escape(step[1])}|{re.escape(step[2])}), (\d+|%\S+)$", test):
                last = end[2] if end[2].startswith("%") else int(end[2]) + (0 if end[1] == step[1] else int(step[3]))
                return int(step[3]), None if isinstance(last, str) else math.ceil(last / int(step[3]))
    raise RuntimeError(f"no counter found in a loop of {len(lines)} instructions")


def counted(blocks: Blocks, loop: set[str]) -> Counter[str]:
    found: Counter[str] = Counter()
    inner = loops(blocks, loop - {header(blocks, loop)})
    for part in inner:
        _, times = counter(blocks, part)
        if times is None:
            raise RuntimeError("a loop within the loop has no constant end")
        found.update({kind: times * n for kind, n in counted(blocks, part).items()})
    for name in loop.difference(*inner):
        for line in blocks[name]:
            found.update(classified(line))
    return found


def classified(line: str) -> dict[str, int]:
    """An instruction's class and how many of a GPU's it is, or nothing where it takes none."""
    parts = _INSTRUCTION.match(line)
    if parts is None:
        raise RuntimeError(f"not understood: {line}")
    operation, rest = parts[2], parts[3]
    lanes = int(vector[1]) if (vector := re.match(r"[a-z ]*<(\d+) x", rest)) else 1
    wide = bool(re.match(r"[a-z ]*i64\b", rest))
    if operation in ("load", "store"):
        space = re.search(r"ptr(?: addrspace\((\d)\))? ", rest)
        where = _SPACES[space[1] if space else None]
        if where == "constant":  # the same for all lanes: kept in uniform registers
            return {}
        return {f"{where} {operation}": 1, f"{where} bytes": size_of(rest)}
    if operation in _FLOATS:
        return {"float": lanes}
    if operation == "call":
        return called(rest)
    if operation in ("and", "or", "xor"):
        return {} if " i1 " in f" {rest}" else {"bitwise": lanes * (2 if wide else 1)}
    if operation in ("shl", "lshr", "ashr"):
        return {"shift": lanes}
    if operation in ("add", "sub"):
        return {"integer": lanes * (4 if wide else 1)}
    if operation == "mul":
        return {"multiply": lanes * (4 if wide else 1)}
    if operation in ("sitofp", "uitofp", "fptosi", "fptoui"):
        return {"convert": lanes}
    if operation in ("sdiv", "udiv", "srem", "urem"):  # by a constant
        return {"shift": lanes, "integer": lanes} if power_of_two(rest) else {"multiply": 2 * lanes, "shift": lanes}
    if operation == "fdiv":
        return {"divide": lanes, "float": lanes}
    if operation == "fpext":  # an instruction takes a half as it is; a bfloat has to be moved
        return {"bitwise": lanes} if "bfloat" in rest.split(" to ")[0] else {}
    if operation == "select":
        return {"select": lanes}
    if operation in ("br", "switch"):
        return {"branch": 1} if rest.startswith(("i1", "i32")) else {}
    if operation in _FREE:
        return {}
    raise RuntimeError(f"not understood: {line}")


def power_of_two(rest: str) -> bool:
    divisor = int(rest.rsplit(", ", 1)[1])
    return divisor & (divisor - 1) == 0


def size_of(rest: str) -> int:
    """Bytes of the type that a load or store names first."""
    vector, kind = re.match(r"(?:volatile )?(?:<(\d+) x )?(\w+)", rest).groups()  # type: ignore[union-attr]
    bits = {"half": 16, "bfloat": 16, "float": 32, "ptr": 64}.get(kind) or int(kind[1:])
    return int(vector or 1) * bits // 8


def called(rest: str) -> dict[str, int]:
    name = re.search(r"@([\w.]+)", rest)
    lanes = int(vector[1]) if (vector := re.match(r"[\w ]*<(\d+) x", rest)) else 1
    known = {
        r"llvm\.fmuladd": {"float": lanes},
        r"llvm\.(fma|fabs|copysign|maxnum|minnum)": {"float": lanes},
        r"llvm\.exp": {"exp": lanes, "float": lanes},  # exp2 and a product
        r"tanh": {"exp": 1, "divide": 1, "float": 4},
        r"llvm\.[su](max|min)|llvm\.abs": {"select": lanes},
        r"llvm\.fsh[lr]": {"shift": lanes},
        r"_ZN10metal_host7shuffle": {"shuffle": 1},
        r"_ZN10metal_host6reduce": {"simd_sum": 1},
        r"metal_host_(simdgroup_)?barrier": {"barrier": 1},
        r"llvm\.(assume|lifetime|experimental)": {},
    }
    for pattern, kinds in known.items():
        if name and re.match(pattern, name[1]):
            return kinds
    raise RuntimeError(f"not understood: call {rest}")


# ---- MLX's own attention ---------------------------------------------------------------------------------------------


def mlx_cost(shape: Shape, two_passes: bool) -> Cost:
    """Of sdpa_vector, or of the first of its two passes, in bfloat16, as the installed MLX ships it."""
    path = Path(str(mx.__file__)).parent / "include/mlx/backend/metal/kernels/sdpa_vector.h"
    text = re.sub(r"#include <metal_\w+>", "", path.read_text())
    text = re.sub(r"constant int blocks \[\[.*?\]\];", "constant int blocks = 64;", text)
    text = re.sub(r"constant bool (\w+) \[\[.*?\]\];", r"constant bool \1 = false;", text)
    text = re.sub(r"threadgroup (U \w+\[)", r"static threadgroup \1", text)
    name = "sdpa_vector_2pass_1" if two_passes else "sdpa_vector"
    instance = f"template decltype({name}<bfloat, {shape.D}, {shape.D}>) {name}<bfloat, {shape.D}, {shape.D}>;"
    limits = "template <> struct Limits<bfloat> : Limits<float> {};"
    code = optimized(f'#define METAL_HOST_SPACES\n#include "shim.h"\n{limits}\n{text}\n{instance}\n', name, UNROLLED)
    counts, _ = main_loop(code)
    rows = counts["simd_sum"]  # one sum a row: the loop's counter goes in steps of blocks
    return per_row(counts, shape.H / shape.K / rows)


# ---- devices ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Device:
    """GPU cores, their clock in GHz and the memory's GB/s; large: MLX's name of it ends in s."""

    cores: int
    clock: float
    bandwidth: float
    large: bool = False


# Cores and bandwidth: Apple's announcements. Clocks: metal-benchmarks for M1 and M2, hmc-tech.com for M3 and M4.
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
SCHEDULERS = 4  # of a core
L1_BYTES, L2_BYTES = 64, 32  # a core's and cycle: from its own cache, from outside. metal-benchmarks


@dataclass(frozen=True, slots=True)
class Bound:
    """Least microseconds of a call, by what bounds it."""

    memory: float
    cache: float
    arithmetic: float

    @property
    def us(self) -> float:
        return max(self.memory, self.cache, self.arithmetic)

    @property
    def by(self) -> str:
        return max(("memory", "cache", "arithmetic"), key=lambda name: getattr(self, name))


def bound(device: Device, cost: Cost, rows: int, memory_bytes: float, threadgroups: int, simdgroups: int) -> Bound:
    """rows: of all kv heads. Only as many cores are at work as there are threadgroups; neither latency nor launches count."""
    cores = min(device.cores, threadgroups)
    schedulers = min(SCHEDULERS * cores, threadgroups * simdgroups)
    asked = cost.counts.get("device bytes", 0) + cost.counts.get("thread bytes", 0)
    ns = 1e-3 / device.clock
    return Bound(
        memory=max(memory_bytes * 1e-3 / device.bandwidth, memory_bytes / L2_BYTES / cores * ns),
        cache=rows * asked / L1_BYTES / cores * ns,
        arithmetic=rows * cost.cycles / schedulers * ns,
    )


def kvant_bound(device: Device, shape: Shape, tokens: int, cost: Cost) -> Bound:
    call = metal_calls(shape, tokens)["attend"]
    groups = math.prod(call.grid) // math.prod(call.threadgroup)
    row = 2 * shape.D * (shape.bits or 16) / 8 + (2 * 2 * shape.D / GROUP if shape.bits else 0)
    partial = 2 * sum(math.prod(x.shape) * x.dtype.size for x in call.outputs)
    ends = 2 * 2 * shape.H * shape.S * shape.D
    memory = shape.K * tokens * row + partial + ends
    return bound(device, cost, shape.K * tokens, memory, groups, call.threadgroup[0] // 32)


def mlx_bound(device: Device, shape: Shape, tokens: int) -> Bound:
    two_passes = tokens >= (1024 if device.large else 4096)  # scaled_dot_product_attention.cpp
    queries = shape.H // shape.K
    blocks = 64 if queries >= 4 else 32
    if device.large:
        blocks = 64 if tokens <= 1024 or queries <= 4 else 128 if tokens <= 8192 else 256
    groups, simdgroups = (shape.K * blocks, queries) if two_passes else (shape.H, 32)
    partial = 2 * shape.H * blocks * (2 * shape.D + 8) if two_passes else 0
    memory = shape.K * tokens * 4 * shape.D + partial + 4 * shape.H * shape.D
    return bound(device, mlx_cost(shape, two_passes), shape.K * tokens, memory, groups, simdgroups)


def main() -> int:
    for name, shape in SHAPES.items():
        cost = cost_of(shape)
        print(name, round(cost.cycles, 1), {k: round(v, 2) for k, v in cost.counts.items()})
    for name in ("Qwen2.5-0.5B 14/2/64", "Qwen2.5-7B 28/4/128", "Qwen3-4B 32/8/128"):
        plain = SHAPES[f"{name}, int8"]
        for two in (False, True):
            m = mlx_cost(plain, two)
            print("MLX", name, two, round(m.cycles, 1), {k: round(v, 2) for k, v in m.counts.items()})
        for tokens in (1024, 8192, 32768):
            for kind, device in DEVICES.items():
                theirs = mlx_bound(device, plain, tokens)
                line = f"{name:22} {tokens:6} {kind:7} MLX {theirs.us:7.0f} {theirs.by[:6]:7}"
                for bits in (8, 4):
                    shape = SHAPES[f"{name}, int{bits}"]
                    ours = kvant_bound(device, shape, tokens, cost_of(shape))
                    line += f" | {bits} bits {ours.memory:7.0f} {ours.cache:7.0f} {ours.arithmetic:7.0f} {ours.us / theirs.us:5.2f}"
                print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
